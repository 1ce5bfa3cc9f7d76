"""The assembled weights against the live masters that the ranks gathered themselves, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import JOBS, edit, hand_made
from safetensors.torch import load_file

from dstool.checkpoint import assemble
from dstool.checkpoint.layout import ZeroCheckpoint, find
from dstool.checkpoint.reader import load_into, of_checkpoint, open_checkpoint
from dstool.consolidate import consolidate
from dstool.errors import CheckpointError

ALL = [*((job, 2) for job in JOBS if job != "z2_adapter"), ("z2_bf16", 4), ("z3_bf16", 4)]
TIED = {"Llama": ("model.embed_tokens.weight", "lm_head.weight"), "Odd": ("embed.weight", "head.weight")}


def live(made: Path, job: str, step: int = 2) -> dict[str, torch.Tensor]:
    return torch.load(made / job / f"live-{step}.pt")


def gathered(checkpoint: ZeroCheckpoint) -> dict[str, torch.Tensor]:
    """Every tensor by name, floating ones in fp32, as the ranks gathered them."""
    weights = of_checkpoint(checkpoint)
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert not found[name].requires_grad, name
        assert torch.equal(found[name], value), name


@pytest.mark.distributed
@pytest.mark.parametrize(("job", "step"), ALL)
def test_equals_the_live_masters(made: Path, job: str, step: int) -> None:
    checkpoint = find(made / job / f"checkpoint-{step}")
    assert_same(gathered(checkpoint), live(made, job, step))
    weights = of_checkpoint(checkpoint)
    first, second = TIED["Llama" if "lm_head.weight" in weights else "Odd"]
    assert weights.tied == {second: first}
    assert second not in weights.entries


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("job", ["z1_bf16_frozen", "z2_fp32", "z3_groups", "z3_bf16_frozen"])
def test_three_ranks(made_by_three: Path, job: str) -> None:
    checkpoint = find(made_by_three / job)
    assert checkpoint.world_size == 3
    assert_same(gathered(checkpoint), live(made_by_three, job))
    assert_same(assemble.fp32_state_dict(checkpoint), gathered(checkpoint))


@pytest.mark.distributed
@pytest.mark.parametrize("job", JOBS)
def test_deepspeeds_own_functions_make_the_same(made: Path, job: str) -> None:
    checkpoint = find(made / job / "checkpoint-2")
    assert_same(assemble.fp32_state_dict(checkpoint), gathered(checkpoint))


def test_neither_torch_nor_deepspeed_is_needed_to_consolidate() -> None:
    code = (
        "import sys, dstool.consolidate, dstool.checkpoint.verify; "
        "print(*{'torch', 'deepspeed', 'transformers', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z2_bf16", "z3_groups"])
def test_nothing_is_read_before_it_is_asked_for(made: Path, job: str) -> None:
    weights = open_checkpoint(made / job / "checkpoint-2")
    for name, entry in weights.entries.items():
        assert sum(piece.length for piece in entry.pieces) == entry.nbytes
        assert weights[name].shape == entry.shape


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z2_bf16", "z3_bf16", "z3_groups"])
def test_rows_are_those_of_the_whole(made: Path, job: str) -> None:
    weights = open_checkpoint(made / job / "checkpoint-2")
    for name in weights:
        if weights.entry(name).shape:
            assert torch.equal(weights.rows(name, 1, 4), weights[name][1:4])
            assert torch.equal(weights.rows(name, -2, 10**9), weights[name][-2:])
            assert weights.rows(name, 3, 3).shape == weights[name][3:3].shape


@pytest.mark.distributed
def test_a_model_takes_the_weights(made: Path) -> None:
    from make_checkpoint import Llama

    model = Llama()
    load_into(model, made / "z3_bf16" / "checkpoint-2")
    assert_same(dict(model.state_dict()), live(made, "z3_bf16"))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_into(torch.nn.Linear(2, 2), made / "z3_bf16" / "checkpoint-2")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "job", ["z2_bf16", "z2_bf16_frozen", "z2_fp32", "z2_adapter", "z3_bf16", "z3_bf16_frozen", "z3_groups"]
)
def test_k16_equals_what_zero_to_fp32_makes(made: Path, job: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    script = get_fp32_state_dict_from_zero_checkpoint(str(made / job / "checkpoint-2"))
    floats = {name: value.float() if value.is_floating_point() else value for name, value in script.items()}
    assert_same(gathered(find(made / job / "checkpoint-2")), floats)


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z1_bf16_frozen", "z2_bf16_frozen", "z3_bf16_frozen"])
def test_k13_frozen_weights_are_there_and_written_in_one_type(made: Path, job: str, tmp_path: Path) -> None:
    found = open_checkpoint(made / job)
    assert (found["frozen.weight"].dtype, found["up.weight"].dtype) == (torch.bfloat16, torch.float32)
    for dtype, stored in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        consolidate(made / job, tmp_path / dtype, dtype=dtype)  # type: ignore[arg-type]
        written = load_file(tmp_path / dtype / "model.safetensors")
        floats = {name: value for name, value in written.items() if value.is_floating_point()}
        assert {value.dtype for value in floats.values()} == {stored}
        assert torch.equal(floats["frozen.weight"], found["frozen.weight"].to(stored))


@pytest.mark.distributed
def test_k14_a_save_without_frozen_weights_is_complete_without_them(made: Path) -> None:
    found = gathered(find(made / "z2_adapter" / "checkpoint-2"))
    expected = {k: v for k, v in live(made, "z2_adapter").items() if not k.startswith("frozen.")}
    assert_same(found, expected)


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z1_bf16_optimizer", "z3_fp32", "z0_fp32"])
def test_buffers_keep_their_exact_values(made: Path, job: str) -> None:
    found = gathered(find(made / job / "checkpoint-2"))
    assert found["offsets"].tolist() == [2**40 + 1, -3]
    assert found["mask"].tolist() == [True, False, True]
    assert found["running"].any()
    assert "scratch" not in found


@pytest.mark.distributed
def test_k05_stage_0_in_16_bits_says_that_there_are_no_masters(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gathered(find(made / "z0_bf16" / "checkpoint-2"))
    assert "16-bit weights" in caplog.text


def test_k04_partitions_are_taken_in_the_order_of_ranks(tmp_path: Path) -> None:
    weight = torch.randn(11, 3)
    found = gathered(find(hand_made(tmp_path / "checkpoint-7", weight, ranks=11, prefix="bf16_")))
    assert torch.equal(found["w"], weight)


# --- partitions that do not fit ------------------------------------------------------------------------


@pytest.mark.distributed
def test_files_of_another_model_do_not_fit(copy_of: Callable[[str], Path]) -> None:
    frozen, groups = copy_of("z3_bf16_frozen"), copy_of("z3_groups")
    for file in (groups / "checkpoint-2" / "global_step2").glob("*_optim_states.pt"):
        shutil.copy(file, frozen / "checkpoint-2" / "global_step2")
    with pytest.raises(CheckpointError, match=r"rank_0.*4 parameter groups, the model file 2"):
        gathered(find(frozen))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("job", "key", "message"),
    [
        ("z3_fp32", "fp32_flat_groups", r"zero_pp_rank_1_.*group 0 has 435 elements, its parameters 437"),
        ("z2_fp32", "single_partition_of_fp32_groups", r"do not fit the model"),
    ],
)
def test_k16_a_partition_that_is_too_short(
    copy_of: Callable[[str], Path], job: str, key: str, message: str
) -> None:
    run = copy_of(job)
    file = run / "checkpoint-2" / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def shorten(content: dict[str, Any]) -> None:
        groups = content["optimizer_state_dict"][key]
        groups[0] = groups[0][:435].clone() if job == "z3_fp32" else groups[0][:420].clone()

    edit(file, shorten)
    with pytest.raises(CheckpointError, match=message):
        gathered(find(run))


@pytest.mark.distributed
def test_no_tensor_goes_missing_silently(copy_of: Callable[[str], Path]) -> None:
    run = copy_of("z3_groups")
    folder = run / "checkpoint-2" / "global_step2"
    for file in folder.glob("*_model_states.pt"):
        edit(file, lambda content: content["param_shapes"].pop(2))
    for file in folder.glob("*_optim_states.pt"):
        edit(file, lambda content: content["optimizer_state_dict"]["fp32_flat_groups"].pop(2))
    with pytest.raises(CheckpointError, match=r"no data for 1 of 13 tensors: down\.weight"):
        gathered(find(run))


@pytest.mark.distributed
def test_frozen_weights_that_stayed_on_nvme(copy_of: Callable[[str], Path]) -> None:
    run = copy_of("z3_bf16_frozen")
    file = run / "checkpoint-2" / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(file, lambda content: content["frozen_param_fragments"].update({"frozen.weight": torch.empty(0)}))
    with pytest.raises(CheckpointError, match=r"rank_1.*frozen frozen\.weight has 0 elements"):
        gathered(find(run))


# --- partitions on NVMe ----------------------------------------------------------------------------------

IDS = {0: "1_1", 1: "2_4", 2: "8_8", 3: "0_9"}
"""The groups of z3_groups, by the ids of their first and last parameter: two interleaved param groups."""


@pytest.fixture
def swapped(copy_of: Callable[[str], Path]) -> Path:
    """z3_groups as it would be with its groups 0, 1 and 3 on NVMe; group 2 stays in the .pt file."""
    folder = copy_of("z3_groups") / "checkpoint-2" / "global_step2"
    for file in folder.glob("*_optim_states.pt"):
        rank = int(re.findall(r"rank_(\d+)", file.name)[0])
        swap = folder / "offloaded_tensors" / f"rank{rank:02d}"
        swap.mkdir(parents=True)

        def move_out(content: dict[str, Any], swap: Path = swap) -> None:
            groups = content["optimizer_state_dict"]["fp32_flat_groups"]
            for index in (0, 1, 3):
                raw = groups[index].detach().numpy().tobytes()
                (swap / f"{IDS[index]}.tensor.swp").write_bytes(raw + b"\xff" * (-len(raw) % 1024))
                (swap / f"exp_avg-{IDS[index]}.tensor.swp").write_bytes(b"")
                groups[index] = torch.empty(0)

        edit(file, move_out)
    return folder


@pytest.mark.distributed
def test_k22_masters_in_swap_files(made: Path, swapped: Path) -> None:
    checkpoint = find(swapped)
    assert checkpoint.nvme
    assert_same(gathered(checkpoint), live(made, "z3_groups"))


@pytest.mark.distributed
def test_k22_a_swap_file_that_is_missing(swapped: Path) -> None:
    lost = swapped / "offloaded_tensors" / "rank01" / "2_4.tensor.swp"
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost} is missing"):
        gathered(find(swapped))


@pytest.mark.distributed
def test_k22_a_swap_file_that_is_short(swapped: Path) -> None:
    short = swapped / "offloaded_tensors" / "rank01" / "1_1.tensor.swp"
    short.write_bytes(short.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=rf"{short} has 1000 bytes; .* need 1360"):
        gathered(find(swapped))


@pytest.mark.distributed
def test_k22_a_rank_whose_swap_folder_is_missing(swapped: Path) -> None:
    shutil.rmtree(swapped / "offloaded_tensors" / "rank00")
    with pytest.raises(CheckpointError, match=r"offloaded_tensors/rank00 is missing"):
        find(swapped)


@pytest.mark.distributed
def test_k22_swap_files_whose_order_tells_nothing(swapped: Path) -> None:
    for file in swapped.glob("offloaded_tensors/*/*1_1.tensor.swp"):
        file.rename(file.with_name(file.name.replace("1_1", "1_12")))
    with pytest.raises(CheckpointError, match="no telling which swap file"):
        gathered(find(swapped))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_k22_a_real_run_on_nvme(made_on_nvme: Path) -> None:
    checkpoint = find(made_on_nvme / "z3_nvme")
    assert checkpoint.nvme
    names = {file.name for file in checkpoint.swap_folder(1).glob("[0-9]*.swp")}
    assert len(names) == 3, "three groups of one parameter each, two of them of one size"
    assert_same(gathered(checkpoint), live(made_on_nvme, "z3_nvme"))


# --- universal checkpoints -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def universal(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The universal form of a job's checkpoint, made by DeepSpeed's own tool."""

    def convert(job: str) -> Path:
        folder = tmp_path_factory.mktemp("universal") / "global_step2_universal"
        source = made / job / "checkpoint-2" / "global_step2"
        argv = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(source)]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run(
            [*argv, "--output_folder", str(folder), *workers],
            env=environment,
            check=True,
            capture_output=True,
        )
        return folder

    return convert


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z2_fp32", "z3_fp32", "z3_bf16"])
def test_a_universal_checkpoint_holds_the_same(
    made: Path, universal: Callable[[str], Path], job: str
) -> None:
    folder = universal(job)
    for place in (folder, folder.parent):
        checkpoint = find(place)
        assert checkpoint.universal
        assert_same(gathered(checkpoint), live(made, job))
    (folder / "zero" / next(iter(of_checkpoint(checkpoint).entries)) / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"fp32\.pt cannot be read"):
        of_checkpoint(find(folder))
