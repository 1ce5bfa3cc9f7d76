"""Full fp32 weights out of ZeRO partitions, put together by DeepSpeed's own functions.

The merging is `_get_fp32_state_dict_from_zero2_checkpoint` and `..._zero3_checkpoint` of
deepspeed/utils/zero_to_fp32.py (0.19.8). Around it lies what that script leaves out: partitions on
NVMe, frozen parameters at stage 1, the masters of `BF16_Optimizer`, stage 0, and the check that no
tensor went missing. Files are read by `layout.read`, which executes no pickle, and not by the
script's `parse_*_states`, which do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch

from dstool.checkpoint.layout import ZeroCheckpoint, fp32_groups_key, ranks, read
from dstool.errors import CheckpointError

logger = logging.getLogger("dstool.checkpoint")

SWAP_PADDING_LIMIT = 2**20
"""Bytes. A swap file is padded to 1024 bytes times `aio.intra_op_parallelism` (swap_tensor/utils.py)."""

MIXED_HINT = "the files may be of several runs: save the checkpoint again, or take an earlier one"

_SWAP_FILE = re.compile(r"(?:[a-z_]+-)?(?P<first>\d+)_(?P<last>\d+)\.tensor\.swp")

Groups = list[list[torch.Tensor]]
"""The flat fp32 partitions: first index the rank, second the parameter group."""


def fp32_state_dict(checkpoint: ZeroCheckpoint) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by name, in full and in the model's order; floating ones in fp32.

    Names of one tied parameter share one tensor. Parameters that no optimizer owned (frozen ones) are
    included in the precision that the model kept them in, unless the run left them out of the save. At
    stages 1 and 2 tensors are views of one flat tensor per group. DeepSpeed writes to stdout.

    Raises:
        CheckpointError: a partition is missing or of the wrong size, or a tensor would be left out.
    """
    where = (checkpoint.folder, checkpoint.stage, ranks(checkpoint.world_size), checkpoint.step)
    logger.info("gathering %s: ZeRO stage %d, %s, step %d", *where)
    models = [read(file) for file in checkpoint.model_files]
    if checkpoint.stage == 0:
        return _from_module(checkpoint, models[0])
    groups, paddings = _partitions(checkpoint)
    _check_group_count(checkpoint, models[0], groups)
    if checkpoint.stage == 3:
        _check_frozen_fragments(checkpoint, models)
        if checkpoint.nvme:
            _fill_from_swap(checkpoint, models[0], groups)
        _check_partition_sizes(checkpoint, models[0], groups)
    state = _merge(checkpoint, models, groups, paddings)
    _add_from_module(state, models[0])
    _check_complete(checkpoint, models[0], state)
    ordered = {name: state[name] for name in (*models[0]["module"], *state) if name in state}
    return _to_fp32(ordered)


def _from_module(checkpoint: ZeroCheckpoint, model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Stage 0: the module's own state dict; a 16-bit run's masters carry no names (fp16 optimizers)."""
    state = _tensors(model["module"])
    if any(value.dtype in {torch.bfloat16, torch.float16} for value in state.values()):
        logger.warning("%s: stage 0 in 16 bits, so these are the 16-bit weights", checkpoint.folder)
    for name, value in state.items():
        _refuse_empty(checkpoint, name, value)
    return _to_fp32(state)


# --- through DeepSpeed ---------------------------------------------------------------------------------


def _partitions(checkpoint: ZeroCheckpoint) -> tuple[Groups, Any]:
    """Every rank's flat fp32 groups, and the paddings between parameters (stages 1, 2; may be None)."""
    states = [read(file)["optimizer_state_dict"] for file in checkpoint.optim_files]
    key = fp32_groups_key(checkpoint.stage)
    groups = [[partition.detach() for partition in state[key]] for state in states]
    return groups, states[0].get("param_alignment_paddings")


def _merge(
    checkpoint: ZeroCheckpoint, models: Sequence[Mapping[str, Any]], groups: Groups, paddings: Any
) -> dict[str, torch.Tensor]:
    from deepspeed.utils import zero_to_fp32 as script

    parsed = [_as_script_state(script, model) for model in models]
    extra = (paddings,) if paddings is not None else ()
    try:
        if checkpoint.stage == 3:
            lazy = script._get_fp32_state_dict_from_zero3_checkpoint(
                checkpoint.world_size, groups, parsed, False
            )
        else:
            lazy = script._get_fp32_state_dict_from_zero2_checkpoint(
                checkpoint.world_size, groups, parsed, False, *extra
            )
        return dict(script.to_torch_tensor(lazy))
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"the partitions in {checkpoint.folder} do not fit the model: {error}",
            hint=MIXED_HINT,
        ) from error


