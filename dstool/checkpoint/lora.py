"""LoRA adapters as peft stores them: their names and settings, and what they do to each weight. No torch.

Names and scalings are those of peft 0.21: `tuners/lora/model.py`, `tuners/lora/layer.py` and
`utils/save_and_load.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstool.checkpoint.reader import Entry, Weights
from dstool.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
_TOKENS = "token_adapter.trainable_tokens_delta"
_A_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector|token_adapter\.trainable_tokens_delta)"
    r"(?:\.(?P<kind>weight|bias))?"
)
_NAMED = re.compile(
    r"\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector|modules_to_save"
    r"|token_adapter\.trainable_tokens_delta)\.(?P<adapter>(?!weight$|bias$)[^.]+)(?P<rest>\..+)?"
)
_WRAPPED = re.compile(r"(\.token_adapter)?\.base_layer(?=\.)|\.modules_to_save(?=\.)")
_NO_PARTS = (".original_module.", ".lora_velora_embed", ".trainable_tokens_original")
"""Copies of what the base had, and what only the training needs."""
_OTHER_KINDS = (
    "use_qalora",
    "layer_replication",
    "alora_invocation_tokens",
    "monteclora_config",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
)
"""Settings of `peft.LoraConfig` that make something else of the adapter than a product of low rank."""
_SAME_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights`, beside true and false, that leave the base model's weights as they are."""
_UNMERGEABLE = (
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "P_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "CPT",
    "ADAPTION_PROMPT",
)
_UNMERGEABLE_SETTINGS = (
    "use_qalora",
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
)
"""What peft itself cannot make a part of the weights, or not save then."""
_REPEATABLE = ("pissa", "olora")
"""Changes of the base that peft makes again, the same way, as it loads the adapter."""
_CLASSES = {"SEQ_CLS": "AutoPeftModelForSequenceClassification"}


@dataclass(frozen=True)
class Update:
    """The two factors of one module: `down` [r, inputs] (A) and `up` [outputs, r] (B)."""

    down: Entry
    up: Entry
    embedding: bool
    bias: Entry | None = None
    """Of `up` [outputs], with `lora_bias`."""
    magnitude: Entry | None = None
    """The lengths [outputs] that `use_dora` gives the rows."""


