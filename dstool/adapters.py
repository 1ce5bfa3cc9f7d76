"""A LoRA adapter and its base model: finding the base, adding the one to the other, and proving the result.

The sum is that of peft's `merge_and_unload`, but never in memory: each weight becomes an entry that knows
what is added to it, and `stream` computes its rows as it copies them.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from dstool import models, preflight
from dstool.checkpoint import reader
from dstool.checkpoint.cast import NUMPY_TYPES
from dstool.checkpoint.lora import PREFIX, Adapter, Update, unmerged
from dstool.checkpoint.reader import Entry, LowRank, Rows, Weights
from dstool.config import Task
from dstool.errors import ModelError

logger = logging.getLogger("dstool.adapters")

_TASKS: Mapping[str, Task] = {"SEQ_CLS": "text-classification", "CAUSAL_LM": "causal-lm"}
_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
_LAYERS = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
_BASE_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


# --- the base model ----------------------------------------------------------------------------------


def base_folder(named: str | None, settings: Mapping[str, Any], adapter: Path) -> Path:
    """The folder of the base model: that of `named`, or of what adapter_config.json names.

    Raises:
        ModelError: none is named, it is not there, or the hub cannot be reached.
    """
    name = named or settings.get("base_model_name_or_path")
    hint = f"--base-model FOLDER_OR_HUB_NAME, or correct it in {adapter / 'adapter_config.json'}"
    if not name:
        raise ModelError(f"{adapter} does not say what its base model is", hint="--base-model FOLDER_OR_NAME")
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_absolute() or str(name).startswith(".") or str(name).count("/") > 1 or path.exists():
        raise ModelError(f"{name}: no such folder, and it is the base model of {adapter}", hint=hint)
    return _from_hub(str(name), None if named else settings.get("revision"), hint)


def _from_hub(name: str, revision: str | None, hint: str) -> Path:
    from huggingface_hub import snapshot_download

    preflight.check_hub(name, "model", ModelError)
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_BASE_FILES)))
        if not models.has_weights(folder):
            snapshot_download(name, revision=revision, allow_patterns=["*.bin"])
    except models.UNREADABLE as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the base model {name} could not be had from the Hugging Face hub: {reason}", hint=hint
        ) from error
    return folder


def _base_config(base: Path) -> dict[str, Any]:
    try:
        return {**json.loads((base / "config.json").read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{base}: the base model has no config.json that can be read", hint="--base-model DIR"
        ) from error


# --- what the whole is ---------------------------------------------------------------------------------


def model_of(home: Path, base: Path, adapter: Adapter) -> tuple[models.ModelFolder, dict[str, Any]]:
    """What the base with the adapter is, and the values of the config.json that are then other ones.

    `home`, beside the adapter, has the config of the whole where dstool trained it; an adapter of others has
    none, and then it is that of the base, for the adapter's task, with the classes of its head.

    Raises:
        ModelError: no config, or one for no task that dstool knows.
    """
    changes: dict[str, Any] = {}
    if (home / "config.json").is_file():
        folder = models.open_folder(home)
    else:
        task = _TASKS.get(str(adapter.settings.get("task_type")))
        folder = _for_task(base, task) if task else models.open_folder(base)
        changes["architectures"] = folder.config.architectures
        head = next((adapter.replaced[name] for name in _HEADS if name in adapter.replaced), None)
        if folder.task == "text-classification" and head and folder.config.num_labels != head.shape[0]:
            folder.config.num_labels = head.shape[0]
            changes |= {"id2label": folder.config.id2label, "label2id": folder.config.label2id}
    if getattr(folder.config, "quantization_config", None) is not None:
        del folder.config.quantization_config
        changes["quantization_config"] = None
    model = models.meta_model(folder)
    table = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is table), None)
    rows = {**adapter.beneath, **adapter.replaced}.get(f"{name}.weight")
    text = folder.config.get_text_config()
    if rows is not None and rows.shape[0] != text.vocab_size:
        logger.info("the adapter has a vocabulary of %d, the base one of %d", rows.shape[0], text.vocab_size)
        text.vocab_size = rows.shape[0]
        if text is folder.config:
            changes["vocab_size"] = text.vocab_size
    return folder, changes


def _for_task(base: Path, task: Task) -> models.ModelFolder:
    _base_config(base)
    try:
        config = AutoConfig.from_pretrained(base)
        auto = getattr(transformers, models.AUTO_CLASSES[task])
        config.architectures = [auto._model_mapping[type(config)].__name__]
    except models.UNREADABLE as error:
        raise ModelError(
            f"{base}: not a model for {task}, which the adapter is for: {' '.join(str(error).split())[:200]}",
            hint="--base-model DIR names another",
        ) from error
    return models.ModelFolder(base, config, task)


# --- the sum ---------------------------------------------------------------------------------------------


def fold(base: Path, adapter: Adapter, folder: models.ModelFolder) -> tuple[Weights, dict[str, Any]]:
    """The base's weights with the adapter's added, by the names of the model in `folder`; and what that
    changes in its config.

    Nothing is read. Each sum is taken in fp32 whatever the types of its parts, and rounded once, as it is
    written. Where only one of two tied weights has an adapter, they are tied no longer.

    Raises:
        ModelError: the base is quantised, or the adapter does not fit it, or lacks rows for its tokens.
    """
    config = _base_config(base)
    if config.get("quantization_config"):
        raise ModelError(
            f"the weights of {base} are quantised, and an adapter cannot be added to them",
            hint="--base-model FOLDER_OR_NAME of the same model in 16 or 32 bits",
        )
    models.check_own_vocabulary(
        adapter.folder,
        folder.config,
        hint="save the adapter again with its new rows: save_pretrained(..., save_embedding_layers=True)",
    )
    model = models.meta_model(folder)
    renamed = _renaming(model)
    same_kind = config.get("architectures") == folder.config.architectures
    result = _by_model_names(models.read_weights(base), model, renamed, keep_all=same_kind)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    work = _Folding(base, adapter, model, result)
    work.check_whole(folder)
    work.lay_beneath(tied)
    work.part(tied)
    for name, entry in adapter.replaced.items():
        work.replace(renamed(name) or name, entry)
    for module, update in adapter.updates().items():
        work.add(renamed(f"{module}.weight") or f"{module}.weight", module, update)
    for module, (indices, values) in adapter.tokens().items():
        work.put_rows(f"{module}.weight", indices, values)
    work.check_shapes()
    weights = Weights(result)
    parted = any(a in result and b in result and not reader.same(weights, a, b) for a, b in tied.items())
    return weights, {"tie_word_embeddings": False} if parted else {}


@dataclass(frozen=True)
class _Folding:
    """The base's entries by the model's names, in `result`, as they become those of the sum one by one."""

    base: Path
    adapter: Adapter
    model: Any
    result: dict[str, Entry]

    def lay_beneath(self, tied: Mapping[str, str]) -> None:
        """Take what lay beneath the adapter, such as an embedding that was resized before the training."""
        beneath = self.adapter.beneath
        self.result.update(beneath)
        for name, source in tied.items():
            if (name in beneath) != (source in beneath):
                self.result.pop(source if name in beneath else name, None)

    def part(self, tied: Mapping[str, str]) -> None:
        """Give each of two tied weights its own entry where the adapter changes one of them, or both.

        Trained rows of the source are its copies' too, as in peft (utils/other.py
        `set_additional_trainable_modules`).
        """
        touched = {*self.adapter.replaced, *(f"{module}.weight" for module in self.adapter.parts)}
        shared = {f"{module}.weight" for module in self.adapter.tokens()}
        for name, source in tied.items():
            if not touched & {name, source}:
                continue
            if name not in touched and (source in shared or self.adapter.settings.get("ensure_weight_tying")):
                self.result.pop(name, None)
                continue
            for one, other in ((name, source), (source, name)):
                if one not in self.result and other in self.result:
                    self.result[one] = replace(self.result[other], name=one)

    def replace(self, name: str, entry: Entry) -> None:
        """Take a weight that was trained in full."""
        if name not in self.model.state_dict():
            raise self._no_fit(f"{name} is no weight of {type(self.model).__name__}")
        self.result[name] = replace(entry, name=name)

    def add(self, name: str, module: str, update: Update) -> None:
        """Make the weight `name` a sum, and the bias beside it.

        A file may have the weights of a module that Transformers makes into another on loading, such as
        those of single experts; an adapter that was trained on it as it was fits those.
        """
        layer = self._layer(name, module)
        is_parameter = self.adapter.is_parameter(module)
        as_it_was = layer is None or name != f"{module}.weight"
        if not (is_parameter or as_it_was or isinstance(layer, _LAYERS)):
            raise unmerged(self.adapter, f"has an adapter of {module}, a {type(layer).__name__}")
        transposed = not is_parameter and (update.embedding or isinstance(layer, Conv1D))
        if transposed and update.magnitude is not None:
            raise unmerged(self.adapter, f"is made with use_dora for {module}, a {type(layer).__name__}")
        shape = (update.up.shape[0], update.down.shape[1])
        entry = self._changeable(name, shape[::-1] if transposed else shape)
        if update.magnitude is not None and update.magnitude.shape != shape[:1]:
            raise self._no_fit(f"the lengths of {module} are of shape {list(update.magnitude.shape)}")
        scaling = self.adapter.scaling(module)
        change = LowRank(update.up, update.down, scaling, transposed, update.magnitude)
        self.result[name] = replace(entry, change=change)
        if update.bias is not None:
            bias = f"{name.removesuffix('.weight')}.bias"
            if bias not in self.result:
                raise unmerged(self.adapter, f"has a bias (lora_bias) for {module}, which has none")
            entry = self._changeable(bias, update.bias.shape)
            self.result[bias] = replace(entry, change=LowRank(update.bias, None, scaling))

    def put_rows(self, name: str, indices: tuple[int, ...], values: Entry) -> None:
        """Make `name` a weight of which some rows are other ones."""
        rows = self.result[name].shape[0] if name in self.result else 0
        entry = self._changeable(name, (rows, *values.shape[1:]))
        if len(indices) != values.shape[0] or not all(0 <= index < rows for index in indices):
            raise self._no_fit(
                f"it has {values.shape[0]} rows of {name}, of {rows}, and trainable_token_indices names "
                f"{len(indices)} up to {max(indices, default=0)}"
            )
        self.result[name] = replace(entry, change=Rows(indices, values))

    def check_shapes(self) -> None:
        """Raise `ModelError` where the sum has a weight of another shape than the model."""
        for name, value in self.model.state_dict().items():
            entry = self.result.get(name)
            if entry is not None and entry.shape != tuple(value.shape):
                raise self._no_fit(
                    f"{name} is of shape {list(entry.shape)}, and would have to be {list(value.shape)}"
                )

    def check_whole(self, folder: models.ModelFolder) -> None:
        """Raise `ModelError` where the adapter lacks what its settings name.

        So it does on a base with more layers than that of the training had.
        """
        own = {name for name, _ in self.model.named_modules()}
        if not self.adapter.parts.keys() <= own:
            return  # as an earlier release of Transformers named them
        missing = _expected(self.adapter.folder, folder).keys() - self.adapter.names
        if missing:
            raise self._no_fit(f"it lacks {min(missing).removeprefix(PREFIX)}, which its settings name")

    def _layer(self, name: str, module: str) -> Any:
        """The layer that the model has for the weight `name`; None where it has one for the file's alone."""
        try:
            return self.model.get_submodule(name.removesuffix(".weight"))
        except AttributeError:
            if name not in self.result:
                raise self._no_fit(f"{type(self.model).__name__} has no {module}") from None
            return None

    def _changeable(self, name: str, shape: tuple[int, ...]) -> Entry:
        """The base's entry of `name`, which has `shape`, and whose values can be computed with."""
        entry = self.result.get(name)
        if entry is None:
            raise self._no_fit(f"the base has no {name}")
        if entry.shape != shape:
            raise self._no_fit(f"{name} is of shape {list(entry.shape)}, the adapter of {list(shape)}")
        if entry.dtype not in NUMPY_TYPES:
            raise ModelError(
                f"{self.base}: {name} is of a type ({entry.dtype}) that no adapter can be added to",
                hint="--base-model FOLDER_OR_NAME of the same model in 16 or 32 bits",
            )
        return entry

    def _no_fit(self, why: str) -> ModelError:
        return ModelError(
            f"the adapter in {self.adapter.folder} does not fit the base model {self.base}: {why}",
            hint="--base-model FOLDER_OR_NAME of the model that it was trained on",
        )


