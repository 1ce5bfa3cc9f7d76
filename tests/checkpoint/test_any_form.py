"""Checkpoints of any form against the tensors that they were made of, down to the bits of what is written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import Model, State, save
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dstool.checkpoint.reader import Weights, open_checkpoint
from dstool.consolidate import consolidate
from dstool.errors import ConfigError
from dstool.inspection import inspect

STORED: dict[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "keep": None,
}
OTHERS = (torch.int64, torch.bool, torch.uint8, torch.float32, torch.bfloat16, torch.float64, torch.int32)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    logging.getLogger("dstool").setLevel(logging.ERROR)
    yield
    logging.getLogger("dstool").setLevel(logging.NOTSET)


def shapes(least: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 7), min_size=least, max_size=3)


@st.composite
def models(draw: st.DrawFn, stage: int) -> Model:
    """Parameters of odd sizes in one to three groups, some frozen, some tied, and buffers of any type."""
    torch.manual_seed(draw(st.integers(0, 99)))
    kept = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    count = draw(st.integers(1, 3))
    groups = [
        {f"층.{index}.w {n}": torch.randn(draw(shapes())) for n in range(draw(st.integers(1, 4)))}
        for index in range(count)
    ]
    frozen = {f"frozen.{n}": torch.randn(draw(shapes(1))).to(kept) for n in range(draw(st.integers(0, 2)))}
    if stage < 3 and frozen and draw(st.booleans()):
        frozen = {name: value.transpose(0, -1) for name, value in frozen.items()}  # as DeepSpeed saves it
    buffers: State = {}
    for n in range(draw(st.integers(0, 3))):
        buffers[f"buffer.{n}"] = torch.randint(0, 2, draw(shapes())).to(draw(st.sampled_from(OTHERS)))
    names = [*(name for group in groups for name in group), *frozen]
    tied = {f"tied.{n}": draw(st.sampled_from(names)) for n in range(draw(st.integers(0, 2)))}
    model = Model(groups, frozen, buffers, tied, kept)
    if stage in (1, 2) and draw(st.booleans()):
        model.paddings = [[draw(st.integers(0, 5)) for _ in group] for group in groups]
    return model


def check_read(weights: Weights, model: Model, stage: int) -> None:
    """Every tensor, and some of its rows, without a cast."""
    whole = model.whole
    if stage == 0:
        whole |= {name: value.to(model.kept) for name, value in model.trained.items()}
    assert set(weights) == {*whole, *model.tied}
    assert weights.tied == model.tied
    for name in weights:
        value, found = whole[model.tied.get(name, name)], weights[name]
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        assert torch.equal(found, value), name
        if value.ndim:
            half = len(value) // 2
            assert torch.equal(weights.rows(name, half, len(value)), value[half:]), name


def read_back(folder: Path, written: tuple[str, ...]) -> State:
    state: State = {}
    for name in written:
        if name.endswith(".index.json"):
            continue
        file = folder / name
        part = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        assert not state.keys() & part.keys()
        state |= part
    return state


@settings(max_examples=120)
@given(data=st.data(), stage=st.integers(0, 3), ranks=st.integers(1, 5))
def test_K_any_checkpoint_is_read_and_written_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, stage: int, ranks: int
) -> None:
    model = data.draw(models(stage))
    here = tmp_path_factory.mktemp("any form", numbered=True)
    root = save(here / "체크 포인트-7", model, stage, ranks)
    if stage == 3 and data.draw(st.booleans()):  # as the Trainer gathers them beside it
        save_file(
            {name: value.to(model.kept) for name, value in model.trained.items()}, root / "model.safetensors"
        )
    weights = open_checkpoint(root)
    check_read(weights, model, stage)

    dtype = data.draw(st.sampled_from([*STORED]))
    size = data.draw(st.sampled_from(["5GB", "0.2KB", "0.001KB"]))
    form: Any = data.draw(st.sampled_from(["safetensors", "bin"]))
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": size, "file_format": form}
    planned = consolidate(root, here / "out", dry_run=True, **options)
    result = consolidate(root, here / "out", verify=True, **options)
    assert (planned.files, planned.tensors, planned.parameters) == (
        result.files,
        result.tensors,
        result.parameters,
    )
    state = read_back(result.output_dir, result.files)
    assert state.keys() == model.whole.keys()
    for name in state:
        value = weights[name]
        stored = STORED[dtype] if value.is_floating_point() and STORED[dtype] else value.dtype
        assert state[name].dtype == stored, name
        assert torch.equal(state[name], value.to(stored)), name
    assert planned.bytes == sum(value.nbytes for value in state.values())
    if len(result.files) > 1:
        index = json.loads((result.output_dir / result.files[-1]).read_text())
        assert index["weight_map"].keys() == state.keys()


@settings(max_examples=40)
@given(data=st.data(), stage=st.integers(1, 3), ranks=st.integers(1, 4))
def test_without_frozen_weights_the_rest_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, stage: int, ranks: int
) -> None:
    model = data.draw(models(stage))
    here = tmp_path_factory.mktemp("frozen", numbered=True)
    root = save(here / "checkpoint-7", model, stage, ranks)
    result = consolidate(root, here / "out", exclude_frozen=True)
    state = read_back(result.output_dir, result.files)
    assert state.keys() == {*model.trained, *model.buffers}
    assert all(torch.equal(state[name], value) for name, value in model.trained.items())


def test_a_dry_run_is_short_for_people_and_whole_in_json(here: Path, command: Callable[..., Any]) -> None:
    save(here / "checkpoint-7", Model([{"w": torch.ones(300, 5)}]), 3, 2)
    argv = ("dstool", "consolidate", "checkpoint-7", "--dry-run", "--dtype", "bf16")
    done = command(*argv, cwd=here)
    assert done.out.startswith("Would be consolidated\n")
    assert "3.0 kB" in done.out
    assert "plan" not in done.out
    assert "next" not in done.out
    (planned,) = command(*argv, "--json", cwd=here).json()["plan"]
    assert [piece["length"] for piece in planned["pieces"]] == [3000, 3000]
    assert [each.name for each in here.iterdir()] == ["checkpoint-7"]


def test_k29_nothing_depends_on_chmod(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk that has no permissions."""

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    model = Model([{"w": torch.randn(3, 5)}])
    save(here / "checkpoint-7", model, 2, 2)
    monkeypatch.setattr(Path, "chmod", refuse)
    result = consolidate(here / "checkpoint-7", verify=True)
    assert torch.equal(load_file(result.output_dir / "model.safetensors")["w"], model.trained["w"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk read-only")
def test_k29_a_checkpoint_on_a_disk_that_is_read_only(here: Path) -> None:
    disk = here / "disk"
    model = Model([{"w": torch.randn(3, 5)}])
    root = save(disk / "checkpoint-7", model, 3, 2)
    for argv in (["--bind", str(disk), str(disk)], ["-o", "remount,bind,ro", str(disk)]):
        if subprocess.run(["mount", *argv], check=False, capture_output=True).returncode:
            pytest.skip("no disk can be mounted here")
    try:
        assert inspect(root).problem is None
        result = consolidate(root, here / "out", verify=True)
        assert torch.equal(load_file(result.output_dir / "model.safetensors")["w"], model.trained["w"])
        with pytest.raises(ConfigError, match="Read-only file system"):
            consolidate(root)
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.mark.parametrize("engine", ["stream", "deepspeed"])
def test_k17_the_script_that_lies_in_the_checkpoint_is_not_run(
    engine: Any, here: Path, command: Callable[..., Any]
) -> None:
    root = save(here / "checkpoint-7", Model([{"w": torch.ones(3, 5)}]), 2, 2)
    for folder in (root, root / "global_step7", here):
        (folder / "zero_to_fp32.py").write_text(
            f"open({str(here / 'sprung')!r}, 'w')\nraise SystemExit('run')\n"
        )
    argv = ("dstool", "consolidate", "checkpoint-7", "--engine", engine, "--json")
    found = command(*argv, cwd=here, env={"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}).json()
    assert found["files"] == ["model.safetensors"]
    assert not (here / "sprung").exists()


def test_m10_bin_files_and_shards_are_of_our_own_writer(here: Path) -> None:
    """Transformers 5 writes no .bin files, and shards of 50 GB."""
    model = Model([{f"w{n}": torch.randn(500, 4) for n in range(4)}])
    root = save(here / "checkpoint-7", model, 3, 2)
    result = consolidate(root, here / "out", file_format="bin", max_shard_size="10KB")
    assert len(result.files) == 5
    assert all(
        torch.equal(value, model.trained[name])
        for name, value in read_back(here / "out", result.files).items()
    )
    assert signature(consolidate).parameters["max_shard_size"].default == "5GB"
