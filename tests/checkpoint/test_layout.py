"""What is found, and what each broken checkpoint is refused for."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import edit, hand_made

from dstool.checkpoint.layout import find, is_zero, newest_complete
from dstool.errors import CheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An output folder with two hand-made checkpoints of two ranks."""
    for step in (4, 12):
        hand_made(tmp_path / "out" / f"checkpoint-{step}", torch.randn(6, 2), ranks=2, step=step)
    return tmp_path / "out"


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find(path)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


# --- the levels ------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z2_bf16", "z3_bf16"])
def test_k01_three_levels_find_the_same(made: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made / job / "checkpoint-4"
    found = find(root)
    assert (found.root, found.tag, found.step, found.world_size) == (root, "global_step4", 4, 2)
    assert found.stage == int(job[1])
    assert len(found.model_files) == (2 if found.stage == 3 else 1)
    assert [file.name for file in found.optim_files] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    ]
    assert find(made / job) == find(root / "global_step4") == found
    monkeypatch.chdir(root / "global_step4")
    assert find(Path()) == found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("job", "stage"), [("z0_fp32", 0), ("z0_bf16", 0), ("z1_bf16_optimizer", 1), ("z2_fp32", 2)]
)
def test_k05_the_stage_comes_from_inside(made: Path, job: str, stage: int) -> None:
    found = find(made / job / "checkpoint-2")
    assert (found.stage, found.world_size, found.nvme) == (stage, 2, False)
    assert len(found.optim_files) == (2 if stage else 0)


