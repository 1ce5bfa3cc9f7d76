"""Full fp32 weights out of ZeRO partitions, put together by DeepSpeed's own functions (`--engine deepspeed`).

The merging is `_get_fp32_state_dict_from_zero2_checkpoint` and `..._zero3_checkpoint` of
deepspeed/utils/zero_to_fp32.py (0.19.8): what `reader` is compared with. The files are not read by the
script's `parse_*_states`, which execute any pickle.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dstool.checkpoint import writer
from dstool.checkpoint.layout import ZeroCheckpoint, fp32_groups_key
from dstool.checkpoint.reader import MIXED_HINT, Entry, Weights, of_file
from dstool.errors import CheckpointError

logger = logging.getLogger("dstool.checkpoint")

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
    if checkpoint.nvme or checkpoint.universal:
        what = "is universal" if checkpoint.universal else "has partitions on NVMe"
        raise CheckpointError(
            f"{checkpoint.folder} {what}, which DeepSpeed's own script cannot read",
            hint="leave --engine out",
        )
    models = [_load(file) for file in checkpoint.model_files]
    if checkpoint.stage == 0:
        return _from_module(models[0])
    groups, paddings = _partitions(checkpoint)
    state = _merge(checkpoint, models, groups, paddings)
    _add_from_module(state, models[0])
    ordered = {name: state[name] for name in (*models[0]["module"], *state) if name in state}
    return _to_fp32(ordered)


def put_together(weights: Weights, file: Path) -> dict[str, Entry]:
    """Let DeepSpeed put the checkpoint of `weights` together, save it as `file`, and say where its tensors
    lie.

    Raises:
        CheckpointError: as for `fp32_state_dict`.
    """
    if weights.checkpoint is None:
        raise CheckpointError("no ZeRO checkpoint", hint="leave --engine out")
    try:
        state = fp32_state_dict(weights.checkpoint)
    except pickle.UnpicklingError as error:  # torch refuses some names whatever is allowed
        raise CheckpointError(
            f"torch does not read {weights.checkpoint.folder}: {str(error).splitlines()[0][:200]}",
            hint="leave --engine out",
        ) from error
    writer.torch_save({name: state[name].clone() for name in weights.entries}, file)
    return of_file(file)


class _Inert:
    """Stands for a class of DeepSpeed's in a file."""

    def __new__(cls, *_: Any) -> _Inert:
        return super().__new__(cls)


def _load(file: Path) -> dict[str, Any]:
    """The content of a file that `layout.find` has read before, its tensors as maps of the file."""
    asked = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    split = [name.rpartition(".") for name in asked]
    inert: list[Any] = [
        type(name, (_Inert,), {"__module__": module, "__qualname__": name}) for module, _, name in split
    ]
    with torch.serialization.safe_globals(inert):
        content: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return content


def _from_module(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Stage 0: the module's own state dict; a 16-bit run's masters carry no names (fp16 optimizers)."""
    return _to_fp32(_tensors(model["module"]))


# --- through DeepSpeed ---------------------------------------------------------------------------------


def _partitions(checkpoint: ZeroCheckpoint) -> tuple[Groups, Any]:
    """Every rank's flat fp32 groups, and the paddings between parameters (stages 1, 2; may be None)."""
    states = [_load(file)["optimizer_state_dict"] for file in checkpoint.optim_files]
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
