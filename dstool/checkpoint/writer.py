"""Weights into files that `from_pretrained` reads: safetensors or .bin, one file or shards and an index."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstool import files
from dstool.checkpoint import layout, pickles, stream
from dstool.checkpoint.pickles import ITEM_SIZES, DType, TensorRef
from dstool.checkpoint.reader import Entry, Weights
from dstool.checkpoint.stream import Progress, Target
from dstool.errors import CheckpointError, ConfigError, EnvironmentUnfit, InputError

if TYPE_CHECKING:
    import torch

Format = Literal["safetensors", "bin"]

DTYPES: Mapping[str, DType] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""The names of `--dtype`."""
WEIGHT_PATTERNS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
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
    weights: Weights,
    folder: Path,
    *,
    dtype: DType | None,
    max_shard_size: str = "5GB",
    file_format: Format = "safetensors",
    adapter: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the entries of `weights` into `folder`, which exists and should be a temporary one.

    Floating tensors are cast to `dtype`, or kept with None. A tensor above `max_shard_size` (such as "5GB",
    powers of 1000) gets a file of its own. An adapter is one file, whatever its size: peft reads no shards.
    No tensor is ever in memory whole.

    Raises:
        ConfigError: `max_shard_size` is no size.
        CheckpointError: nothing to write, a tensor of size 0, or a value too large for `dtype`.
        EnvironmentUnfit: the disk has too little room, or refuses a file.
    """
    limit = parse_size(max_shard_size)
    entries = list(weights.entries.values())
    _refuse_empty(entries)
    shards = split(entries, dtype, limit, file_format, adapter=adapter)
    check_room(folder, sum(_size(entry, dtype) for entry in entries))
    with refusals_named(folder):
        make = _safetensors if file_format == "safetensors" else _torch_file
        targets = [target for name, shard in shards.items() for target in make(folder / name, shard, dtype)]
        stream.copy(targets, progress)
        written = list(shards)
        if len(shards) > 1:
            written.append(_write_index(shards, folder, dtype, file_format))
    return Written(
        folder,
        tuple(written),
        tensors=len(entries),
        parameters=sum(entry.numel for entry in entries if entry.is_floating),
        bytes=sum((folder / name).stat().st_size for name in written),
    )


@contextmanager
def refusals_named(target: Path) -> Iterator[None]:
    """Turn what the system refuses in the block, such as on a full disk, into an `EnvironmentUnfit`."""
    try:
        yield
    except OSError as error:
        # the disk itself: the folders that were made for the weights are taken away again
        place = next(each for each in target.resolve().parents if each.is_mount())
        source = Path(error.filename) if isinstance(error.filename, str) else target
        if isinstance(error, PermissionError) and source.is_file() and not os.access(source, os.R_OK):
            message, hint = files.refusal(error) or (str(error), None)
            raise InputError(message, hint=hint) from error
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(
                f"{target.name[:60]}... is too long a name", hint="choose one of 150 bytes or fewer"
            ) from error
        raise EnvironmentUnfit(
            f"the weights could not be written to {target.parent}: {error.strerror or error}",
            hint=f"df -h {files.typed(place)} shows the space there",
        ) from error


def planned(
    weights: Weights,
    folder: Path,
    dtype: DType | None,
    limit: int,
    file_format: Format,
    *,
    adapter: bool = False,
) -> Written:
    """What `write_weights` would write: all but the bytes of the headers, and of an index."""
    entries = list(weights.entries.values())
    _refuse_empty(entries)
    names = list(split(entries, dtype, limit, file_format, adapter=adapter))
    if len(names) > 1:
        names.append(f"{layout.WEIGHT_FILES[file_format]}{layout.INDEX}")
    return Written(
        folder,
        tuple(names),
        tensors=len(entries),
        parameters=sum(entry.numel for entry in entries if entry.is_floating),
        bytes=sum(_size(entry, dtype) for entry in entries),
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


def stored_dtype(entry: Entry, dtype: DType | None) -> DType:
    """The type that `entry` is written in: integers and booleans keep theirs."""
    return dtype if dtype is not None and entry.is_floating else entry.dtype


def split(
    entries: Sequence[Entry],
    dtype: DType | None,
    limit: int,
    file_format: Format,
    *,
    adapter: bool = False,
) -> dict[str, list[Entry]]:
    """The entries by the name of the file that each goes into, in order, none above `limit` bytes."""
    if adapter:
        return {f"adapter_model.{file_format}": list(entries)}
    shards: list[list[Entry]] = [[]]
    room = limit
    for entry in entries:
        size = _size(entry, dtype)
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= size
    stem, _, suffix = layout.WEIGHT_FILES[file_format].rpartition(".")
    count = len(shards)
    names = [f"{stem}-{index:05d}-of-{count:05d}.{suffix}" for index in range(1, count + 1)]
    return dict(zip(names if count > 1 else [f"{stem}.{suffix}"], shards, strict=True))


def check_room(folder: Path, needed: int) -> None:
    """Raise `EnvironmentUnfit` where the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentUnfit(
            f"{folder.parent} has {free / 1e6:,.1f} MB free, the weights need {needed / 1e6:,.1f} MB",
            hint="free some space, or choose a folder on another disk",
        )


def _size(entry: Entry, dtype: DType | None) -> int:
    return entry.numel * ITEM_SIZES[stored_dtype(entry, dtype)]


def _refuse_empty(entries: Sequence[Entry]) -> None:
    if not entries:
        raise CheckpointError(
            "there are no tensors to write",
            hint="the weights are empty: name another folder or checkpoint",
        )
    for entry in entries:
        if entry.numel == 0:
            raise CheckpointError(
                f"{entry.name} is empty, shape {list(entry.shape)}: it was saved while ZeRO-3 had it "
                "partitioned",
                hint="gather it from the ZeRO checkpoint: dstool consolidate checkpoint-N",
            )


def _safetensors(file: Path, entries: Sequence[Entry], dtype: DType | None) -> Iterator[Target]:
    """Write the header of a safetensors file, and make it as long as it will be."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + _size(entry, dtype)
        header[entry.name] = {
            "dtype": stored_dtype(entry, dtype),
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    for entry in entries:
        start, _ = header[entry.name]["data_offsets"]
        yield Target(entry, file, 8 + len(text) + start, stored_dtype(entry, dtype))


def _torch_file(file: Path, entries: Sequence[Entry], dtype: DType | None) -> Iterator[Target]:
    """Let torch write its file without the data (`skip_data`), and find the places in it."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = {
            entry.name: torch.empty(
                entry.shape, dtype=getattr(torch, pickles.TORCH_NAMES[stored_dtype(entry, dtype)])
            )
            for entry in entries
        }
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch_save(state, file)
    content = layout.read(file)
    for entry in entries:
        place: TensorRef = content[entry.name]
        yield Target(entry, file, place.offset, stored_dtype(entry, dtype))


def torch_save(state: Mapping[str, torch.Tensor], file: Path) -> None:
    """Let torch write `state`, with an OSError for what the system refuses."""
    import torch

    try:
        torch.save(state, file)
    except RuntimeError as error:  # as torch calls a full disk
        raise OSError(0, " ".join(str(error).split())[:200]) from error


def _write_index(
    shards: Mapping[str, Sequence[Entry]], folder: Path, dtype: DType | None, file_format: Format
) -> str:
    name = f"{layout.WEIGHT_FILES[file_format]}{layout.INDEX}"
    index = {
        "metadata": {"total_size": sum(_size(entry, dtype) for shard in shards.values() for entry in shard)},
        "weight_map": {entry.name: file for file, shard in shards.items() for entry in shard},
    }
    (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return name