def _as_script_state(script: Any, model: Mapping[str, Any]) -> Any:
    """What the script's `parse_model_states` makes of a model-state file."""
    module = _tensors(model["module"])
    return script.zero_model_state(
        buffers={name: module[name] for name in model["buffer_names"] if name in module},
        param_shapes=model["param_shapes"],
        shared_params=[list(pair) for pair in model["shared_params"].items()],
        ds_version=model.get("ds_version"),
        frozen_param_shapes=model.get("frozen_param_shapes"),
        frozen_param_fragments=model.get("frozen_param_fragments"),
    )


def _add_from_module(state: dict[str, torch.Tensor], model: Mapping[str, Any]) -> None:
    """Add what no optimizer owned and DeepSpeed's script leaves out, such as frozen weights at stage 1."""
    shared = model["shared_params"]
    added = {
        name: value
        for name, value in _tensors(model["module"]).items()
        if name not in state and name not in shared and value.numel()
    }
    if added:
        logger.info("%d tensors that no optimizer owned are taken as the model kept them", len(added))
    state.update(added)
    state.update({alias: state[name] for alias, name in shared.items() if name in state})


# --- checks --------------------------------------------------------------------------------------------


def _shapes(model: Mapping[str, Any]) -> dict[str, torch.Size]:
    """The full shape of every parameter that the optimizer owned, in the order of its partitions."""
    return {name: shape for group in model["param_shapes"] for name, shape in group.items()}


def _partition_numel(shapes: Mapping[str, torch.Size], world_size: int) -> int:
    """Elements of one rank's flat partition at stage 3 (zero/partition_parameters.py: ceil, padded)."""
    return sum(ceil(shape.numel() / world_size) for shape in shapes.values())


def _check_group_count(checkpoint: ZeroCheckpoint, model: Mapping[str, Any], groups: Groups) -> None:
    expected = len(model["param_shapes"])
    for file, partitions in zip(checkpoint.optim_files, groups, strict=True):
        if len(partitions) != expected:
            raise CheckpointError(
                f"{file} holds {len(partitions)} parameter groups, the model file {expected}",
                hint=MIXED_HINT,
            )


def _check_partition_sizes(checkpoint: ZeroCheckpoint, model: Mapping[str, Any], groups: Groups) -> None:
    for file, partitions in zip(checkpoint.optim_files, groups, strict=True):
        for index, (shapes, partition) in enumerate(zip(model["param_shapes"], partitions, strict=True)):
            expected = _partition_numel(shapes, checkpoint.world_size)
            if partition.numel() != expected:
                raise CheckpointError(
                    f"{file}: group {index} has {partition.numel()} elements, its parameters {expected}",
                    hint=MIXED_HINT,
                )


def _check_frozen_fragments(checkpoint: ZeroCheckpoint, models: Sequence[Mapping[str, Any]]) -> None:
    """Frozen parameters that were offloaded to NVMe leave no fragment in the files."""
    shapes: Mapping[str, torch.Size] = models[0].get("frozen_param_shapes") or {}
    for file, model in zip(checkpoint.model_files, models, strict=True):
        fragments = model.get("frozen_param_fragments") or {}
        for name, shape in shapes.items():
            expected = ceil(shape.numel() / checkpoint.world_size)
            found = fragments[name].numel() if name in fragments else 0
            if found != expected:
                raise CheckpointError(
                    f"{file}: frozen {name} has {found} elements, a part of {list(shape)} has {expected}",
                    hint="with parameters on NVMe, take the frozen weights from the base model",
                )