def _by_model_names(
    weights: Weights, model: Any, renamed: Callable[[str], str | None], *, keep_all: bool
) -> dict[str, Entry]:
    """The entries of the base by the names that the whole model has for them.

    A base without a head has them without the model's prefix, and older files have older names. What the
    model has no place for, such as the head of another task, is left out unless `keep_all`.
    """
    known = model.state_dict()
    found: dict[str, Entry] = {}
    for name in weights:
        entry = weights.entry(name)
        mapped = renamed(name)
        if mapped in known or mapped is None or keep_all:
            mapped = mapped or name
            found[mapped] = replace(entry, name=mapped)
        else:
            logger.info("%s of the base is for another task, and left out", name)
    return found


def _renaming(model: Any) -> Callable[[str], str | None]:
    """A function that gives a name in a file as the model has it; None for one that is converted on loading.

    As Transformers does it (core_model_loading.py `rename_source_key`, 5.24).
    """
    known, prefix = model.state_dict(), f"{model.base_model_prefix}."
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    except (ImportError, TypeError):
        renamings = converters = []

    def rename(name: str) -> str | None:
        for plain in (name, prefix + name, name.removeprefix(prefix)):
            if plain in known:
                return plain
        if not renamings and not converters:
            return name
        try:
            mapped, converted = rename_source_key(name, renamings, converters, prefix.rstrip("."), known)
        except TypeError:  # an earlier release's arguments
            return name
        return None if converted else str(mapped)

    return rename


