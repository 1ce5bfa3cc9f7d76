"""`open_checkpoint` and `load_into` as people use them: from a notebook, in threads, sent to a process."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from by_hand import Model, save

from dstool.checkpoint import Weights, load_into, open_checkpoint, writer
from dstool.checkpoint.reader import Entry, Piece, read_bytes
from dstool.errors import CheckpointError


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    groups = [{"w": torch.randn(50, 7), "v": torch.randn(11)}, {"b": torch.randn(5)}]
    return Model(groups, {"f": torch.randn(3, 2)}, {"n": torch.arange(4)}, {"t": "w"})


@pytest.fixture(params=[2, 3])
def root(request: pytest.FixtureRequest, model: Model, tmp_path: Path) -> Path:
    return save(tmp_path / "체크 포인트-7", model, request.param, 3)


def test_names_shapes_types_and_sizes_are_there_when_the_data_is_not(root: Path, model: Model) -> None:
    weights = open_checkpoint(root)
    for file in root.glob("*/*.pt"):
        file.unlink()
    assert list(weights) == [*model.whole, "t"]
    assert len(weights) == 6
    assert "t" in weights
    assert "x" not in weights
    entry = weights.entry("t")
    assert (entry.name, entry.shape, entry.dtype, entry.numel, entry.nbytes) == (
        "w",
        (50, 7),
        "F32",
        350,
        1400,
    )
    kinds = {name: each.kind for name, each in weights.entries.items()}
    assert kinds == {"w": "trained", "v": "trained", "b": "trained", "f": "frozen", "n": "buffer"}
    assert repr(weights) == f"<5 tensors, 376 elements, 1 tied of {root / 'global_step7'}>"
    with pytest.raises(KeyError):
        weights["x"]
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        weights["w"]


def test_the_ranges_of_bytes_are_the_tensor(root: Path, model: Model) -> None:
    weights = open_checkpoint(root)
    for name, value in model.trained.items():
        pieces = weights.entry(name).pieces
        assert {piece.file.parent for piece in pieces} == {root / "global_step7"}
        assert read_bytes(pieces) == value.numpy().tobytes()


def test_it_is_text_in_a_notebook_and_holds_no_file_open(root: Path, model: Model) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    weights = open_checkpoint(str(root))
    value = weights["w"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    del weights
    gc.collect()
    value += 1
    assert torch.equal(value - 1, model.groups[0]["w"] + 1 - 1)
    assert torch.equal(open_checkpoint(root)["w"], model.groups[0]["w"]), "the file stays as it was"


def test_it_is_sent_to_another_process_as_places_alone(root: Path, model: Model) -> None:
    weights = open_checkpoint(root)
    data = pickle.dumps(weights)
    assert len(data) < 20_000
    for other in (pickle.loads(data), pickle.loads(pickle.dumps(weights.entries))):
        assert list(other)[:5] == list(weights)[:5]
    code = "import pickle, sys; w = pickle.load(sys.stdin.buffer); print(float(w['t'].double().sum()))"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert float(done.stdout) == pytest.approx(float(model.groups[0]["w"].double().sum()))


def test_threads_read_at_once(root: Path, model: Model) -> None:
    weights = open_checkpoint(root)
    names = [*model.trained] * 40
    with ThreadPoolExecutor(8) as pool:
        for name, value, part in zip(
            names,
            pool.map(weights.__getitem__, names),
            pool.map(lambda name: weights.rows(name, 1, 3), names),
            strict=True,
        ):
            assert torch.equal(value, model.trained[name])
            assert torch.equal(part, model.trained[name][1:3])


@pytest.mark.parametrize("rows", [(0, 0), (0, 1), (7, 3), (-3, -1), (-99, 2), (49, 999)])
def test_a_slice_is_that_of_the_whole(rows: tuple[int, int], root: Path, model: Model) -> None:
    weights = open_checkpoint(root)
    expected = model.groups[0]["w"][slice(*rows)]
    found = weights.rows("t", *rows)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


class Small(torch.nn.Module):
    def __init__(self, rows: int = 50, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(rows, 7, dtype=dtype))
        self.t = self.w
        self.v = torch.nn.Parameter(torch.zeros(11, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
        self.f = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype))
        self.register_buffer("n", torch.zeros(4, dtype=torch.int64))

    def get_extra_state(self) -> dict[str, int]:
        return {"not": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_takes_the_weights_in_its_own_type(root: Path, model: Model, dtype: torch.dtype) -> None:
    made = Small(dtype=dtype)
    load_into(made, str(root))
    for name, value in model.trained.items():
        assert torch.equal(made.get_parameter(name), value.to(dtype)), name
    assert made.t is made.w
    assert torch.equal(made.n, torch.arange(4))


def test_a_model_that_does_not_fit_is_left_as_it_was(root: Path) -> None:
    made = Small(rows=51)
    with pytest.raises(CheckpointError, match=r"t is \[50, 7\], the model's \[51, 7\]|w is \[50, 7\]"):
        load_into(made, root)
    assert not any(value.any() for value in made.parameters())
    with torch.device("meta"):
        empty = Small()
    with pytest.raises(CheckpointError, match="meta device"):
        load_into(empty, root)


# --- files that fail while they are read -----------------------------------------------------------------


def broken(weights: Weights, file: Path, offset: int = 0) -> Weights:
    """The same tensors, one of them in another file."""
    entry = weights.entries["w"]
    other = Entry("w", entry.shape, entry.dtype, (Piece(file, offset, entry.nbytes),))
    return Weights({**weights.entries, "w": other})


def uses(folder: Path) -> list[Callable[[Weights], object]]:
    return [
        lambda weights: weights["w"],
        lambda weights: weights.rows("w", 2, 3),
        lambda weights: writer.write_weights(weights, folder, dtype=None),
        lambda weights: writer.write_weights(weights, folder, dtype="BF16"),
        lambda weights: writer.write_weights(weights, folder, dtype="BF16", file_format="bin"),
    ]


@pytest.mark.parametrize("use", range(5))
def test_k26_a_disk_that_fails_while_it_is_read_is_not_told_as_a_failed_write(
    use: int, root: Path, tmp_path: Path
) -> None:
    """The memory of this process gives EIO where nothing is mapped, as a bad disk does."""
    weights = broken(open_checkpoint(root), Path("/proc/self/mem"))
    with pytest.raises(CheckpointError) as caught:
        uses(tmp_path)[use](weights)
    assert caught.value.message == "/proc/self/mem cannot be read: Input/output error"
    assert str(caught.value.hint).startswith("cat /proc/self/mem > /dev/null ")


@pytest.mark.parametrize("use", range(5))
def test_k26_a_file_that_becomes_shorter_while_it_is_read(use: int, root: Path, tmp_path: Path) -> None:
    weights = open_checkpoint(root)
    file = weights.entry("w").pieces[-1].file
    os.truncate(file, weights.entry("w").pieces[-1].offset + 3)
    if use == 1:
        last = len(weights.entry("w").pieces) - 1
        assert last > 0
        with pytest.raises(CheckpointError, match="ends before its tensors do"):
            weights.rows("w", 40, 50)
        return
    with pytest.raises(CheckpointError) as caught:
        uses(tmp_path)[use](weights)
    assert caught.value.message == f"{file} ends before its tensors do"
    assert caught.value.hint
