"""What lies beside a model's weights, and what config.json says of their type. Without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dstool.checkpoint import layout
from dstool.checkpoint.pickles import TORCH_NAMES
from dstool.errors import ModelError

TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model")
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    *TOKENIZER_FILES,
    "*.py",
)
NO_COMPANIONS = ("zero_to_fp32.py", "zero_to_torch.py")


def copy(source: Path, target: Path) -> None:
    """Copy what lies beside a model's weights: config, tokenizer, chat template, generation config."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in NO_COMPANIONS and not file.name.endswith(layout.INDEX):
                shutil.copyfile(file, target / file.name)


def set_dtype(folder: Path, dtype: str) -> None:
    """Write into `folder`'s config.json the type of the weights beside it, as safetensors names it.

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
    values.pop("torch_dtype", None)
    values["dtype"] = TORCH_NAMES[dtype]
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
