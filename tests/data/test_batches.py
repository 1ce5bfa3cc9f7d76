"""Rows to batches: splits, labels, packed blocks, and data sets as the hub gives them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from dstool.config import DataSection
from dstool.data import batches
from dstool.data.files import Columns
from dstool.errors import DataError


def rows(**columns: list[Any]) -> datasets.Dataset:
    """Rows as `load_splits` gives them, with what is not named left empty."""
    size = len(next(iter(columns.values())))
    filled = {
        "text": ["a"] * size,
        "messages": [False] * size,
        "text_pair": [""] * size,
        "label": [""] * size,
    }
    filled |= {"where": [f"a.csv:{number + 2}" for number in range(size)], "closed": [True] * size}
    return datasets.Dataset.from_dict({**filled, **columns})


def splits(train: list[str], held_out: list[str] | None = None) -> batches.Splits:
    """Splits of rows that have only labels."""
    return batches.Splits(rows(label=train), None if held_out is None else rows(label=held_out))


# --- splits ----------------------------------------------------------------------------------------


def test_the_held_out_part_is_drawn_once_and_disjoint(write: Callable[..., Path]) -> None:
    write("a.csv", "text,label", *(f"text {n},{n % 2}" for n in range(50)))
    section = DataSection(train="a.csv", eval_split=0.2)
    one, again = (batches.load_splits(section, "text-classification", seed=7) for _ in range(2))
    assert one.eval is not None
    assert again.eval is not None
    assert (len(one.train), len(one.eval)) == (40, 10)
    assert set(one.train["text"]) | set(one.eval["text"]) == {f"text {n}" for n in range(50)}
    assert one.eval["text"] == again.eval["text"]
    other = batches.load_splits(section, "text-classification", seed=8)
    assert other.eval is not None
    assert other.eval["text"] != one.eval["text"]


def test_a_file_that_changed_is_read_again(write: Callable[..., Path]) -> None:
    section = DataSection(train="a.csv")
    write("a.csv", "text,label", "old,0")
    assert batches.load_splits(section, "text-classification", seed=0).train["text"][0] == "old"
    write("a.csv", "text,label", "changed,0")
    assert batches.load_splits(section, "text-classification", seed=0).train["text"][0] == "changed"


def test_files_of_one_name_size_and_time_are_told_apart(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two folders, and one put in the place of the other, as `cp -p` and `tar` do it."""

    def text_in(folder: Path) -> str:
        monkeypatch.chdir(folder)
        section = DataSection(train="a.csv")
        return str(batches.load_splits(section, "text-classification", seed=0).train["text"][0])

    folders = [write("b.csv", "").parent / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "a.csv").write_text(f"text,label\n{folder.name},0\n")
        os.utime(folder / "a.csv", (1000, 1000))
    assert [text_in(folder) for folder in folders] == ["one", "two"]
    (folders[0] / "a.csv").write_text("text,label\nnew,0\n")
    os.utime(folders[0] / "a.csv", (1000, 1000))
    assert text_in(folders[0]) == "new"


def test_a_named_file_is_held_out_rather_than_a_part(write: Callable[..., Path]) -> None:
    write("a.csv", "text,label", "x,0", "y,1")
    write("b.csv", "text,label", "z,1")
    section = DataSection(train="a.csv", eval="b.csv", eval_split=0.5)
    loaded = batches.load_splits(section, "text-classification", seed=0)
    assert loaded.eval is not None
    assert (list(loaded.train["text"]), list(loaded.eval["text"])) == (["x", "y"], ["z"])


# --- labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        (["10", "9", "-1"], ("-1", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["부정", "긍정"], ("긍정", "부정")),
    ],
)
def test_labels_are_in_order(given: list[str], names: tuple[str, ...]) -> None:
    assert batches.label_names(splits(given)) == names


def test_the_models_own_order_is_kept_for_the_same_labels_only() -> None:
    assert batches.label_names(splits(["a", "b"]), ["b", "a"]) == ("b", "a")
    assert batches.label_names(splits(["a", "b"]), ["b", "a", "c"]) == ("a", "b")


def test_held_out_labels_are_those_of_training() -> None:
    assert batches.label_names(splits(["a", "b"], ["b"])) == ("a", "b")
    with pytest.raises(DataError, match=r"a\.csv:3: the label 'c' is in no training row"):
        batches.label_names(splits(["a", "b"], ["a", "c"]))


def test_texts_are_cut_and_labels_numbered(tokenizer: Any) -> None:
    data = rows(text=["a lamp " * 50, "a cup"], label=["b", "a"])
    encoded = batches.encode_texts(data, tokenizer, ("a", "b"), max_length=8)
    assert encoded["labels"] == [1, 0]
    assert len(encoded[0]["input_ids"]) == 8
    assert set(encoded.column_names) >= {"input_ids", "attention_mask", "labels"}


# --- blocks ----------------------------------------------------------------------------------------


def test_no_token_is_lost_but_the_last_few(tokenizer: Any) -> None:
    texts = [f"lamp {n} and kettle {n * n}" for n in range(200)]
    packed = batches.pack_blocks(rows(text=texts), tokenizer, block_size=16, what="data.train")
    end = tokenizer.eos_token_id
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], end]]
    flat = [token for block in packed["input_ids"] for token in block]
    assert all(len(block) == 16 for block in packed["input_ids"])
    assert flat == expected[: len(flat)]
    assert len(expected) - len(flat) < 16
    assert packed["labels"] == packed["input_ids"]


def test_the_pieces_of_a_text_file_are_no_documents(tokenizer: Any) -> None:
    data = rows(text=["a lamp\n"] * 20, closed=[False] * 20)
    packed = batches.pack_blocks(data, tokenizer, block_size=4, what="data.train")
    assert all(tokenizer.eos_token_id not in block for block in packed["input_ids"])


# --- the hub: a folder stands for a data set there, since `load_dataset` takes either ------------------


def hub(folder: Path, **columns: str) -> datasets.Dataset:
    """What is read of the data set in `folder`, without the look for files of our own."""
    named = Columns(columns.get("text", "text"), columns.get("label", "label"), None)
    return batches._load_hub(str(folder), DataSection(), named, "train")


@pytest.fixture
def named_classes(here: Path) -> Callable[..., Path]:
    """A parquet data set whose labels are numbers with names, as most on the hub have."""

    def make(*labels: int) -> Path:
        feature = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
        )
        data = datasets.Dataset.from_dict({"text": ["x"] * len(labels), "label": [*labels]}, feature)
        (here / "imdb").mkdir()
        data.to_parquet(str(here / "imdb/train.parquet"))
        return here / "imdb"

    return make


def test_the_names_of_a_hub_sets_classes_are_used(named_classes: Callable[..., Path]) -> None:
    assert hub(named_classes(1, 0))["label"][:] == ["pos", "neg"]


def test_a_hub_set_without_labels_is_refused(named_classes: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="row 2 has no label"):
        hub(named_classes(1, -1))


def test_a_hub_sets_columns_are_named_where_one_lacks(here: Path) -> None:
    (here / "set").mkdir()
    (here / "set/train.jsonl").write_text(json.dumps({"body": "x", "label": 1}))
    with pytest.raises(DataError, match="has no column 'text'; its columns are: body, label"):
        hub(here / "set")
    assert hub(here / "set", text="body")["text"][:] == ["x"]


def test_a_split_that_is_not_there(named_classes: Callable[..., Path]) -> None:
    folder = named_classes(0, 1)
    with pytest.raises(DataError, match="did not give a data set"):
        batches._load_hub(str(folder), DataSection(), Columns("text", "label", None), "validation")
