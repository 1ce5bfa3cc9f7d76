"""What a pickle, a zip or a content can be made to say, by hand or by damage: one error, and nothing run."""

from __future__ import annotations

import copy
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import edit
from by_hand import Model, save
from hypothesis import given, settings
from hypothesis import strategies as st

from dstool.checkpoint import layout, pickles, reader
from dstool.checkpoint.pickles import TensorRef
from dstool.errors import CheckpointError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of torch.save: a tensor of 12 numbers, and one of 100."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(100)}, path)
    return path


def with_program(file: Path, program: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """The same file with another pickle."""
    with zipfile.ZipFile(file) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(file, "w", compression) as new:
        for name, data in records.items():
            new.writestr(name, program if name.endswith("data.pkl") else data)
    return file


def refusal(file: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        layout.read(file, **options)
    assert "\n" not in caught.value.message
    assert str(file) in caught.value.message
    assert len(caught.value.message) < 1000
    assert caught.value.hint
    return caught.value


# --- code ------------------------------------------------------------------------------------------------


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text.encode())]) + text.encode()


TRAP = "sprung"
MKDIR = f"(S'{TRAP}'\nt".encode()
PROGRAMS = {
    "protocol 0, REDUCE": b"cposix\nmkdir\n" + MKDIR + b"R.",
    "protocol 0, INST": f"(S'{TRAP}'\niposix\nmkdir\n.".encode(),
    "protocol 1, OBJ": f"(cposix\nmkdir\nS'{TRAP}'\no.".encode(),
    "protocol 2, NEWOBJ": b"\x80\x02cposix\nmkdir\n" + MKDIR + b"\x81.",
    "protocol 4, STACK_GLOBAL": b"\x80\x04" + short("posix") + short("mkdir") + b"\x93" + MKDIR + b"R.",
    "protocol 4, NEWOBJ_EX": b"\x80\x04cposix\nmkdir\n" + MKDIR + b"}\x92.",
    "protocol 4, NEWOBJ_EX with words": b"\x80\x04cposix\nmkdir\n)}S'path'\n" + b"S'sprung'\ns\x92.",
    "BUILD": b"cposix\nmkdir\n)R}S'a'\ncposix\nmkdir\nsb.",
    "BUILD with slots": b"cposix\nmkdir\n)R(N}S'__setstate__'\ncposix\nmkdir\nstb.",
    "a dict that is built": b"cbuiltins\ndict\n)R(S'a'\ncposix\nmkdir\nu.",
    "a list that is built": b"cbuiltins\nlist\n)R(cposix\nmkdir\ne.",
    "nested": b"(lp0\n(dp1\nS'a'\ncposix\nmkdir\n" + MKDIR + b"Rsa.",
    "getattr": b"c__builtin__\ngetattr\n(cposix\nmkdir\nS'__call__'\ntR" + MKDIR + b"R.",
    "eval": b'cbuiltins\neval\n(S\'__import__("os").mkdir("sprung")\'\ntR.',
    "a dotted name": b"\x80\x04" + short("os") + short("path.os.mkdir") + b"\x93" + MKDIR + b"R.",
    "as a persistent id": b"cposix\nmkdir\n" + MKDIR + b"RQ.",
    "through torch": b"ctorch._tensor\n_rebuild_from_type_v2\n(cposix\nmkdir\nNcposix\nmkdir\n"
    + MKDIR
    + b"NtR.",
    "runpy": b"crunpy\n_run_code\n(S'import os; os.mkdir(\"sprung\")'\n}tR.",
    "torch.hub": b"ctorch.hub\nload\n(S'a/b'\nS'c'\ntR.",
    "subprocess": b"csubprocess\nrun\n((lS'mkdir'\naS'sprung'\natR.",
    "dstool itself": b"cdstool.checkpoint.companions\ncopy\n(S'a'\nS'b'\ntR.",
    "the stand-ins": b"cdstool.checkpoint.pickles\n_Reader\n)R.",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_K17_code_is_named_and_never_run(kind: str, file: Path, here: Path) -> None:
    with_program(file, PROGRAMS[kind])
    error = refusal(file)
    assert "which no ZeRO checkpoint needs" in error.message
    assert "--trust-pickle" in str(error.hint)
    try:
        layout.read(file, trust=True)
    except CheckpointError as trusted:  # it is no dictionary
        assert "--trust-pickle" not in str(trusted.hint)
    assert not (here / TRAP).exists()


class Odd(dict[str, int]):
    """A class of somebody else's, saved with the run."""


def test_K17_trust_reads_around_objects_of_any_class(file: Path) -> None:
    import argparse
    import collections
    import datetime

    import numpy as np

    odd = [
        argparse.Namespace(lr=1e-3, when=datetime.datetime(2026, 1, 1)),
        collections.Counter("abca"),
        collections.deque([1, 2]),
        Odd(a=1),
        np.arange(3),
        np.float32(2),
        {1, 2},
        frozenset({3}),
        complex(1, 2),
        slice(1, 2),
        range(3),
        torch.float8_e4m3fn,
        Exception("x"),
    ]
    torch.save({"w": torch.ones(3), "args": odd, "end": 7}, file)
    error = refusal(file)
    assert "argparse.Namespace" in error.message
    assert "and " in error.message
    content = layout.read(file, trust=True)
    assert (content["w"].shape, content["end"]) == ((3,), 7)


def test_every_foreign_name_is_given_at_once(file: Path) -> None:
    with_program(file, b"(lcevil\none\nacevil\ntwo\n)Ra\x8c\x02a\n\x8c\x04\xed\x95\x9cx\x93a.")
    error = refusal(file)
    assert "asks for evil.one, evil.two, 'a\\n" in error.message


# --- memory and time -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04}r\xff\xff\xff\xff.",
        b"\x80\x04}p4294967295\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"1.",
        b"\x80\x04X" + struct.pack("<I", 2**32 - 1) + b"a.",
        b"(" * 200_000 + b".",
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x04",
        b"",
        b".",
        b"0.",
        b"\x82\x01.",
        b"h\x05.",
    ],
)
def test_a_pickle_that_asks_for_much_or_makes_no_sense(program: bytes, file: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(with_program(file, program))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_pickle_that_grows_when_it_is_read(file: Path) -> None:
    with_program(file, b"(" * 50_000_000, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 1_000_000
    assert "compressed" in refusal(file).message


# --- tensors -------------------------------------------------------------------------------------------


def tensor(
    offset: Any = 0, size: Any = (3, 4), stride: Any = (4, 1), *, count: int = 12, key: str = "0"
) -> Any:
    """The pickle of a dictionary with one tensor, whose numbers can be any."""

    class Place:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Stored(), offset, size, stride, False, {})

    class Stored:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", count) if isinstance(obj, Stored) else None

    import io

    out = io.BytesIO()
    Pickler(out, 2).dump({"w": Place()})
    return out.getvalue()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (tensor(1), "larger than its record"),
        (tensor(size=(4, 4)), "larger than its record"),
        (tensor(stride=(5, 1)), "larger than its record"),
        (tensor(2**62), "larger than its record"),
        (tensor(count=13), "has 48 bytes"),
        (tensor(key="7"), "missing"),
        (tensor(key="../data.pkl"), "missing"),
        (tensor(-1), "starts nowhere"),
        (tensor(size=(-3, -4)), "a shape that is none"),
        (tensor(stride=(-4, 1)), "a shape that is none"),
        (tensor(size=(2**63, 1)), "a shape that is none"),
        (tensor(size=(2.0, 1)), "a shape that is none"),
        (tensor(size=("3", 4)), "a shape that is none"),
        (tensor(size=(2**40,), stride=(0,)), "not as large on disk"),
        (tensor(size=(2**31, 2**31), stride=(0, 0)), "not as large on disk"),
        (tensor(size=(10, 3), stride=(1, 1)), "overlap"),
        (tensor(size=(3, 4), stride=(2, 1)), "overlap"),
        (tensor(size=(3,)), "argument"),
    ],
)
def test_a_tensor_that_is_not_where_it_says(program: bytes, words: str, file: Path) -> None:
    assert words in refusal(with_program(file, program)).message


