"""Rows to batches: splits, labels, packed blocks, and data sets as the hub gives them."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import processors

from dstool import models
from dstool.config import DataSection, ModelSection
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
    filled |= {"where": [f"a.csv:{number + 2}" for number in range(size)]}
    filled |= {"first": [True] * size, "last": [True] * size}
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


def test_each_label_is_held_out_by_its_share_and_stays_in_training(write: Callable[..., Path]) -> None:
    """A label of one row stays: held out, training would never see it, and the run be refused."""
    names = ["common"] * 60 + ["fair"] * 30 + ["few"] * 8 + ["pair"] * 2 + ["lone"]
    write("a.csv", "text,label", *(f"text {n},{name}" for n, name in enumerate(names)))
    section = DataSection(train="a.csv", eval_split=0.25)
    for seed in range(5):
        loaded = batches.load_splits(section, "text-classification", seed=seed)
        assert loaded.eval is not None
        assert Counter(loaded.eval["label"]) in (
            {"common": 15, "fair": 7, "few": 2, "pair": 1},
            {"common": 15, "fair": 8, "few": 2},
        )
        assert Counter(loaded.train["label"]) + Counter(loaded.eval["label"]) == Counter(names)
        assert list(loaded.train["where"]) == sorted(loaded.train["where"], key=lambda at: int(at[6:]))


@pytest.mark.parametrize("fraction", [0.5, 0.75, 0.95])
def test_however_much_is_held_out_no_label_is_lost_to_training(
    fraction: float, write: Callable[..., Path]
) -> None:
    names = ["common"] * 97 + ["pair"] * 2 + ["lone"]
    write("a.csv", "text,label", *(f"text {n},{name}" for n, name in enumerate(names)))
    section = DataSection(train="a.csv", eval_split=fraction)
    loaded = batches.load_splits(section, "text-classification", seed=0)
    assert loaded.eval is not None
    assert len(loaded.eval) == round(100 * fraction)
    assert batches.label_names(loaded) == ("common", "lone", "pair")


def test_more_rows_than_the_labels_can_spare_are_not_held_out(write: Callable[..., Path]) -> None:
    write("a.csv", "text,label", "a,1", "b,1", "c,2", "d,3")
    with pytest.raises(DataError, match="holds out 2 of 4 rows, and 1 can be spared") as caught:
        batches.load_splits(DataSection(train="a.csv", eval_split=0.5), "text-classification", seed=0)
    assert "data.eval_split lower" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        ("a.csv", "20 of 20 held-out rows are also trained on"),
        ("b.csv", "10 of 20 held-out rows are also trained on"),
        ("c.csv", ""),
    ],
)
def test_held_out_rows_that_are_trained_on_are_said_once(
    held_out: str,
    said: str,
    write: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, start in (("a", 0), ("b", 10), ("c", 18)):
        rows = (f"text {n},{n % 2}" for n in range(start, start + 20))
        write(f"{name}.csv", "text,label", *rows)
    section = DataSection(train="a.csv", eval=held_out)
    batches.load_splits(section, "text-classification", seed=0)
    assert len(caplog.messages) == bool(said)
    assert "".join(caplog.messages).startswith(said)
    caplog.clear()
    write("twice.csv", "text,label", *["same,0", "same,1"] * 10)
    batches.load_splits(DataSection(train="twice.csv", eval_split=0.5), "text-classification", seed=0)
    assert caplog.messages[0].startswith("10 of 10 held-out rows")
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    batches.load_splits(section, "text-classification", seed=0)
    assert not caplog.messages


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


@pytest.mark.parametrize(
    ("first", "other", "said"), [("b", "", "has no second text"), ("", "b", "has a second text")]
)
def test_pairs_among_single_texts_are_named(first: str, other: str, said: str, tokenizer: Any) -> None:
    data = rows(text_pair=[first] * 150 + [other], label=["a"] * 151)
    with pytest.raises(DataError, match=rf"a\.csv:152 {said}"):
        batches.encode_texts(data, tokenizer, ("a",), max_length=8)


def test_a_tokenizer_made_for_the_run_keeps_the_texts_of_a_pair_apart() -> None:
    section = ModelSection(from_scratch={"model_type": "bert", "vocab_size": 300})
    data = rows(text=["ab", "a"], text_pair=["c", "bc"], label=["x", "x"])
    made = models.load_tokenizer(section, lambda: batches.text_of(data))
    one, other = batches.encode_texts(data, made, ("x",), max_length=8)["input_ids"]
    assert made.decode(one) == "ab<sep>c"
    assert one != other
    assert made.sep_token_id in one
    assert made.decode(made("ab")["input_ids"]) == "ab"


# --- blocks ----------------------------------------------------------------------------------------


def test_no_token_is_lost_but_the_last_few(tokenizer: Any) -> None:
    texts = [f"lamp {n}" for n in range(2500)]  # more than `map` takes at a time
    packed = batches.pack_blocks(rows(text=texts), tokenizer, block_size=16, what="data.train")
    end = tokenizer.eos_token_id
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], end]]
    flat = [token for block in packed["input_ids"] for token in block]
    assert all(len(block) == 16 for block in packed["input_ids"])
    assert flat == expected[: len(flat)]
    assert len(expected) - len(flat) < 16
    assert packed["labels"] == packed["input_ids"]


@pytest.fixture
def framing(tokenizer: Any) -> Any:
    """A tokenizer that puts <s> before a text and <end> after it, as Llama's and T5's do."""
    framed = copy.deepcopy(tokenizer)
    framed.add_special_tokens({"bos_token": "<s>"})
    framed.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <end>", special_tokens=[("<s>", framed.bos_token_id), ("<end>", framed.eos_token_id)]
    )
    return framed


def test_special_tokens_stand_at_the_ends_of_a_text_file_and_not_between_its_pieces(
    framing: Any, here: Path
) -> None:
    """Also where the text names the special token itself."""
    texts = ["<end>one lamp\n" * 2000, "another\n"]
    (here / "data").mkdir()
    for name, text in zip("ab", texts, strict=True):
        (here / f"data/{name}.txt").write_text(text)
    (here / "data/c.jsonl").write_text(json.dumps({"text": "third"}))
    data = batches.load_splits(DataSection(train="data"), "causal-lm", seed=0).train
    assert len(data) > 3
    packed = batches.pack_blocks(data, framing, block_size=2, what="data.train")
    tokens = [token for block in packed["input_ids"] for token in block]
    expected = [token for text in [*texts, "third"] for token in framing(text)["input_ids"]]
    assert tokens == expected[: len(tokens)]
    assert len(expected) - len(tokens) < 2


# --- messages --------------------------------------------------------------------------------------


def chat(*roles: str) -> str:
    return json.dumps([{"role": role, "content": "a lamp"} for role in roles])


ALTERNATE = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"""


