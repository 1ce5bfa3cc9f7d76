"""Files that are damaged or hostile: one error, nothing run, and whatever is whole is as torch reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import edit
from by_hand import Model, save
from hypothesis import given, settings
from hypothesis import strategies as st

from dstool.checkpoint import layout, pickles, reader
from dstool.errors import CheckpointError


class Runs:
    """What a pickle calls when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (os.system, "posix.system"),
        (os.mkdir, "posix.mkdir"),
        (eval, "__builtin__.eval"),
        (exec, "__builtin__.exec"),
        (getattr, "__builtin__.getattr"),
        (subprocess.Popen, "commands.Popen"),
        (torch.hub.load, "torch.hub.load"),
        (torch.load, "torch.serialization.load"),
    ],
)
def test_k17_what_a_pickle_would_run_is_named_and_not_run(call: Any, name: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    words = {os.mkdir: str(sprung), eval: f"__import__('os').mkdir({str(sprung)!r})"}
    file = saved(
        tmp_path / "a.pt", {"w": torch.ones(2), "args": Runs(call, words.get(call, f"mkdir {sprung}"))}
    )
    with pytest.raises(CheckpointError) as caught:
        layout.read(file)
    assert f"{file} asks for {name}" in caught.value.message
    assert "--trust-pickle" in str(caught.value.hint)
    trusted = layout.read(file, trust=True)
    assert trusted["w"].shape == (2,)
    assert not sprung.exists()


def rewritten(file: Path, program: bytes) -> Path:
    """`file` with another pickle in it."""
    other = file.with_name("hostile.pt")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, program if info.filename.endswith("data.pkl") else old.read(info))
    return other


@pytest.mark.parametrize(
    "program",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"ctorch\nSize\n}S'numel'\nI1\nsb.",
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"\x80\x02K\x01Q.",
        b"ccollections\nOrderedDict\n)R}S'get'\nI1\nsb.",
        b"garans",
        b"",
    ],
)
def test_a_pickle_written_by_hand_is_one_error_or_harmless(program: bytes, tmp_path: Path) -> None:
    file = rewritten(saved(tmp_path / "a.pt", {"w": torch.ones(2)}), program)
    try:
        assert isinstance(layout.read(file), dict)
    except CheckpointError as error:
        assert "\n" not in error.message


WHOLE = {"module": {"w": torch.arange(12.0).reshape(3, 4), "h": torch.ones(3, dtype=torch.bfloat16)}, "n": 7}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 10**6))
def test_k26_any_flipped_byte_or_cut_is_one_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    file = saved(tmp_path_factory.mktemp("flip") / "a.pt", WHOLE)
    data = bytearray(file.read_bytes())
    data[at % len(data)] = value
    for damaged in (bytes(data), bytes(data[: cut % len(data)])):
        file.write_bytes(damaged)
        try:
            content = layout.read(file)
        except CheckpointError as error:
            assert str(file) in error.message
            continue
        for ref in pickles.tensors(content):
            assert ref.offset + ref.nbytes <= len(damaged)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tensors_of_any_shape_and_stride_are_those_of_torch(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    types = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float64,
    ]
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    value = torch.randint(0, 2, shape).to(data.draw(st.sampled_from(types)))
    if shape and data.draw(st.booleans()):
        value = value.transpose(0, -1)
    if shape and data.draw(st.booleans()):
        value = value[::2]
    file = saved(tmp_path_factory.mktemp("any") / "a.pt", {"w": value, "x": torch.ones(3)})
    found = reader.untied(reader.of_file(file))["w"]
    assert found.dtype == value.dtype
    assert torch.equal(found, value)


def test_a_pickle_of_a_function_of_ours_cannot_be_altered(tmp_path: Path) -> None:
    program = b"ctorch._utils\n_rebuild_tensor_v2\n}S'__defaults__'\nI1\nsb."
    file = rewritten(saved(tmp_path / "a.pt", {}), program)
    with pytest.raises(CheckpointError, match="altered"):
        layout.read(file)


def test_pickle_protocols(tmp_path: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        file = tmp_path / f"{protocol}.pt"
        torch.save({"w": torch.ones(2), "n": [1, {"a": (2, 3)}]}, file, pickle_protocol=protocol)
        content = layout.read(file)
        assert content["n"] == [1, {"a": (2, 3)}]
        assert content["w"].shape == (2,)


def test_k17_the_objects_that_an_fp16_run_saves_need_no_trust(tmp_path: Path) -> None:
    """Those of DeepSpeed's that only such a run has, which no CPU can make."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(2**16, 1000, 1.0, 2, False, dtype=torch.float16)
    more = {
        "loss_scaler": scaler,
        "zero_stage": ZeroStageEnum.gradients,
        "param_slice_mappings": [{"w": fragment_address(numel=7, start=0)}],
    }
    model = Model([{"w": torch.randn(5, 3)}], kept=torch.float16)
    root = save(tmp_path / "checkpoint-7", model, 2, 2)
    for file in root.glob("*/*_optim_states.pt"):
        edit(file, lambda content: content["optimizer_state_dict"].update(more))
    assert torch.equal(reader.open_checkpoint(root)["w"], model.trained["w"])


def test_a_pickle_seen_before_is_not_read_again_unless_its_tensors_lie_in_the_file(tmp_path: Path) -> None:
    """At stage 3 the ranks' model files are alike but for what is frozen, of which each has its own part."""
    empty, filled = {"module": {"w": torch.empty(0)}}, {"part": torch.zeros(3)}
    seen: dict[bytes, Any] = {}
    one, two = (
        layout.read(saved(tmp_path / f"{name}.pt", empty | {"step": 7}), seen=seen) for name in ("one", "two")
    )
    assert one is two
    assert layout.read(saved(tmp_path / "later.pt", empty | {"step": 8}), seen=seen)["step"] == 8
    one, two = (layout.read(saved(tmp_path / f"part {n}.pt", filled), seen=seen) for n in (1, 2))
    assert (one["part"].file.name, two["part"].file.name) == ("part 1.pt", "part 2.pt")
    whole = saved(tmp_path / "cut.pt", empty | {"step": 7})
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        layout.read(whole, seen=seen)