def test_a_small_expanded_tensor_is_whole(file: Path) -> None:
    value = torch.arange(4.0).expand(3, 4)
    torch.save({"w": value, "one": torch.ones(1).expand(5)}, file)
    weights = reader.untied(reader.of_file(file))
    assert torch.equal(weights["w"], value)
    assert torch.equal(weights["one"], torch.ones(5))


def test_a_compressed_record_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(file, "w") as new:
        for name, data in records.items():
            kind = zipfile.ZIP_DEFLATED if "/data/" in name else zipfile.ZIP_STORED
            new.writestr(name, data, kind)
    assert "compressed" in refusal(file).message


def test_a_tensor_cannot_be_moved_after_it_was_made(file: Path) -> None:
    program = tensor()
    moved = program[:-2] + b"}(U\x06offsetK\x00U\x04fileU\x0b/etc/passwdubs."
    assert "altered" in refusal(with_program(file, moved)).message


def test_the_stand_ins_of_this_process_cannot_be_altered(file: Path) -> None:
    before = dict(vars(pickles.Shape))
    for name in ("torch\nSize", "collections\nOrderedDict", "torch._utils\n_rebuild_tensor_v2"):
        refusal(with_program(file, f"c{name}\n(N}}S'numel'\nI1\nstb.".encode()))
    assert dict(vars(pickles.Shape)) == before
    assert pickles.Shape((2, 3)).numel() == 6