def test_messages_that_the_chat_template_refuses_are_named(tokenizer: Any) -> None:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = ALTERNATE
    good = chat("user", "assistant")
    batches.pack_blocks(rows(text=[good], messages=[True]), chatty, block_size=2, what="data.train")
    data = rows(text=[good, chat("user", "user")], messages=[True, True])
    with pytest.raises(DataError, match=r"a\.csv:3: the chat template refuses .*: roles must alternate"):
        batches.pack_blocks(data, chatty, block_size=2, what="data.train")


def test_messages_after_many_texts_need_a_chat_template_too(tokenizer: Any) -> None:
    data = rows(text=["a lamp"] * 150 + [chat("user")], messages=[False] * 150 + [True])
    with pytest.raises(DataError, match=r"a\.csv:152 holds messages, and .* has no chat template"):
        batches.pack_blocks(data, tokenizer, block_size=2, what="data.train")


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


@pytest.mark.parametrize("text", [0, 5, "", None])
def test_a_hub_sets_numbers_are_neither_messages_nor_nothing(text: Any, here: Path) -> None:
    (here / "set").mkdir()
    lines = [{"text": text, "label": 1}, {"text": text or 7, "label": 1}]
    (here / "set/train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = f"has {text} in column 'text', which is no text" if isinstance(text, int) else "has no text"
    with pytest.raises(DataError, match=f"row 1 {said}") as caught:
        hub(here / "set")
    assert caught.value.hint == "name another data set or split"


def test_a_hub_sets_minus_one_is_a_label_where_labels_have_no_names(here: Path) -> None:
    (here / "set").mkdir()
    lines = [{"text": "x", "label": number} for number in (-1, 0, 1)]
    (here / "set/train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert hub(here / "set")["label"][:] == ["-1", "0", "1"]


def test_a_hub_sets_pairs_are_whole(here: Path) -> None:
    (here / "set").mkdir()
    lines = [{"text": "x", "q": "y", "label": 1}, {"text": "x", "q": None, "label": 1}]
    (here / "set/train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = Columns("text", "label", "q")
    with pytest.raises(DataError, match="row 2 has no text in column 'q'"):
        batches._load_hub(str(here / "set"), DataSection(), columns, "train")