def _check_complete(
    checkpoint: ZeroCheckpoint, model: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> None:
    """Every name that the files know of is there, in its full shape.

    A run that leaves frozen parameters out of the save (PEFT) also leaves names tied to one of them.
    """
    shapes = {**(model.get("frozen_param_shapes") or {}), **_shapes(model)}
    shared, module = model["shared_params"], _tensors(model["module"])
    aliases = {alias for alias, name in shared.items() if name in module or name in shapes}
    expected = {*shapes, *aliases, *(name for name in module if name not in shared)}
    if absent := sorted(expected - state.keys()):
        raise CheckpointError(
            f"{checkpoint.folder} holds no data for {len(absent)} of {len(expected)} tensors: "
            f"{', '.join(absent[:5])}",
            hint="save the checkpoint again, or take an earlier one",
        )
    for name, value in state.items():
        _refuse_empty(checkpoint, name, value)
        if value.shape != (shape := shapes.get(name, value.shape)):
            raise CheckpointError(f"{checkpoint.folder}: {name} is {list(value.shape)}, not {list(shape)}")


def _refuse_empty(checkpoint: ZeroCheckpoint, name: str, value: torch.Tensor) -> None:
    if value.numel() == 0:
        raise CheckpointError(
            f"{checkpoint.folder}: {name} is empty, shape {list(value.shape)}",
            hint="it was saved while it was partitioned; take another checkpoint",
        )


# --- partitions on NVMe ----------------------------------------------------------------------------------


def _fill_from_swap(checkpoint: ZeroCheckpoint, model: Mapping[str, Any], groups: Groups) -> None:
    """Replace each group of size 0 by the content of its swap file.

    A file is called FIRST_LAST.tensor.swp after the ids of the group's first and last parameter
    (zero/stage3.py, `ds_id`). No file says which parameter has which id, but ids grow in the order in
    which the model made its parameters, so both orders together tell which file is which group's.
    """
    ids = _swap_ids(checkpoint)
    for rank, partitions in enumerate(groups):
        swapped = [index for index, partition in enumerate(partitions) if partition.numel() == 0]
        matched = _match(checkpoint.swap_folder(rank), model, swapped, ids)
        for index, (first, last) in matched.items():
            file = checkpoint.swap_folder(rank) / f"{first}_{last}.tensor.swp"
            numel = _partition_numel(model["param_shapes"][index], checkpoint.world_size)
            partitions[index] = _read_swap(file, numel, partitions[index].dtype)


def _swap_ids(checkpoint: ZeroCheckpoint) -> list[tuple[int, int]]:
    """The ids that any swap file of any rank carries, those of the Adam moments included."""
    folders = [checkpoint.swap_folder(rank) for rank in range(checkpoint.world_size)]
    found = [_SWAP_FILE.fullmatch(file.name) for folder in folders for file in folder.iterdir()]
    return sorted({(int(match["first"]), int(match["last"])) for match in found if match})


def _match(
    folder: Path, model: Mapping[str, Any], swapped: Sequence[int], ids: Sequence[tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Which group has which ids: by the order of first parameters, which that of the last must confirm."""
    hint = "copy the folder again from the machine that ran this rank, or take an earlier checkpoint"
    if len(swapped) != len(ids):
        raise CheckpointError(
            f"{folder} should hold {len(swapped)} swap files, one per group; the run's are of {len(ids)}",
            hint=hint,
        )
    position = {name: index for index, name in enumerate(dict.fromkeys((*model["module"], *_shapes(model))))}
    ends = {group: [position[name] for name in model["param_shapes"][group]] for group in swapped}
    by_first = dict(zip(sorted(swapped, key=lambda group: ends[group][0]), sorted(ids), strict=True))
    in_last_order = sorted(ids, key=lambda pair: pair[1])
    by_last = dict(zip(sorted(swapped, key=lambda group: ends[group][-1]), in_last_order, strict=True))
    if by_first != by_last:
        raise CheckpointError(f"{folder}: no telling which swap file belongs to which parameters", hint=hint)
    return by_first


def _read_swap(file: Path, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The first `numel` elements of a raw swap file, as a map of the file. Shape [numel]."""
    needed = numel * dtype.itemsize
    size = file.stat().st_size if file.is_file() else None
    if size is None or not needed <= size < needed + SWAP_PADDING_LIMIT:
        found = "is missing" if size is None else f"has {size} bytes"
        raise CheckpointError(
            f"{file} {found}; this rank's weights need {needed} bytes there",
            hint="copy it again from the machine that ran this rank, or take an earlier checkpoint",
        )
    return torch.from_file(str(file), shared=False, size=numel, dtype=dtype)


# --- tensors ---------------------------------------------------------------------------------------------


def _tensors(module: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict; an `_extra_state` may be anything else."""
    return {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}


def _to_fp32(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Floating tensors in fp32, the others as they are; names of the same memory share one tensor."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in made:
            made[key] = value.detach().float() if value.is_floating_point() else value
        result[name] = made[key]
    return result
