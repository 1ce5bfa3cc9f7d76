"""Checkpoints that are altered, or made by hand, and the names of the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

JOBS = (
    "z0_fp32",
    "z0_bf16",
    "z1_bf16_frozen",
    "z1_bf16_optimizer",
    "z2_bf16",
    "z2_bf16_frozen",
    "z2_fp32",
    "z2_cpu",
    "z2_adapter",
    "z3_bf16",
    "z3_bf16_frozen",
    "z3_fp32",
    "z3_groups",
    "z3_cpu",
)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a *_states.pt file, let `change` alter its content, and save it."""
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def hand_made(root: Path, weight: torch.Tensor, ranks: int, *, step: int = 7, prefix: str = "") -> Path:
    """A stage-2 checkpoint of one parameter `w`, as DeepSpeed lays it out, without DeepSpeed."""
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    model = {
        "module": {"w": weight.bfloat16()},
        "param_shapes": [{"w": weight.shape}],
        "buffer_names": [],
        "shared_params": {},
        "dp_world_size": ranks,
        "global_steps": step,
        "ds_version": "0.19.8",
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(weight.flatten().chunk(ranks)):
        state = {
            "zero_stage": 2,
            "partition_count": [ranks],
            "single_partition_of_fp32_groups": [part.clone()],
            "base_optimizer_state": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []},
        }
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, folder / name)
    return root