# --- the adapter on its own ----------------------------------------------------------------------------


def prove(folder: Path, weights: Weights, whole: models.ModelFolder) -> None:
    """Compare the names and shapes in `weights` with those that peft gives an adapter of these settings.

    Args:
        folder: where its adapter_config.json is.
        whole: the base model's config.

    Raises:
        ModelError: one is missing, left over or of another shape.
    """
    shapes = _expected(folder, whole)
    known = {f"{PREFIX}{name}" for name in models.meta_model(whole).state_dict()}
    resized = ("embed", "lm_head", "wte", "original_module", "base_layer")
    left_over = {
        name
        for name in weights.entries.keys() - shapes.keys()
        if not (name in known or any(part in name for part in resized))
    }
    mismatched = {
        name for name, entry in weights.entries.items() if name in shapes and entry.shape != shapes[name]
    }
    models.check_loading(
        folder,
        {
            "missing_keys": shapes.keys() - weights.entries.keys(),
            "unexpected_keys": left_over,
            "mismatched_keys": mismatched,
        },
    )


def _expected(folder: Path, whole: models.ModelFolder) -> dict[str, tuple[int, ...]]:
    """The names and shapes that peft gives an adapter with the settings in `folder`."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = PeftConfig.from_pretrained(folder)
            settings.init_lora_weights = False  # there are no values here to begin with
            model = get_peft_model(models.meta_model(whole), settings)
            state = get_peft_model_state_dict(model, save_embedding_layers=False)
    except models.UNREADABLE as error:
        raise ModelError(
            f"peft does not take the adapter: {' '.join(str(error).split())[:300]}",
            hint="it was made by another version of peft, or for another base model",
        ) from error
    return {name: tuple(value.shape) for name, value in state.items()}
