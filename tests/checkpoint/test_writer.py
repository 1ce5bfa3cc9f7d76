"""Written weights, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dstool.checkpoint import reader, writer
from dstool.checkpoint.writer import Format, Written, parse_size
from dstool.errors import CheckpointError, ConfigError


def views(count: int = 5, numel: int = 10_000) -> dict[str, torch.Tensor]:
    """Views of one flat buffer, as stages 1 and 2 give them."""
    flat = torch.randn(count * numel)
    return {f"w{index}": flat.narrow(0, index * numel, numel).view(100, -1) for index in range(count)}


def write_weights(state: dict[str, torch.Tensor], folder: Path, **options: Any) -> Written:
    """Write `state`, which torch.save has put on the disk, into `folder`."""
    file = folder.parent / f"{folder.name}.pt"
    torch.save(state, file)
    return writer.write_weights(reader.untied(reader.of_file(file)), folder, **options)


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        state |= torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [None, "BF16", "F16"])
def test_m08_floats_are_cast_and_the_rest_is_exact(
    tmp_path: Path, file_format: Format, dtype: str | None
) -> None:
    state = {"w": torch.randn(3, 5), "n": torch.tensor([2**40 + 1]), "s": torch.tensor(2.5)}
    written = write_weights(state, tmp_path, dtype=dtype, file_format=file_format)
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[file_format]
    assert written.files == (name,)
    assert (written.tensors, written.parameters) == (3, 16)
    assert written.bytes == (tmp_path / name).stat().st_size
    found = read_back(tmp_path)
    assert torch.equal(
        found["w"], state["w"].to({"BF16": torch.bfloat16, "F16": torch.float16, None: torch.float32}[dtype])
    )
    assert torch.equal(found["n"], state["n"])
    assert found["s"].shape == ()


def test_safetensors_says_that_it_is_of_torch(tmp_path: Path) -> None:
    write_weights({"w": torch.ones(2)}, tmp_path, dtype=None)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_k07_tied_tensors_are_stored_once_under_the_first_name(tmp_path: Path, file_format: Format) -> None:
    tied = torch.randn(4, 3)
    state = {"embed": tied, "other": torch.ones(2), "head": tied}
    written = write_weights(state, tmp_path, dtype=None, file_format=file_format)
    found = read_back(tmp_path)
    assert set(found) == {"embed", "other"}
    assert torch.equal(found["embed"], tied)
    assert (written.tensors, written.parameters) == (2, 14)


def test_k07_views_that_merely_overlap_are_both_stored(tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    write_weights({"all": flat, "half": flat[:3], "odd": flat[::2]}, tmp_path, dtype=None)
    found = read_back(tmp_path)
    assert found["half"].tolist() == [0, 1, 2]
    assert found["odd"].tolist() == [0, 2, 4]


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_k08_shards_hold_their_own_tensors_only(tmp_path: Path, file_format: Format) -> None:
    state = views()
    written = write_weights(state, tmp_path, dtype=None, max_shard_size="90KB", file_format=file_format)
    assert len(written.files) == 4
    assert written.bytes < 1.05 * sum(value.nbytes for value in state.values())
    index = json.loads((tmp_path / written.files[-1]).read_text())
    stem = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[file_format]
    assert written.files[-1] == f"{stem}.index.json"
    assert index["metadata"]["total_size"] == 200_000
    assert set(index["weight_map"]) == set(state)
    assert sorted(set(index["weight_map"].values())) == sorted(written.files[:-1])
    found = read_back(tmp_path)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_shards_are_sized_by_the_stored_dtype(tmp_path: Path) -> None:
    written = write_weights(views(), tmp_path, dtype="BF16", max_shard_size="100KB")
    assert written.files == ("model.safetensors",)


def test_m01_a_tensor_of_size_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"embed is empty, shape \[0\]"):
        write_weights({"embed": torch.empty(0)}, tmp_path, dtype=None)
    assert not list(tmp_path.iterdir())


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        write_weights({}, tmp_path, dtype=None)
    assert not list(tmp_path.iterdir())


def test_fp16_overflow_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^big holds 70000, which float16 cannot"):
        write_weights({"w": torch.ones(2), "big": torch.tensor([1.0, -7e4])}, tmp_path, dtype="F16")


def test_infinities_that_were_there_stay(tmp_path: Path) -> None:
    write_weights({"mask": torch.tensor([0.0, -torch.inf])}, tmp_path, dtype="F16")
    assert read_back(tmp_path)["mask"].tolist() == [0, -torch.inf]


@pytest.mark.parametrize("size", ["5 GBB", "GB", "", "-1GB", "0GB", "nanGB", "5"])
def test_a_bad_shard_size(tmp_path: Path, size: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        write_weights({"w": torch.ones(2)}, tmp_path, dtype=None, max_shard_size=size)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), (" 40KB ", 40_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("tie", [True, False])
def test_m07_from_pretrained_reads_it(tmp_path: Path, tie: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"vocab_size": 31, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**shape, tie_word_embeddings=tie)).eval()
    written = write_weights(model.state_dict(), tmp_path, dtype=None, max_shard_size="4KB")
    model.config.save_pretrained(tmp_path)
    assert len(written.files) > 2
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    ids = torch.arange(10)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