def test_nothing_of_deepspeed_is_imported(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dstool.checkpoint.layout import find; "
        f"find(Path({str(run)!r})); assert 'deepspeed' not in sys.modules"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_a_path_that_is_missing_lists_what_is_there(run: Path) -> None:
    error = refusal(run / "checkpoint-13")
    assert "checkpoint-13 does not exist" in error.message
    assert error.hint == f"there is {run / 'checkpoint-4'}, {run / 'checkpoint-12'}"


def test_a_file_is_no_checkpoint(run: Path) -> None:
    error = refusal(run / "checkpoint-4" / "latest")
    assert error.hint is not None
    assert str(run / "checkpoint-4") in error.hint


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    assert "global_step*" in refusal(tmp_path).message


def test_a_folder_above_names_the_runs_in_it(run: Path) -> None:
    assert f"dstool consolidate {run}" == refusal(run.parent).hint


@pytest.mark.parametrize("inside", ["", "checkpoint-20"])
def test_k25_plain_weights_need_no_consolidation(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
    error = refusal(tmp_path)
    assert "already plain weights" in error.message
    assert error.hint == f"dstool merge --input-dir {folder} --output-dir DIR"


def test_latest_is_missing(run: Path) -> None:
    root = run / "checkpoint-4"
    (root / "latest").unlink()
    shutil.copytree(root / "global_step4", root / "global_step10")
    error = refusal(root)
    assert "global_step4, global_step10" in error.message
    assert error.hint == f"name the folder itself: dstool consolidate {root / 'global_step10'}"
    assert find(root / "global_step4").step == 4


@pytest.mark.parametrize("text", [b"global_step99", b"", b" \n", b"\xff\xfe\x00", b"../checkpoint-4", b"."])
def test_k02_latest_that_names_no_folder(run: Path, text: bytes) -> None:
    root = run / "checkpoint-12"
    (root / "latest").write_bytes(text)
    error = refusal(root)
    assert str(root / "latest") in error.message
    assert error.hint is not None
    assert str(root / "global_step12") in error.hint


def test_k02_crlf_is_fine(run: Path) -> None:
    (run / "checkpoint-12" / "latest").write_bytes(b"global_step12\r\n")
    assert find(run / "checkpoint-12").step == 12


def test_newest_complete_is_by_number(run: Path) -> None:
    assert newest_complete(run).step == 12


def test_k26_an_incomplete_newer_checkpoint_is_passed_over(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = run / "checkpoint-12" / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    lost.unlink()
    with caplog.at_level(logging.WARNING, "dstool.checkpoint"):
        assert newest_complete(run).step == 4
    assert str(lost) in caplog.text
    (run / "checkpoint-4" / "latest").unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        newest_complete(run)


def test_a_folder_may_have_any_name(run: Path) -> None:
    (run / "checkpoint-4" / "global_step4").rename(run / "checkpoint-4" / "1² 단계")
    (run / "checkpoint-4" / "latest").write_text("1² 단계\n", encoding="utf-8")
    assert find(run / "checkpoint-4").tag == "1² 단계"
    with pytest.raises(CheckpointError) as caught:
        find(run / "checkpoint-4", tag="x")
    assert caught.value.hint == "--tag '1² 단계'"


def test_is_zero(run: Path, tmp_path: Path) -> None:
    root = run / "checkpoint-4"
    assert all(map(is_zero, (run, root, root / "global_step4")))
    (tmp_path / "plain").mkdir()
    assert not any(map(is_zero, (tmp_path, tmp_path / "plain", tmp_path / "none", root / "latest")))


# --- files that are missing or of another run ------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z2_bf16", "z3_bf16", "z1_bf16_frozen"])
def test_k10_any_missing_file_is_named(made: Path, copy_of: Callable[[str], Path], job: str) -> None:
    folder = copy_of(job) / "checkpoint-2" / "global_step2"
    files = sorted(folder.glob("*_states.pt"))
    assert len(files) == (4 if job == "z3_bf16" else 3)
    for file in files:
        hidden = file.rename(file.with_suffix(".away"))
        assert f"{file} is missing" in refusal(folder).message
        hidden.rename(file)
    assert find(folder).step == 2


@pytest.mark.distributed
@pytest.mark.parametrize("job", ["z2_bf16", "z3_bf16"])
def test_k10_all_optimizer_files_missing(copy_of: Callable[[str], Path], job: str) -> None:
    folder = copy_of(job) / "checkpoint-2" / "global_step2"
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing" in refusal(folder).message


@pytest.mark.distributed
def test_k10_all_model_files_missing(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("z3_bf16") / "checkpoint-2" / "global_step2"
    for file in folder.glob("*_model_states.pt"):
        file.unlink()
    assert "zero_pp_rank_0_mp_rank_00_model_states.pt is missing" in refusal(folder).message


def test_k10_the_hint_is_an_earlier_checkpoint(run: Path) -> None:
    (run / "checkpoint-12" / "global_step12" / "mp_rank_00_model_states.pt").unlink()
    error = refusal(run / "checkpoint-12")
    assert error.hint == f"an earlier checkpoint exists: dstool consolidate {run / 'checkpoint-4'}"


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("rank", [0, 1])
def test_k11_a_file_of_another_step(copy_of: Callable[[str], Path], kind: str, rank: int) -> None:
    run = copy_of("z3_bf16")
    name = f"{'bf16_' if kind == 'optim' else ''}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
    shutil.copy(run / "checkpoint-2" / "global_step2" / name, run / "checkpoint-4" / "global_step4" / name)
    message = refusal(run / "checkpoint-4").message
    assert "files of two saves are mixed" in message
    assert f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt" in message


@pytest.mark.distributed
def test_k11_masters_of_another_step_than_the_model_file(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    run = copy_of("z2_bf16")
    for file in (run / "checkpoint-2" / "global_step2").glob("*_optim_states.pt"):
        shutil.copy(file, run / "checkpoint-4" / "global_step4")
    find(run / "checkpoint-4")
    assert "the optimizer has made 2 steps, the model file says 4" in caplog.text


def test_a_rank_too_many(run: Path) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (1, 2)]
    shutil.copy(folder / names[0], folder / names[1])
    assert f"{names[1]} is there, but the run had only 2 ranks" in refusal(folder).message


def test_another_world_size(run: Path) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    edit(file, lambda content: content["optimizer_state_dict"].update(partition_count=[3]))
    assert f"{file} is of world size 3" in refusal(folder).message


def test_k04_two_files_of_one_rank(run: Path) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name, folder / f"bf16_{name}")
    assert "both of rank 1" in refusal(folder).message


def test_stages_mixed_in_one_folder(run: Path) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    name = "mp_rank_00_model_states.pt"
    shutil.copy(folder / name, folder / f"zero_pp_rank_0_{name}")
    assert "two runs are mixed" in refusal(folder).message


def test_a_stage_0_model_file_among_partitions(run: Path) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    edit(folder / "mp_rank_00_model_states.pt", lambda content: content.update(param_shapes=None))
    assert "is of stage 0" in refusal(folder).message


# --- files that are damaged, foreign or hostile ------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "not a checkpoint"])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_k26_a_damaged_file_is_named(run: Path, kind: str, damage: str) -> None:
    file = sorted((run / "checkpoint-12" / "global_step12").glob(f"*_{kind}_states.pt"))[-1]
    if damage == "not a checkpoint":
        torch.save({"weights": torch.ones(2)}, file)
    else:
        whole = file.read_bytes()
        file.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"version 1"}[damage])
    error = refusal(run / "checkpoint-12")
    assert str(file) in error.message
    assert error.hint is not None
    assert str(run / "checkpoint-4") in error.hint


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture-of-experts"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture-of-experts"),
        ("layer_00-model_states.pt", "pipeline-parallel"),
        ("layer_01-model_00-model_states.pt", "pipeline-parallel"),
        ("mp_rank_01_model_states.pt", "tensor-parallel"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor-parallel"),
    ],
)
def test_k23_other_kinds_are_refused_by_name(run: Path, name: str, kind: str) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    (folder / name).write_bytes(b"")
    error = refusal(run / "checkpoint-4")
    assert f"{folder / name} is part of a {kind} checkpoint" in error.message
    assert error.hint is not None
    assert f"deepspeed.checkpoint.ds_to_universal --input_folder {folder}" in error.hint


