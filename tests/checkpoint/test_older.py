"""Checkpoints of older DeepSpeeds, laid out as 0.14.0 does, without their bytes.

The layout is that of files that 0.14.0 itself wrote with two gloo ranks. Against 0.19 they have no
`param_alignment_paddings`, a version that ends in a space, an optimizer of 16 bits at stage 0 that is a
`BF16_Optimizer` (no `zero_stage`), and tied names in the model file of rank 0 alone; partitions on NVMe
lie in `offloaded_tensors` itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from altered import edit
from by_hand import Model, save
from safetensors.torch import load_file

from dstool.checkpoint import assemble, open_checkpoint
from dstool.checkpoint.layout import find
from dstool.consolidate import consolidate
from dstool.errors import CheckpointError
from dstool.inspection import inspect

VERSION = "0.14.0 "
STAGES = [0, 1, 2, 3]
BUFFERS = {
    "running": torch.rand(5),
    "mask": torch.tensor([True, False, True]),
    "ids": torch.tensor([2**40 + 1]),
}


def of_0_14(root: Path, stage: int) -> tuple[Path, Model]:
    """A checkpoint of two ranks and two groups with a tied head, at stages 1 and 3 a frozen layer."""
    groups = [
        {"embed.weight": torch.randn(97, 7), "up.weight": torch.randn(13, 7)},
        {"up.bias": torch.randn(13)},
    ]
    frozen = {"frozen.weight": torch.randn(5, 13).bfloat16()} if stage in (1, 3) else {}
    tied = {"head.weight": "embed.weight"}
    model = Model(groups, frozen, BUFFERS, tied, torch.float32 if stage == 2 else torch.bfloat16)
    save(root, model, stage or 1, 2)
    for file in root.glob("*/*_model_states.pt"):
        edit(file, lambda content: content.update(ds_version=VERSION))
        if "rank_1" in file.name:
            edit(file, lambda content: content.update(shared_params={}))
    for file in root.glob("*/*_optim_states.pt"):
        edit(file, lambda content: content.update(ds_version=VERSION))
        if stage == 0:
            edit(file, _as_bf16_optimizer)
    return root, model


def _as_bf16_optimizer(content: dict[str, Any]) -> None:
    state = content["optimizer_state_dict"]
    del state["zero_stage"]
    state.update(clip_grad=0.0, group_paddings=[0, 0], ds_version=VERSION)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_0_14_is_what_its_ranks_had(tmp_path: Path, stage: int) -> None:
    root, model = of_0_14(tmp_path / "checkpoint-7", stage)
    weights = open_checkpoint(root)
    assert set(weights) == {*model.whole, *model.tied}
    assert weights.tied == model.tied
    assert all(torch.equal(weights[name], value) for name, value in model.whole.items())
    result = consolidate(root, tmp_path / "out", verify=True)
    written = load_file(result.output_dir / "model.safetensors")
    assert written.keys() == model.whole.keys()
    assert all(torch.equal(value, model.whole[name].to(value.dtype)) for name, value in written.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_functions_make_the_same_of_0_14(tmp_path: Path, stage: int) -> None:
    root, _ = of_0_14(tmp_path / "checkpoint-7", stage)
    weights, theirs = open_checkpoint(root), assemble.fp32_state_dict(find(root))
    assert theirs.keys() == set(weights)
    assert all(torch.equal(weights[name].to(value.dtype), value) for name, value in theirs.items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_0_14_is_inspected(tmp_path: Path, stage: int) -> None:
    found = inspect(of_0_14(tmp_path / "checkpoint-7", stage)[0])
    # a BF16_Optimizer shares its masters out as stage 1 does
    assert (found.deepspeed_version, found.stage) == ("0.14.0", stage or 1)
    assert (found.world_size, found.step, found.latest) == (2, 7, "global_step7")
    assert (found.problem, found.consolidates) == (None, "yes")


def test_an_elastic_checkpoint_has_its_step_beside_a_list(tmp_path: Path) -> None:
    """`elastic_checkpoint` (zero/stage_1_and_2.py, 0.14): the base optimizer's state is a list by group."""
    model = Model([{"w": torch.randn(5, 3)}, {"b": torch.randn(3)}])
    root = save(tmp_path / "checkpoint-7", model, 2, 2)
    for file in root.glob("*/*_optim_states.pt"):

        def make_elastic(content: dict[str, Any]) -> None:
            state = content["optimizer_state_dict"]
            state["base_optimizer_state"] = [{"exp_avg": torch.ones(9)}, {"exp_avg": torch.ones(2)}]
            state["base_optimizer_state_step"] = 7

        edit(file, make_elastic)
    weights = open_checkpoint(root)
    assert all(torch.equal(weights[name], value) for name, value in model.trained.items())
    edit(file, lambda content: content["optimizer_state_dict"].update(base_optimizer_state_step=5))
    with pytest.raises(CheckpointError, match="of optimizer step"):
        open_checkpoint(root)


def on_nvme(root: Path, group: torch.Tensor, name: str) -> None:
    """Take the first flat group out of the file of the one rank, as 0.14 did with one on NVMe."""
    (file,) = root.glob("*/*_optim_states.pt")
    folder = file.parent / "offloaded_tensors"
    folder.mkdir()
    (folder / name).write_bytes(group.numpy().tobytes() + b"\xff" * 500)
    (folder / "139890321.tensor.swp").write_bytes(b"a moment, by the id of an object")
    edit(
        file,
        lambda content: content["optimizer_state_dict"]["fp32_flat_groups"].__setitem__(0, torch.empty(0)),
    )


def test_k22_partitions_on_nvme_of_one_rank_lie_in_no_folder_of_its_own(tmp_path: Path) -> None:
    model = Model([{"w": torch.randn(5, 3), "v": torch.randn(4)}, {"b": torch.randn(3)}])
    root = save(tmp_path / "checkpoint-7", model, 3, 1)
    on_nvme(root, torch.cat([value.flatten() for value in model.groups[0].values()]), "0_1.tensor.swp")
    weights = open_checkpoint(root)
    assert find(root).nvme
    assert all(torch.equal(weights[name], value) for name, value in model.trained.items())


def test_k22_of_two_ranks_each_needs_its_folder(tmp_path: Path) -> None:
    root = save(tmp_path / "checkpoint-7", Model([{"w": torch.ones(6)}]), 3, 2)
    (root / "global_step7/offloaded_tensors").mkdir()
    for file in root.glob("*/*_optim_states.pt"):
        edit(file, lambda content: content["optimizer_state_dict"].update(fp32_flat_groups=[torch.empty(0)]))
    with pytest.raises(CheckpointError, match="offloaded_tensors/rank00 is missing"):
        find(root)
