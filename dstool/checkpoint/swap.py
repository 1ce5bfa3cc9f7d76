"""The fp32 partitions that a run had on NVMe, which lie beside a stage-3 checkpoint in files of their own.

`offloaded_tensors/rankRR/FIRST_LAST.tensor.swp` holds the flat partition of a group, raw and padded at its
end, after the ids of its first and last parameter (deepspeed 0.19.8 zero/stage3.py, `ds_id`). No file says
which parameter has which id, but ids grow in the order in which the model made its parameters, so that both
orders together tell which file is which group's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstool.checkpoint.layout import ZeroCheckpoint, partition_numel
from dstool.checkpoint.pickles import ITEM_SIZES, Shape, TensorRef
from dstool.errors import CheckpointError

PADDING_LIMIT = 2**20
"""Bytes. A swap file is padded to 1024 bytes times `aio.intra_op_parallelism` (swap_tensor/utils.py)."""

_FILE = re.compile(r"(?:[a-z_]+-)?(?P<first>\d+)_(?P<last>\d+)\.tensor\.swp")
_HINT = "copy it again from the machine that ran this rank, or take an earlier checkpoint"


def filled(
    checkpoint: ZeroCheckpoint, model: Mapping[str, Any], groups: Sequence[Sequence[TensorRef]]
) -> list[list[TensorRef]]:
    """The flat groups of each rank, with the place in its swap file for each of size 0.

    Raises:
        CheckpointError: a swap file is missing or of the wrong size, or belongs to no telling which group.
    """
    ids = _ids(checkpoint)
    result = [list(partitions) for partitions in groups]
    for rank, partitions in enumerate(result):
        folder = checkpoint.swap_folder(rank)
        empty = [index for index, partition in enumerate(partitions) if partition.numel() == 0]
        for index, (first, last) in _match(folder, model, empty, ids).items():
            numel = partition_numel(model["param_shapes"][index], checkpoint.world_size)
            file = folder / f"{first}_{last}.tensor.swp"
            partitions[index] = _place(file, numel, partitions[index].dtype)
    return result


def _ids(checkpoint: ZeroCheckpoint) -> list[tuple[int, int]]:
    """The ids that any swap file of any rank carries, those of the Adam moments included."""
    folders = [checkpoint.swap_folder(rank) for rank in range(checkpoint.world_size)]
    found = [_FILE.fullmatch(file.name) for folder in folders for file in folder.iterdir()]
    return sorted({(int(match["first"]), int(match["last"])) for match in found if match})


def _match(
    folder: Path, model: Mapping[str, Any], swapped: Sequence[int], ids: Sequence[tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Which group has which ids: by the order of first parameters, which that of the last must confirm."""
    if len(swapped) != len(ids):
        raise CheckpointError(
            f"{folder} should hold {len(swapped)} swap files, one per group; the run's are of {len(ids)}",
            hint=_HINT,
        )
    shapes = [name for group in model["param_shapes"] for name in group]
    position = {name: index for index, name in enumerate(dict.fromkeys((*model["module"], *shapes)))}
    ends = {group: [position[name] for name in model["param_shapes"][group]] for group in swapped}
    by_first = dict(zip(sorted(swapped, key=lambda group: ends[group][0]), sorted(ids), strict=True))
    in_last_order = sorted(ids, key=lambda pair: pair[1])
    by_last = dict(zip(sorted(swapped, key=lambda group: ends[group][-1]), in_last_order, strict=True))
    if by_first != by_last:
        raise CheckpointError(f"{folder}: no telling which swap file belongs to which parameters", hint=_HINT)
    return by_first


def _place(file: Path, numel: int, dtype: str) -> TensorRef:
    """The first `numel` elements of a raw swap file."""
    needed = numel * ITEM_SIZES[dtype]
    size = file.stat().st_size if file.is_file() else None
    if size is None or not needed <= size < needed + PADDING_LIMIT:
        found = "is missing" if size is None else f"has {size} bytes"
        raise CheckpointError(f"{file} {found}; this rank's weights need {needed} bytes there", hint=_HINT)
    return TensorRef(file, 0, dtype, Shape((numel,)), (1,))