def test_k23_the_command_of_the_hint_works_in_a_folder_with_spaces(run: Path) -> None:
    root = run.rename(run.with_name("체크 포인트")) / "checkpoint-4"
    (root / "global_step4" / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    words = shlex.split(str(refusal(root).hint))
    given, made = words[words.index("--input_folder") + 1], words[words.index("--output_folder") + 1]
    assert (Path(given), Path(made)) == (root / "global_step4", root / "global_step4_universal")


def test_k23_tensor_parallel_by_its_content(run: Path) -> None:
    folder = run / "checkpoint-4" / "global_step4"
    edit(folder / "mp_rank_00_model_states.pt", lambda content: content.update(mp_world_size=2))
    assert "tensor-parallel" in refusal(folder).message


def test_a_universal_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "global_step4" / "zero").mkdir(parents=True)
    (tmp_path / "latest").write_text("global_step4")
    assert "universal checkpoint" in refusal(tmp_path).message


class _Trap:
    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sprung),)


def test_k17_a_pickle_is_never_executed(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoint-4" / "global_step4" / "mp_rank_00_model_states.pt"
    edit(file, lambda content: content.update(args=_Trap(tmp_path / "sprung")))
    assert not (tmp_path / "sprung").exists()
    message = refusal(run / "checkpoint-4").message
    assert f"{file} asks for posix.mkdir" in message
    assert not (tmp_path / "sprung").exists()


def test_a_tag_that_is_asked_for_where_there_is_none_says_where_it_would_be(run: Path) -> None:
    tag = run / "checkpoint-4" / "global_step4"
    for place in (run, tag):
        with pytest.raises(CheckpointError) as caught:
            find(place, tag="global_step4")
        assert caught.value.hint == f"dstool consolidate {tag}"
        assert ("run" in caught.value.message) == (place == run)
    with pytest.raises(CheckpointError, match="has no tag 'global_step5'; there is none"):
        find(run, tag="global_step5")


def test_where_several_could_be_meant_one_command_is_shown_and_all_are_named(run: Path) -> None:
    shutil.copytree(run, run.parent / "other")
    error = refusal(run.parent)
    assert error.message.endswith(f"; there is {run.parent / 'other'}, {run}")
    assert error.hint == f"dstool consolidate {run}"
