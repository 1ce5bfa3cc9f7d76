"""Checkpoints of older DeepSpeeds: real ones of 0.14.0, and what else differed, made of newer ones.

`deepspeed-0.14.0.tar.xz` was made with that version (from its source package, two gloo ranks, torch 2.13) by
`make_checkpoint.py` with `init_distributed("gloo")`; the folders are its jobs, with `live-2.pt` as there.
Against 0.19 the files of 0.14 have no `param_alignment_paddings`, an optimizer of 16 bits at stage 0 is a
`BF16_Optimizer`, and partitions on NVMe lie in `offloaded_tensors` itself.
"""

from __future__ import annotations

import tarfile
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

ARCHIVE = Path(__file__).with_name("deepspeed-0.14.0.tar.xz")
STAGES = {"z0_bf16": 1, "z1_bf16_frozen": 1, "z2_fp32": 2, "z3_groups": 3, "z3_bf16_frozen": 3}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one folder per job: checkpoint-2 and live-2.pt."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def as_float(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


@pytest.mark.parametrize("job", STAGES)
def test_a_checkpoint_of_0_14_is_what_its_ranks_had(old: Path, job: str, tmp_path: Path) -> None:
    live = torch.load(old / job / "live-2.pt")
    weights = open_checkpoint(old / job)
    assert set(weights) == set(live)
    assert weights.tied == {"head.weight": "embed.weight"}
    assert all(torch.equal(as_float(weights[name]), value) for name, value in live.items())
    result = consolidate(old / job, tmp_path / "out", verify=True)
    written = load_file(result.output_dir / "model.safetensors")
    assert all(torch.equal(value, live[name]) for name, value in written.items())
    assert written.keys() == live.keys() - {"head.weight"}


@pytest.mark.parametrize("job", [job for job in STAGES if job not in ("z0_bf16", "z1_bf16_frozen")])
def test_deepspeeds_functions_make_the_same_of_0_14(old: Path, job: str) -> None:
    weights, theirs = open_checkpoint(old / job), assemble.fp32_state_dict(find(old / job))
    assert theirs.keys() == set(weights)
    assert all(torch.equal(as_float(weights[name]), value) for name, value in theirs.items())


@pytest.mark.parametrize("job", STAGES)
def test_a_checkpoint_of_0_14_is_inspected(old: Path, job: str) -> None:
    found = inspect(old / job)
    assert (found.deepspeed_version, found.stage, found.world_size, found.step) == (
        "0.14.0",
        STAGES[job],
        2,
        2,
    )
    assert (found.problem, found.latest, found.consolidates) == (None, "global_step2", "yes")
    assert found.precision == ("fp32" if job == "z2_fp32" else "bf16")


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