@dataclass(frozen=True)
class Adapter:
    """An adapter by the base model's own names."""

    folder: Path
    settings: Mapping[str, Any]
    names: frozenset[str]
    """Those in its file."""
    parts: Mapping[str, Mapping[str, Entry]]
    """What was found of each module, by peft's names for the parts."""
    replaced: Mapping[str, Entry]
    """Parameters that were trained or saved in full, by name."""
    beneath: Mapping[str, Entry]
    """The base's own parameters as they were beneath the adapter, where they were saved with it."""

    def updates(self) -> dict[str, Update]:
        """By the name of the module."""
        return {
            module: _update(self, module, parts)
            for module, parts in self.parts.items()
            if _TOKENS not in parts
        }

    def tokens(self) -> dict[str, tuple[tuple[int, ...], Entry]]:
        """Rows of embeddings that were trained: their numbers and what they are, by the module's name."""
        return {
            module: (self._indices(module), parts[_TOKENS])
            for module, parts in self.parts.items()
            if _TOKENS in parts
        }

    def scaling(self, module: str) -> float:
        """The factor of the product that is added to the weight of `module`."""
        alpha = float(self._by_pattern("alpha_pattern", module, self.settings.get("lora_alpha", 8)))
        parts = self.parts[module]
        rank = (parts.get("lora_A") or parts["lora_embedding_A"]).shape[0]
        return alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank

    def is_parameter(self, module: str) -> bool:
        """Whether the adapter is one of the weight as it lies there, and not of the layer around it."""
        targets = self.settings.get("target_parameters") or ()
        return any(f".{module}.weight".endswith(f".{target}") for target in targets)

    def _by_pattern(self, key: str, module: str, default: Any) -> Any:
        """As peft's `get_pattern_key` (utils/other.py): the first pattern that the end of the name fits."""
        patterns: Mapping[str, Any] = self.settings.get(key) or {}
        fits = (value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", module))
        return next(fits, default)

    def _indices(self, module: str) -> tuple[int, ...]:
        found = self.settings.get("trainable_token_indices")
        if isinstance(found, Mapping):
            found = next((each for name, each in found.items() if f".{module}".endswith(f".{name}")), None)
        return tuple(found or ())


def read_settings(folder: Path) -> dict[str, Any]:
    """The adapter_config.json in `folder`.

    Raises:
        ModelError: it is not there, or no JSON object.
    """
    path = folder / ADAPTER_CONFIG
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", hint="copy it from the run's folder") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON object", hint="copy the adapter again") from error


def peft_names(weights: Weights) -> Weights:
    """The weights of a training checkpoint by the names that peft gives them in a file.

    In training, peft's names have the adapter's own in them: `...q_proj.lora_A.default.weight`.

    Raises:
        ModelError: they are of more than one adapter.
    """
    adapters = {found["adapter"] for name in weights if (found := _NAMED.search(name))}
    if len(adapters) > 1:
        raise ModelError(
            f"the checkpoint holds several adapters: {', '.join(sorted(adapters))}",
            hint="merge the folder that peft saved of the one",
        )
    named = {_peft_name(name): weights.entry(name) for name in weights}
    return Weights({name: replace(entry, name=name) for name, entry in named.items()}, {}, weights.checkpoint)


def _peft_name(name: str) -> str:
    found = _NAMED.search(name)
    if found is None:
        return name
    part, rest = f".{found['part']}", found["rest"] or ""
    if found["part"] == "modules_to_save":
        part = ""
    elif found["part"] == "lora_magnitude_vector":
        rest = ""
    return f"{name[: found.start()]}{part}{rest}"


def of_weights(folder: Path, weights: Weights) -> Adapter:
    """The adapter in `weights`, whose settings lie in `folder`; of any kind."""
    parts: dict[str, dict[str, Entry]] = {}
    replaced: dict[str, Entry] = {}
    beneath: dict[str, Entry] = {}
    for full in weights:
        name, entry = full.removeprefix(PREFIX), weights.entry(full)
        if found := _A_PART.fullmatch(name):
            part = found["part"] if found["kind"] != "bias" else f"{found['part']}.bias"
            parts.setdefault(found["module"], {})[part] = entry
        elif not any(each in name for each in _NO_PARTS):
            plain = _WRAPPED.sub("", name)
            (beneath if ".base_layer." in name else replaced)[plain] = replace(entry, name=plain)
    return Adapter(folder, read_settings(folder), frozenset(weights), parts, replaced, beneath)


def refuse_other_kinds(adapter: Adapter) -> None:
    """Raise `ModelError` for an adapter that is more, or something else, than sums that `updates` gives."""
    settings = adapter.settings
    kind, start = settings.get("peft_type"), settings.get("init_lora_weights")
    other = [f"is an adapter of the kind {kind}"] if kind != "LORA" else []
    other += [f"is made with {key}" for key in _OTHER_KINDS if settings.get(key)]
    if isinstance(start, str) and start.lower() not in _SAME_BASE:
        other.append(f"is made with init_lora_weights={start}, which changed the base model")
    targets = [each for each in settings.get("target_parameters") or () if not f".{each}".endswith(".weight")]
    if targets:
        other.append(f"is one of parameters ({', '.join(targets)})")
    if settings.get("use_dora") and any("lora_embedding_A" in parts for parts in adapter.parts.values()):
        other.append("is made with use_dora for an embedding")
    if nested := next((module for module in adapter.parts if module.endswith(".base_layer")), None):
        other.append(f"has two adapters of {nested.removesuffix('.base_layer')}")
    if other:
        raise unmerged(adapter, other[0])
    adapter.updates()


def unmerged(adapter: Adapter, why: str) -> ModelError:
    """The error for an adapter that dstool cannot add to its base model; the hint is how peft does, if so."""
    settings = adapter.settings
    auto = _CLASSES.get(str(settings.get("task_type")), "AutoPeftModelForCausalLM")
    labels = ", num_labels=NUMBER" if auto in _CLASSES.values() else ""
    load = f"{auto}.from_pretrained({str(adapter.folder)!r}{labels})"
    start = settings.get("init_lora_weights")
    if settings.get("peft_type") in _UNMERGEABLE or any(settings.get(key) for key in _UNMERGEABLE_SETTINGS):
        hint = f"peft runs it beside its base model: {load}"
    elif isinstance(start, str) and start.lower() not in (*_SAME_BASE, *_REPEATABLE):
        hint = "save_pretrained(..., path_initial_model_for_weight_conversion=...) at the end of its run"
    else:
        code = f"from peft import {auto}; {load}.merge_and_unload().save_pretrained('merged')"
        hint = f'python -c "{code}"'
    return ModelError(f"{adapter.folder} {why}, which dstool does not merge", hint=hint)


def _update(adapter: Adapter, module: str, parts: Mapping[str, Entry]) -> Update:
    """The factors of a module.

    Raises:
        ModelError: one is missing, or is of a shape that a matrix has no factors of.
    """
    embedding = any("embedding" in part for part in parts)
    names = [f"lora_{'embedding_' if embedding else ''}{letter}" for letter in "AB"]
    needed = [("lora_magnitude_vector", "use_dora"), (f"{names[1]}.bias", "lora_bias")]
    for name in (*names, *(name for name, key in needed if adapter.settings.get(key) and not embedding)):
        if name not in parts:
            raise ModelError(
                f"{adapter.folder}: the adapter has no {name} for {module}", hint="copy the adapter again"
            )
    down, up = (parts[name] for name in names)
    bias, magnitude = parts.get(f"{names[1]}.bias"), parts.get("lora_magnitude_vector")
    shapes = [list(down.shape), list(up.shape)]
    if any(entry.stride is not None for entry in parts.values()) or {len(shape) for shape in shapes} != {2}:
        raise unmerged(adapter, f"has factors of shape {shapes[0]} and {shapes[1]} for {module}")
    if not 0 < shapes[0][0] == shapes[1][1]:
        raise ModelError(
            f"{adapter.folder}: the adapter of {module} is {shapes[1]} times {shapes[0]}, which do not fit "
            "each other",
            hint="it was saved while ZeRO-3 had it partitioned: merge the checkpoint instead",
        )
    return Update(down, up, embedding, bias, magnitude)
