"""Weights into files that `from_pretrained` reads: safetensors or .bin, one file or shards and an index."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from dstool import files
from dstool.checkpoint import layout
from dstool.errors import CheckpointError, ConfigError, EnvironmentUnfit

Format = Literal["safetensors", "bin"]

WEIGHT_PATTERNS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
)
"""Every name that `write_weights` gives to a file."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)\s*", re.IGNORECASE)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Written:
    """What `write_weights` wrote."""

    folder: Path
    files: tuple[str, ...]
    """The weight files in order, then the index if there is one."""
    tensors: int
    """Stored ones; a tied parameter counts once."""
    parameters: int
    """Elements of the stored floating tensors."""
    bytes: int
    """Of all the files together."""


def write_weights(
    state: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_size: str = "5GB",
    file_format: Format = "safetensors",
) -> Written:
    """Write `state` into `folder`, which exists and should be a temporary one.

    Floating tensors are cast to `dtype`, or kept with None. Names of the same tensor are stored once,
    under the first. A tensor above `max_shard_size` (such as
    "5GB", powers of 1000) gets a file of its own.

    Raises:
        ConfigError: `max_shard_size` is no size.
        CheckpointError: nothing to write, a tensor of size 0, or a value too large for `dtype`.
        EnvironmentUnfit: the disk has too little room, or refuses a file.
    """
    limit = parse_size(max_shard_size)
    names = _stored_names(state)
    planned = {name: _planned(state[name], dtype) for name in names}
    pattern = layout.WEIGHT_FILES[file_format].replace(".", "{suffix}.")
    split = split_torch_state_dict_into_shards(planned, filename_pattern=pattern, max_shard_size=limit)
    _check_room(folder, sum(each.nbytes for each in planned.values()))
    written = list(split.filename_to_tensors)
    for file, members in split.filename_to_tensors.items():
        shard = {name: _cast(name, state[name], dtype) for name in members}
        _save(shard, folder / file, file_format)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        written.append(_write_index(index, folder, file_format))
    return Written(
        folder,
        tuple(written),
        tensors=len(names),
        parameters=sum(each.numel() for each in planned.values() if each.is_floating_point()),
        bytes=sum((folder / file).stat().st_size for file in written),
    )


def parse_size(text: str) -> int:
    """Bytes in a size such as "500MB" or "1.5 GB" (powers of 1000, as huggingface_hub counts)."""
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError(
            f"max_shard_size {text!r} is no size", hint="a number and KB, MB, GB or TB: --max-shard-size 5GB"
        )
    return size


def _stored_names(state: Mapping[str, torch.Tensor]) -> list[str]:
    """One name for each distinct tensor, in the order of `state`."""
    if not state:
        raise CheckpointError(
            "there are no tensors to write",
            hint="the weights are empty: name another folder or checkpoint",
        )
    tied: dict[tuple[Any, ...], list[str]] = {}
    for name, value in state.items():
        if value.numel() == 0:
            raise CheckpointError(
                f"{name} is empty, shape {list(value.shape)}: it was saved while ZeRO-3 had it partitioned",
                hint="gather it from the ZeRO checkpoint: dstool consolidate checkpoint-N",
            )
        tied.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), []).append(name)
    return [names[0] for names in tied.values()]


def _planned(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor without data, of the shape and dtype that will be stored."""
    stored = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=stored, device="meta")


def _cast(name: str, value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A contiguous tensor on the CPU that owns all of its memory, so that a shard holds nothing else."""
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    made = torch.empty(value.shape, dtype=wanted).copy_(value.detach())
    if wanted != value.dtype and bool((torch.isinf(made) & torch.isfinite(value)).any()):
        largest = float(value[torch.isfinite(value)].abs().max())
        raise CheckpointError(
            f"{name} holds {largest:g}, which {str(wanted).removeprefix('torch.')} cannot",
            hint="--dtype bf16 or --dtype fp32",
        )
    return made


def _save(shard: dict[str, torch.Tensor], file: Path, file_format: Format) -> None:
    try:
        if file_format == "safetensors":
            save_file(shard, file, metadata={"format": "pt"})
        else:
            torch.save(shard, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise EnvironmentUnfit(
            f"{file.name} could not be written: {' '.join(str(error).split())[:200]}",
            hint=f"df -h {files.typed(file.parent.parent)} shows the space there",
        ) from error


def _write_index(index: Mapping[str, Any], folder: Path, file_format: Format) -> str:
    name = layout.WEIGHT_FILES[file_format] + layout.INDEX
    (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return name


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentUnfit(
            f"{folder} has {free / 1e9:.1f} GB free, the weights need {needed / 1e9:.1f} GB",
            hint="free some space, or choose a folder on another disk",
        )
