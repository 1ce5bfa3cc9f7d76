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
UNMERGED_HINT = (
    "peft adds it itself: AutoPeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)"
)
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])(\.default)?(\.weight)?")
_OTHER_KINDS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "monteclora_config",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
)
"""Settings of `peft.LoraConfig` that make something else of the adapter than a product of low rank."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model's weights as the adapter is made."""


@dataclass(frozen=True)
class Update:
    """The two factors of one module: `down` [r, inputs] (A) and `up` [outputs, r] (B)."""

    down: Entry
    up: Entry
    embedding: bool


@dataclass(frozen=True)
class Adapter:
    """An adapter by the base model's own names."""

    folder: Path
    settings: Mapping[str, Any]
    updates: Mapping[str, Update]
    """By the name of the module."""
    replaced: Mapping[str, Entry]
    """Parameters that were trained or saved in full, by name."""

    def scaling(self, module: str) -> float:
        """The factor of the product that is added to the weight of `module`."""
        alpha = float(self._by_pattern("alpha_pattern", module, self.settings.get("lora_alpha", 8)))
        rank = self.updates[module].down.shape[0]
        return alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank

    def _by_pattern(self, key: str, module: str, default: Any) -> Any:
        """As peft's `get_pattern_key` (utils/other.py): the first pattern that the end of the name fits."""
        patterns: Mapping[str, Any] = self.settings.get(key) or {}
        fits = (value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", module))
        return next(fits, default)


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


def refuse_other_kinds(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise `ModelError` for an adapter that is more, or something else, than a product of low rank."""
    kind = settings.get("peft_type")
    other = f"a {kind} adapter" if kind != "LORA" else ""
    for key in _OTHER_KINDS:
        if settings.get(key):
            other = other or f"made with {key}"
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASES):
        other = other or f"made with init_lora_weights={start}, which changed the base model"
    if other:
        raise ModelError(f"{folder} is {other}, which dstool does not merge", hint=UNMERGED_HINT)


def peft_names(weights: Weights) -> Weights:
    """The weights of a training checkpoint by the names that peft gives them in a file.

    In training, peft's names have the adapter's own in them: `...q_proj.lora_A.default.weight`.
    """
    named = {_peft_name(name): weights.entry(name) for name in weights}
    return Weights({name: replace(entry, name=name) for name, entry in named.items()}, {}, weights.checkpoint)


def _peft_name(name: str) -> str:
    name = re.sub(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.default(?=\.|$)", r".\1", name)
    return re.sub(r"\.modules_to_save\.default(?=\.)", "", name)


def of_weights(folder: Path, weights: Weights) -> Adapter:
    """The adapter in `weights`, whose settings lie in `folder`.

    Raises:
        ModelError: it is of another kind than plain LoRA, or a part of it is missing.
    """
    settings = read_settings(folder)
    refuse_other_kinds(folder, settings)
    parts: dict[str, dict[str, Entry]] = {}
    replaced: dict[str, Entry] = {}
    embeddings = set()
    for full, entry in weights.entries.items():
        name = full.removeprefix(PREFIX)
        found = _PART.fullmatch(name)
        if found:
            parts.setdefault(found["module"], {})[found["part"]] = entry
            if found["embedding"]:
                embeddings.add(found["module"])
        elif ".original_module." not in name:  # peft's copy of what was replaced, after a resize
            plain = re.sub(r"\.modules_to_save(\.default)?(?=\.)|\.base_layer(?=\.)", "", name)
            replaced[plain] = replace(entry, name=plain)
    for module, pair in parts.items():
        _check_pair(folder, module, pair)
    updates = {module: Update(pair["A"], pair["B"], module in embeddings) for module, pair in parts.items()}
    return Adapter(folder, settings, updates, replaced)


def _check_pair(folder: Path, module: str, pair: Mapping[str, Entry]) -> None:
    if missing := {"A", "B"} - pair.keys():
        raise ModelError(
            f"{folder}: the adapter has no lora_{missing.pop()} for {module}", hint="copy the adapter again"
        )
    shapes = pair["A"].shape, pair["B"].shape
    if any(entry.stride is not None for entry in pair.values()) or {len(shape) for shape in shapes} != {2}:
        raise ModelError(
            f"{folder}: the adapter of {module} is of shape {list(shapes[0])} and {list(shapes[1])}, and not "
            "of a plain linear layer",
            hint=UNMERGED_HINT,
        )
    if not 0 < shapes[0][0] == shapes[1][1]:
        raise ModelError(
            f"{folder}: the adapter of {module} is {list(shapes[1])} times {list(shapes[0])}, which do not "
            "fit each other",
            hint="it was saved while ZeRO-3 had it partitioned: merge the checkpoint instead",
        )
