"""ZeRO checkpoints of any form, partitioned by plain code as DeepSpeed lays them out, without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclass
class Model:
    """What a run has at a save. Masters are fp32, in parameter groups (of stage 3: sub-groups)."""

    groups: list[State]
    frozen: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """Further names of parameters."""
    kept: torch.dtype = torch.bfloat16
    """The type that the model computes in."""
    paddings: list[list[int]] | None = None
    """Elements after each parameter of each group (stages 1 and 2)."""

    @property
    def trained(self) -> State:
        return {name: value for group in self.groups for name, value in group.items()}

    @property
    def whole(self) -> State:
        """Every stored tensor, as it should be found."""
        return {**self.trained, **self.frozen, **self.buffers}


def part_of(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Stage 3: the rank's part of a tensor that is filled up with zeros to as many elements for each."""
    size = ceil(value.numel() / ranks)
    filled = torch.zeros(size * ranks, dtype=value.dtype)
    filled[: value.numel()] = value.flatten()
    return filled[rank * size : (rank + 1) * size].clone()


def flat_of(group: State, paddings: list[int], ranks: int) -> torch.Tensor:
    """Stages 1 and 2: parameters and paddings end to end, filled up to a multiple of twice the ranks."""
    parts = []
    for value, padding in zip(group.values(), paddings, strict=True):
        parts += [value.flatten(), torch.full((padding,), 9e9)]
    flat = torch.cat(parts)
    return torch.cat([flat, torch.full((-flat.numel() % (2 * ranks),), 8e8)])


def save(root: Path, model: Model, stage: int, ranks: int, step: int = 7) -> Path:
    """Write the checkpoint; gives `root`."""
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    prefix = "bf16_" if model.kept == torch.bfloat16 else ""
    for rank in range(ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(_model_file(model, stage, rank, ranks, step), folder / f"{name}_model_states.pt")
    for rank in range(ranks if stage else 0):
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = _optimizer_state(model, stage, rank, ranks, step)
        torch.save({"optimizer_state_dict": state}, folder / name)
    return root


def _model_file(model: Model, stage: int, rank: int, ranks: int, step: int) -> dict[str, Any]:
    kept = {name: value.to(model.kept) for name, value in model.trained.items()} | model.frozen
    if stage == 3:
        kept = {name: torch.empty(0, dtype=value.dtype) for name, value in kept.items()}
    module = {**kept, **{alias: kept[name] for alias, name in model.tied.items()}, **model.buffers}
    fragments = {
        name: part_of(value, rank, ranks) if stage == 3 else value for name, value in model.frozen.items()
    }
    return {
        "module": module,
        "param_shapes": [{name: value.shape for name, value in group.items()} for group in model.groups]
        if stage
        else None,
        "frozen_param_shapes": {name: value.shape for name, value in model.frozen.items()} or None,
        "frozen_param_fragments": fragments or None,
        "buffer_names": list(model.buffers),
        "shared_params": dict(model.tied) if stage else {},
        "dp_world_size": ranks,
        "global_steps": step,
        "ds_version": "0.19.8",
    }


def _optimizer_state(model: Model, stage: int, rank: int, ranks: int, step: int) -> dict[str, Any]:
    moments = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []}
    if stage == 3:
        flats = [
            torch.cat([part_of(value, rank, ranks) for value in group.values()]) for group in model.groups
        ]
        state = {"state": moments["state"], "param_groups": []}
        return {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": flats,
            "optimizer_state_dict": state,
        }
    paddings = model.paddings or [[0] * len(group) for group in model.groups]
    flats = [
        flat_of(group, between, ranks).chunk(ranks)[rank].clone()
        for group, between in zip(model.groups, paddings, strict=True)
    ]
    more = {"param_alignment_paddings": model.paddings} if model.paddings is not None else {}
    return {
        "zero_stage": stage,
        "partition_count": [ranks] * len(flats),
        "single_partition_of_fp32_groups": flats,
        "base_optimizer_state": moments,
        **more,
    }
