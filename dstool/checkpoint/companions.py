"""What lies beside a model's weights, and what config.json says of their type. Without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstool.checkpoint import layout, writer
from dstool.checkpoint.pickles import TORCH_NAMES
from dstool.errors import ModelError

TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model")
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "*processor_config.json",
    *TOKENIZER_FILES,
    "*.py",
)
CARD = "README.md"
CARD_SAYS = "with DeepSpeed and Transformers by dstool"
_GROUPS = (
    ("config.json", "*.py"),
    ("chat_template.jinja", *TOKENIZER_FILES),
    ("generation_config.json",),
    ("*processor_config.json",),
)
"""What belongs together: taken from another folder as a whole, or not at all."""
NO_COMPANIONS = ("zero_to_fp32.py", "zero_to_torch.py")


def copy(source: Path, target: Path) -> None:
    """Copy what lies beside a model's weights: config, tokenizer, chat template, generation config."""
    for file in _matches(source, COMPANIONS):
        shutil.copyfile(file, target / file.name)


def fill(source: Path, target: Path) -> None:
    """Copy from `source` what `target` has nothing of: the config, the tokenizer, the generation config."""
    for patterns in _GROUPS:
        if not _matches(target, patterns):
            for file in _matches(source, patterns):
                shutil.copyfile(file, target / file.name)


def replaceable(folder: Path, source: Path | None = None) -> list[str]:
    """The names of all that `consolidate` and `merge` write, which --force may replace in `folder`.

    A README.md is among them where `merge` wrote the one that is there: a model card of its own, or a copy of
    that in `source`.
    """
    names = [*COMPANIONS, *writer.WEIGHT_PATTERNS, "manifest.json"]
    card = folder / CARD
    if not card.is_file():
        return names
    text = card.read_bytes()
    copied = source is not None and (source / CARD).is_file() and text == (source / CARD).read_bytes()
    return [*names, CARD] if copied or CARD_SAYS.encode() in text else names


def _matches(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [
        file
        for pattern in patterns
        for file in folder.glob(pattern)
        if file.is_file() and file.name not in NO_COMPANIONS and not file.name.endswith(layout.INDEX)
    ]


def set_dtype(folder: Path, dtype: str) -> None:
    """Write into `folder`'s config.json the type of the weights beside it, as safetensors names it.

    Raises:
        ModelError: it is no JSON object.
    """
    set_values(folder, {"torch_dtype": None, "dtype": TORCH_NAMES[dtype]})


def set_values(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change values in `folder`'s config.json; None takes one out.

    Raises:
        ModelError: it is no JSON object.
    """
    path = folder / "config.json"
    try:
        values = {**json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ModelError(
            "the config.json beside the weights is no JSON object", hint="copy it from the model's folder"
        ) from error
    values |= changes
    values = {name: value for name, value in values.items() if value is not None or name not in changes}
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