# --- damage ----------------------------------------------------------------------------------------------


def test_K26_every_flipped_bit_outside_of_the_data_is_found_or_does_no_harm(tmp_path: Path) -> None:
    """One bit at a time in the pickle, the headers and the directory. The tensors stay where they are."""
    file = tmp_path / "a.pt"
    torch.save(
        {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "n": 7}, file
    )
    data = file.read_bytes()
    whole = layout.read(file)
    spans = [(ref.offset, ref.offset + ref.nbytes) for ref in pickles.tensors(whole)]
    found = 0
    for at in range(len(data)):
        if any(start <= at < stop for start, stop in spans):
            continue
        bit = at % 8
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            assert layout.read(file) == whole, f"byte {at}, bit {bit}"
        except CheckpointError as error:
            assert "\n" not in error.message
            found += 1
    assert found > 300


def test_K26_every_length_that_a_file_can_be_cut_to(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3)}, file)
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        refusal(file)


NODES: list[Any] = [
    None,
    -1,
    0,
    2**70,
    float("nan"),
    float("inf"),
    "x",
    [],
    {},
    (1,),
    [[1]],
    {"a": 1},
    b"",
    True,
]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a content."""
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, each in items:
        found += places(each, (*path, key))
    return found


def put(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


@settings(max_examples=250)
@given(data=st.data(), stage=st.integers(0, 3), kind=st.sampled_from(["model", "optim"]))
def test_K_a_content_of_another_form_is_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, stage: int, kind: str
) -> None:
    """Anything in a file may be anything: no traceback, whatever is made of it."""
    model = Model(
        [{"w": torch.ones(3, 2)}, {"v": torch.ones(5)}],
        frozen={"f": torch.ones(2)},
        buffers={"n": torch.ones(1)},
        tied={"t": "w"},
        paddings=[[1], [2]],
    )
    root = save(tmp_path_factory.mktemp("form", numbered=True) / "checkpoint-7", model, stage, 2)
    files = sorted((root / "global_step7").glob(f"*_{kind}_states.pt"))
    if not files:
        return
    file = data.draw(st.sampled_from(files))
    content = torch.load(file, weights_only=True)
    other = [*NODES, torch.ones(2, dtype=torch.int64), torch.ones(2, 2).t(), torch.empty(0)]
    put(content, data.draw(st.sampled_from(places(content))), copy.copy(data.draw(st.sampled_from(other))))
    torch.save(content, file)
    try:
        weights = reader.open_checkpoint(root)
        for name in weights:
            assert weights[name].numel()
    except CheckpointError as error:
        assert "\n" not in error.message
        assert error.hint


def test_flips_in_the_data_of_a_step_are_one_error(tmp_path: Path) -> None:
    root = save(tmp_path / "checkpoint-7", Model([{"w": torch.ones(3)}]), 2, 1)
    (file,) = root.glob("*/*_optim_states.pt")
    for step in (float("nan"), float("inf"), -1.0, 1e30):

        def change(content: dict[str, Any], step: float = step) -> None:
            state = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
            state[0]["step"] = torch.tensor(step)

        edit(file, change)
        try:
            reader.open_checkpoint(root)
        except CheckpointError as error:
            assert str(file) in error.message


def test_a_name_tied_to_a_tied_name_is_found(tmp_path: Path) -> None:
    model = Model([{"a": torch.ones(3)}], tied={"b": "a"}, kept=torch.float32)
    root = save(tmp_path / "checkpoint-7", model, 0, 1)
    (file,) = root.glob("*/*_model_states.pt")
    edit(file, lambda content: content.update(shared_params={"c": "b"}))
    weights = reader.open_checkpoint(root)
    assert weights.tied == {"b": "a", "c": "a"}
    assert torch.equal(weights["c"], torch.ones(3))


def test_frozen_weights_in_another_order_of_elements(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4).t()
    model = Model([{"w": torch.ones(3)}], frozen={"f": value})
    for stage in (0, 1, 2, 3):
        root = save(tmp_path / f"checkpoint-{stage}", model, stage, 2)
        assert torch.equal(reader.open_checkpoint(root)["f"], value)


def test_what_a_tensor_is_can_be_asked_without_its_data(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Callable[..., Any]] = []
    monkeypatch.setattr(TensorRef, "number", lambda self: opened.append(self.number))
    assert layout.read(file)["w"].shape == (3, 4)
    assert not opened


def test_a_trusted_file_that_is_one_foreign_object_is_told_as_such(file: Path) -> None:
    with_program(file, b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    message = refusal(file, trust=True).message
    assert message == f"{file} holds an object, where a checkpoint has a dict: nothing of DeepSpeed's"
