"""A LoRA adapter and its base model: finding the base, adding the one to the other, and proving the result.

The sum is that of peft's `merge_and_unload`, but never in memory: each weight becomes an entry that knows
what is added to it, and `stream` computes its rows as it copies them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
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
        ModelError: the base is quantised, or the adapter does not fit it.
    """
    config = _base_config(base)
    if config.get("quantization_config"):
        raise ModelError(
            f"the weights of {base} are quantised, and an adapter cannot be added to them",
            hint="--base-model FOLDER_OR_NAME of the same model in 16 or 32 bits",
        )
    model = models.meta_model(folder)
    same_kind = config.get("architectures") == folder.config.architectures
    renamed = _renaming(model)
    result = _by_model_names(models.read_weights(base), model, renamed, keep_all=same_kind)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    _lay_beneath(result, tied, adapter)
    _part(result, tied, adapter)
    known = model.state_dict()
    for name, entry in adapter.replaced.items():
        if (mapped := renamed(name) or name) not in known:
            raise _no_fit(adapter, base, f"{name} is no weight of {type(model).__name__}")
        result[mapped] = replace(entry, name=mapped)
    for module, update in adapter.updates().items():
        _add(result, renamed(f"{module}.weight") or f"{module}.weight", module, update, adapter, base, model)
    for module, (indices, values) in adapter.tokens().items():
        _put_rows(result, f"{module}.weight", indices, values, adapter, base)
    for name, entry in result.items():
        if name in known and entry.shape != tuple(known[name].shape):
            raise _no_fit(
                adapter,
                base,
                f"{name} is of shape {list(entry.shape)} and would have to be {list(known[name].shape)}",
            )
    weights = Weights(result)
    parted = any(a in result and b in result and not reader.same(weights, a, b) for a, b in tied.items())
    return weights, {"tie_word_embeddings": False} if parted else {}


def _lay_beneath(result: dict[str, Entry], tied: Mapping[str, str], adapter: Adapter) -> None:
    """Take what the base was beneath the adapter, such as an embedding that was resized before the training."""
    for name, entry in adapter.beneath.items():
        result[name] = entry
        for one, other in tied.items():
            if name in (one, other) and not {one, other} <= adapter.beneath.keys():
                result.pop(other if name == one else one, None)


def _part(result: dict[str, Entry], tied: Mapping[str, str], adapter: Adapter) -> None:
    """Give each of two tied weights its own entry where the adapter changes one of them, or both.

    Trained rows of the one are also the other's, as in peft (utils/other.py `set_additional_trainable_modules`).
    """
    touched = {*adapter.replaced, *(f"{module}.weight" for module in adapter.parts)}
    shared = {f"{module}.weight" for module in adapter.tokens()}
    for name, source in tied.items():
        if not touched & {name, source}:
            continue
        if name not in touched and (source in shared or adapter.settings.get("ensure_weight_tying")):
            result.pop(name, None)
            continue
        for one, other in ((name, source), (source, name)):
            if one not in result and other in result:
                result[one] = replace(result[other], name=one)


def _add(
    result: dict[str, Entry],
    name: str,
    module: str,
    update: Update,
    adapter: Adapter,
    base: Path,
    model: Any,
) -> None:
    """Put the sum of a weight and of its update, and that of a bias, into `result`."""
    try:
        layer = model.get_submodule(name.removesuffix(".weight"))
    except AttributeError:  # one that Transformers makes into another on loading: a file has it as it was
        layer = None
        if name not in result:
            raise _no_fit(adapter, base, f"{type(model).__name__} has no {module}") from None
    plain = layer is None or adapter.is_parameter(module) or name != f"{module}.weight"
    if not plain and not isinstance(layer, torch.nn.Linear | torch.nn.Embedding | Conv1D):
        raise unmerged(adapter, f"has an adapter of {module}, a {type(layer).__name__}")
    transposed = not adapter.is_parameter(module) and (update.embedding or isinstance(layer, Conv1D))
    if transposed and update.magnitude is not None:
        raise unmerged(adapter, f"is made with use_dora for {module}, a {type(layer).__name__}")
    shape = (update.up.shape[0], update.down.shape[1])
    entry = _changeable(result, name, shape[::-1] if transposed else shape, adapter, base)
    change = LowRank(update.up, update.down, adapter.scaling(module), transposed, update.magnitude)
    result[name] = replace(entry, change=change)
    if update.bias is not None:
        bias = f"{name.removesuffix('.weight')}.bias"
        entry = _changeable(result, bias, update.bias.shape, adapter, base)
        result[bias] = replace(entry, change=LowRank(update.bias, None, adapter.scaling(module)))


def _put_rows(
    result: dict[str, Entry],
    name: str,
    indices: tuple[int, ...],
    values: Entry,
    adapter: Adapter,
    base: Path,
) -> None:
    """Put a weight of which some rows were trained into `result`."""
    shape = (result[name].shape[0] if name in result else 0, *values.shape[1:])
    entry = _changeable(result, name, shape, adapter, base)
    if len(indices) != values.shape[0] or not all(0 <= index < shape[0] for index in indices):
        raise _no_fit(
            adapter,
            base,
            f"its {values.shape[0]} trained rows of {name} ({shape[0]} rows) are those of "
            f"trainable_token_indices {list(indices)[:5]}",
        )
    result[name] = replace(entry, change=Rows(indices, values))


def _changeable(
    result: Mapping[str, Entry], name: str, shape: tuple[int, ...], adapter: Adapter, base: Path
) -> Entry:
    """The base's entry of `name`, which has `shape` and whose values can be computed with."""
    entry = result.get(name)
    if entry is None:
        raise _no_fit(adapter, base, f"the base has no {name}")
    if entry.shape != shape:
        raise _no_fit(adapter, base, f"{name} is of shape {list(entry.shape)}, the adapter of {list(shape)}")
    if entry.dtype not in NUMPY_TYPES or entry.stride is not None:
        raise ModelError(
            f"{base}: {name} is stored in a form ({entry.dtype}) that no adapter can be added to",
            hint="--base-model FOLDER_OR_NAME of the same model in 16 or 32 bits",
        )
    return entry


def _no_fit(adapter: Adapter, base: Path, why: str) -> ModelError:
    return ModelError(
        f"the adapter in {adapter.folder} does not fit the base model {base}: {why}",
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
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    try:
        with torch.device("meta"):
            model = get_peft_model(models.meta_model(whole), PeftConfig.from_pretrained(folder))
        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    except models.UNREADABLE as error:
        raise ModelError(
            f"peft does not take the adapter: {' '.join(str(error).split())[:300]}",
            hint="it was made by another version of peft, or for another base model",
        ) from error
    known = {f"{PREFIX}{name}" for name in models.meta_model(whole).state_dict()}
    resized = ("embed", "lm_head", "wte", "original_module", "base_layer")
    left_over = {
        name
        for name in weights.entries.keys() - expected.keys()
        if not (name in known or any(part in name for part in resized))
    }
    shapes = {name: tuple(value.shape) for name, value in expected.items()}
    mismatched = {
        name for name, entry in weights.entries.items() if name in shapes and entry.shape != shapes[name]
    }
    models.check_loading(
        folder,
        {
            "missing_keys": expected.keys() - weights.entries.keys(),
            "unexpected_keys": left_over,
            "mismatched_keys": mismatched,
        },
    )
