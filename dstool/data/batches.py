"""Dataset rows to what a model trains on: encoded texts with labels, or packed blocks of tokens.

Rows are kept by the `datasets` library, in its cache on disk, so that they need no memory and all the
ranks of a machine share one copy.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets

from dstool import __version__
from dstool.config import DataSection, Task
from dstool.data.files import Columns, read_rows
from dstool.data.names import local_files
from dstool.errors import ConfigError, DataError

logger = logging.getLogger("dstool.data")

UNLABELLED = -1
"""The label of a row without one, in the hub's classification sets (the test splits of GLUE)."""


ROW = datasets.Features(
    {
        "text": datasets.Value("string"),
        "messages": datasets.Value("bool"),
        "text_pair": datasets.Value("string"),
        "label": datasets.Value("string"),
        "where": datasets.Value("string"),
        "closed": datasets.Value("bool"),
    }
)
"""The columns of every split: messages are kept as JSON, labels as words, `where` says FILE:LINE."""


@dataclass(frozen=True)
class Splits:
    """Rows to train on and rows held out, with the columns of `ROW`."""

    train: datasets.Dataset
    eval: datasets.Dataset | None


# --- rows ----------------------------------------------------------------------------------------


def load_splits(section: DataSection, task: Task, *, seed: int) -> Splits:
    """Read the data that the run file names.

    Raises:
        ConfigError: no data is named.
        DataError: a file, column, row or hub data set that cannot be used.
    """
    if section.train is None:
        raise ConfigError("the run file names no data", hint="set data.train=FILE")
    columns = Columns(
        section.text_column,
        section.label_column if task == "text-classification" else None,
        section.text_pair_column,
    )
    train = _load(section.train, section, columns, section.hub_train_split)
    if section.eval is not None:
        return Splits(train, _load(section.eval, section, columns, section.hub_eval_split or "test"))
    if section.hub_eval_split is not None:
        return Splits(train, _load(section.train, section, columns, section.hub_eval_split))
    if section.eval_split:
        return _split(train, section.eval_split, seed)
    return Splits(train, None)


def _split(rows: datasets.Dataset, fraction: float, seed: int) -> Splits:
    held_out = round(len(rows) * fraction)
    if not 0 < held_out < len(rows):
        what = "none" if held_out == 0 else "all"
        raise DataError(
            f"data.eval_split={fraction} holds out {what} of {len(rows)} rows",
            hint="choose another part, or set data.eval=FILE",
        )
    parts = rows.train_test_split(test_size=held_out, seed=seed)
    return Splits(parts["train"], parts["test"])


def _load(spec: str | Sequence[str], section: DataSection, columns: Columns, split: str) -> datasets.Dataset:
    if found := local_files(list(spec) if not isinstance(spec, str) else spec):
        return _load_files(found, section, columns)
    return _load_hub(str(spec), section, columns, split)


def _load_files(files: Sequence[Path], section: DataSection, columns: Columns) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(
            _generate,
            gen_kwargs={
                "files": [[str(file) for file in files]],
                "columns": columns,
                "encoding": section.encoding,
                "skip_bad_rows": section.skip_bad_rows,
                "closed": any(file.suffix.lower() != ".txt" for file in files),
                "stamps": (__version__, [_stamp(file) for file in files]),
            },
            features=ROW,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, (DataError, ConfigError)):
            raise cause from None
        raise


def _stamp(file: Path) -> tuple[str, int, int, int, int]:
    """What makes the cache of `datasets` forget a file that was changed, and tell apart two of one name.

    The change time too, which no program sets: copies often keep the size and the time of modification.
    """
    found = file.stat()
    return str(file.resolve()), found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size


def _generate(
    files: list[list[str]],
    columns: Columns,
    encoding: str,
    *,
    skip_bad_rows: bool,
    closed: bool,
    stamps: object,
) -> Iterator[dict[str, Any]]:
    paths = [Path(file) for file in files[0]]
    for row in read_rows(paths, columns, encoding=encoding, skip_bad_rows=skip_bad_rows):
        yield _record(row.text, row.text_pair, row.label, row.where, closed=closed)


def _record(text: Any, text_pair: str | None, label: object, where: str, *, closed: bool) -> dict[str, Any]:
    """A row as it is kept: messages as JSON, the label as text, since columns have one type each."""
    return {
        "text": text if isinstance(text, str) else json.dumps(text, ensure_ascii=False),
        "messages": not isinstance(text, str),
        "text_pair": text_pair or "",
        "label": "" if label is None else str(label),
        "where": where,
        "closed": closed,
    }


def _load_hub(name: str, section: DataSection, columns: Columns, split: str) -> datasets.Dataset:
    try:
        rows = datasets.load_dataset(name, section.hub_config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{name}: no such file here, and the Hugging Face hub did not give a data set of that name",
            hint=f"check the spelling and the network ({reason})",
        ) from error
    for key in ("text", "label", "text_pair"):
        column = getattr(columns, key)
        if column is not None and column not in rows.column_names:
            raise DataError(
                f"{name} has no column '{column}'; its columns are: {', '.join(rows.column_names)}",
                hint=f"set data.{key}_column",
            )
    feature = rows.features[columns.label] if columns.label else None

    def plain(row: dict[str, Any], index: int) -> dict[str, Any]:
        text, label = row[columns.text], row[columns.label] if columns.label else ""
        place = f"{name}: row {index + 1}"
        if not text or label is None or label == UNLABELLED:
            raise DataError(
                f"{place} has no {'label' if text else 'text'}", hint="name another data set or split"
            )
        named = feature.int2str(label) if isinstance(feature, datasets.ClassLabel) else label
        pair = row[columns.text_pair] if columns.text_pair else None
        return _record(text, pair, named, place, closed=True)

    # Without the features, `map` would turn the names in a column `label` back into a ClassLabel's numbers.
    return rows.map(plain, with_indices=True, remove_columns=rows.column_names, features=ROW)


# --- classification ------------------------------------------------------------------------------


def label_names(splits: Splits, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """The classes of the training rows: numbers in their order, words in the alphabet's.

    Args:
        known: the classes of the pretrained model; their order is kept when they are the same ones.

    Raises:
        DataError: fewer than two classes, or one in the held-out rows that training never sees.
    """
    seen = set(splits.train.unique("label"))
    if len(seen) < 2:
        raise DataError(
            f"every row has the label '{next(iter(seen), '')}'; a classifier needs two labels or more",
            hint="check data.label_column",
        )
    numbers = all(re.fullmatch(r"[-+]?\d+", name) for name in seen)
    names = sorted(seen, key=int) if numbers else sorted(seen)
    if splits.eval is not None:
        for label, where in zip(splits.eval["label"], splits.eval["where"], strict=True):
            if label not in seen:
                raise DataError(
                    f"{where}: the label '{label}' is in no training row; those have: {', '.join(names)}",
                    hint="add rows with it to data.train, or take it out of data.eval",
                )
    return tuple(known) if known and set(known) == seen else tuple(names)


def encode_texts(
    rows: datasets.Dataset, tokenizer: Any, labels: Sequence[str], *, max_length: int
) -> datasets.Dataset:
    """Texts (or pairs) to input_ids of at most `max_length` tokens, labels to their number."""
    index = {label: number for number, label in enumerate(labels)}
    pairs = any(rows[:100]["text_pair"])

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        second = [batch["text_pair"]] if pairs else []
        encoded = tokenizer(batch["text"], *second, truncation=True, max_length=max_length)
        return {**encoded, "labels": [index[label] for label in batch["label"]]}

    return rows.map(encode, batched=True, remove_columns=rows.column_names)


# --- language modelling --------------------------------------------------------------------------


def pack_blocks(rows: datasets.Dataset, tokenizer: Any, *, block_size: int, what: str) -> datasets.Dataset:
    """All the rows' tokens, end to end, in blocks of `block_size`; the rest that fills none is left out.

    A row that is a document of its own ends with the end-of-text token; pieces of a text file do not.

    Raises:
        DataError: there are fewer tokens than one block, or messages without a chat template.
    """
    if any(rows[:100]["messages"]) and not tokenizer.chat_template:
        raise DataError(
            f"{what} holds messages, and the tokenizer {tokenizer.name_or_path} has no chat template",
            hint="name a chat model, or another data.text_column",
        )

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            "input_ids": [
                _document(tokenizer, *row)
                for row in zip(batch["text"], batch["messages"], batch["closed"], strict=True)
            ]
        }

    def pack(batch: dict[str, list[Any]]) -> dict[str, Any]:
        tokens = list(chain.from_iterable(batch["input_ids"]))
        whole = len(tokens) - len(tokens) % block_size
        blocks = [tokens[start : start + block_size] for start in range(0, whole, block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names)
    packed = encoded.map(pack, batched=True, batch_size=10_000, remove_columns=["input_ids"])
    if len(packed) == 0:
        count = sum(len(ids) for ids in encoded["input_ids"])
        raise DataError(
            f"{what} has {count} tokens, fewer than one block of {block_size}",
            hint="set data.block_size lower",
        )
    return packed


def _document(tokenizer: Any, text: str, messages: bool, closed: bool) -> list[int]:
    if messages:
        text = tokenizer.apply_chat_template(json.loads(text), tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=not messages, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    if closed and not messages and end is not None and ids[-1:] != [end]:
        ids.append(end)
    return ids


def text_of(rows: datasets.Dataset) -> Iterator[str]:
    """The rows' texts, for the training of a tokenizer."""
    for batch in rows.iter(batch_size=1000):
        yield from batch["text"]
