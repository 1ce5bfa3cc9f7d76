"""Dataset rows to what a model trains on: encoded texts with labels, or packed blocks of tokens.

Rows are kept by the `datasets` library, in its cache on disk, so that they need no memory and all the
ranks of a machine share one copy.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from jinja2 import TemplateError

from dstool import __version__, log
from dstool.config import DataSection, Task
from dstool.data.files import (
    Columns,
    Row,
    columns_for,
    read_rows,
    reading_options,
    require_columns,
    row_of,
)
from dstool.data.names import local_files
from dstool.errors import ConfigError, DataError

logger = logging.getLogger("dstool.data")

UNLABELLED = -1
"""The number of no class, in the hub's classification sets (the test splits of GLUE)."""

MUCH = 0.1
"""The part of the held-out rows that may be among the training rows, short texts being often the same."""

ROW = datasets.Features(
    {
        "text": datasets.Value("string"),
        "messages": datasets.Value("bool"),
        "text_pair": datasets.Value("string"),
        "label": datasets.Value("string"),
        "where": datasets.Value("string"),
        "first": datasets.Value("bool"),
        "last": datasets.Value("bool"),
    }
)
"""The columns of every split: messages are kept as JSON, labels as words; the rest is as in `Row`."""


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
    columns = columns_for(section, task)
    train = _load(section.train, section, columns, section.hub_train_split)
    if section.eval is not None:
        splits = Splits(train, _load(section.eval, section, columns, section.hub_eval_split or "test"))
    elif section.hub_eval_split is not None:
        splits = Splits(train, _load(section.train, section, columns, section.hub_eval_split))
    elif section.eval_split:
        splits = _split(train, section.eval_split, seed, by_label=columns.label is not None)
    else:
        splits = Splits(train, None)
    _warn_of_overlap(splits)
    return splits


def _split(rows: datasets.Dataset, fraction: float, seed: int, *, by_label: bool) -> Splits:
    """Hold out `fraction` of the rows, the same ones in every rank; both parts keep their order."""
    count = round(len(rows) * fraction)
    if not 0 < count < len(rows):
        what = "none" if count == 0 else "all"
        raise DataError(
            f"data.eval_split={fraction} holds out {what} of {len(rows)} rows",
            hint="choose another part, or set data.eval=FILE",
        )
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    out = set(_draw_by_label(rows, count, draw) if by_label else draw.sample(range(len(rows)), count))
    return Splits(
        rows.select([index for index in range(len(rows)) if index not in out]), rows.select(sorted(out))
    )


def _draw_by_label(rows: datasets.Dataset, count: int, draw: random.Random) -> list[int]:
    """`count` row numbers, of each label its share; one row of each at least is left to train on."""
    of_label: dict[str, list[int]] = {}
    for index, label in enumerate(rows["label"]):
        of_label.setdefault(label, []).append(index)
    spare = len(rows) - len(of_label)
    if count > spare:
        raise DataError(
            f"data.eval_split holds out {count} of {len(rows)} rows, and {spare} can be spared: "
            f"each of the {len(of_label)} labels keeps one to train on",
            hint="set data.eval_split lower, or data.eval=FILE",
        )
    queue: list[tuple[float, int]] = []
    for indices in of_label.values():
        draw.shuffle(indices)
        # The n-th row of a label goes once its share has reached n, to the nearest; the last never does.
        queue += [((turn + 0.5) / len(indices), index) for turn, index in enumerate(indices[:-1])]
    return [index for _, index in sorted(queue)[:count]]


def _warn_of_overlap(splits: Splits) -> None:
    """Warn, once for all ranks, where much of the held-out data is what the model trains on."""
    if splits.eval is None or log.rank():
        return
    counts = Counter(map(hash, _texts(splits.eval)))
    common = {key for key in map(hash, _texts(splits.train)) if key in counts}
    both = sum(counts[key] for key in common)
    if both > len(splits.eval) * MUCH:
        logger.warning(
            "%d of %d held-out rows are also trained on, so the metrics will look better than they are",
            both,
            len(splits.eval),
        )


def _texts(rows: datasets.Dataset) -> Iterator[tuple[str, str]]:
    for batch in rows.select_columns(["text", "text_pair"]).iter(batch_size=1000):
        yield from zip(batch["text"], batch["text_pair"], strict=True)


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
                "options": reading_options(section),
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
    files: list[list[str]], columns: Columns, options: dict[str, Any], stamps: object
) -> Iterator[dict[str, Any]]:
    for row in read_rows([Path(file) for file in files[0]], columns, **options):
        yield _record(row)


def _record(row: Row) -> dict[str, Any]:
    """A row as it is kept: messages as JSON, the label as text, since columns have one type each."""
    messages = not isinstance(row.text, str)
    return {
        "text": json.dumps(row.text, ensure_ascii=False) if messages else row.text,
        "messages": messages,
        "text_pair": row.text_pair or "",
        "label": "" if row.label is None else str(row.label),
        "where": row.where,
        "first": row.first,
        "last": row.last,
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
    require_columns(name, rows.column_names, columns)
    feature = rows.features[columns.label] if columns.label else None

    def plain(cells: dict[str, Any], index: int) -> dict[str, Any]:
        if columns.label and isinstance(feature, datasets.ClassLabel):
            number = cells[columns.label]
            named = None if number in (None, UNLABELLED) else feature.int2str(number)
            cells = {**cells, columns.label: named}
        place = f"{name}: row {index + 1}"
        return _record(row_of(place, cells, columns, hint="name another data set or split"))

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
    """Texts (or pairs) to input_ids of at most `max_length` tokens, labels to their number.

    Raises:
        DataError: some rows are pairs, and others are not.
    """
    index = {label: number for number, label in enumerate(labels)}
    pairs = bool(rows[0]["text_pair"])

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        for second, where in zip(batch["text_pair"], batch["where"], strict=True):
            if bool(second) != pairs:
                raise DataError(
                    f"{where} has {'a' if second else 'no'} second text, unlike the first row",
                    hint="give every row a second text, or take out data.text_pair_column",
                )
        second = [batch["text_pair"]] if pairs else []
        encoded = tokenizer(batch["text"], *second, truncation=True, max_length=max_length)
        return {**encoded, "labels": [index[label] for label in batch["label"]]}

    return rows.map(encode, batched=True, remove_columns=rows.column_names)


# --- language modelling --------------------------------------------------------------------------


def pack_blocks(rows: datasets.Dataset, tokenizer: Any, *, block_size: int, what: str) -> datasets.Dataset:
    """All the rows' tokens, end to end, in blocks of `block_size`; the rest that fills none is left out.

    A text begins and ends with the tokens that its tokenizer puts there, and with the end-of-text token;
    the pieces of a text file are one text.

    Raises:
        DataError: there are fewer tokens than one block, messages without a chat template, or messages
            that the template refuses.
    """

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        names = ("text", "messages", "where", "first", "last")
        columns = zip(*(batch[name] for name in names), strict=True)
        return {
            "input_ids": [
                _messages(tokenizer, text, where)
                if messages
                else _piece(tokenizer, text, first=first, last=last)
                for text, messages, where, first, last in columns
            ]
        }

    rest: list[int] = []

    def pack(batch: dict[str, list[Any]]) -> dict[str, Any]:
        tokens = [*rest, *chain.from_iterable(batch["input_ids"])]
        whole = len(tokens) - len(tokens) % block_size
        rest[:] = tokens[whole:]  # the batches come in their order, each once
        blocks = [tokens[start : start + block_size] for start in range(0, whole, block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names)
    packed = encoded.map(pack, batched=True, remove_columns=["input_ids"])
    if len(packed) == 0:
        count = sum(len(ids) for ids in encoded["input_ids"])
        raise DataError(
            f"{what} has {count} tokens, fewer than one block of {block_size}",
            hint="set data.block_size lower",
        )
    return packed


def _messages(tokenizer: Any, text: str, where: str) -> list[int]:
    if not tokenizer.chat_template:
        raise DataError(
            f"{where} holds messages, and the tokenizer {tokenizer.name_or_path} has no chat template",
            hint="name a chat model, or another data.text_column",
        )
    try:
        written = tokenizer.apply_chat_template(json.loads(text), tokenize=False)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{where}: the chat template refuses the messages: {reason}",
            hint="mend the row, or name a model with another chat template",
        ) from error
    ids: list[int] = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _piece(tokenizer: Any, text: str, *, first: bool, last: bool) -> list[int]:
    """The tokens of a text, or of a piece of it, with special ones only where the whole has its ends."""
    encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    own = [place for place, added in enumerate(encoded["special_tokens_mask"]) if not added]
    start, stop = (own[0], own[-1] + 1) if own else (0, 0)
    ids = ids[0 if first else start : len(ids) if last else stop]
    end = tokenizer.eos_token_id
    if last and end is not None and ids[-1:] != [end]:
        ids.append(end)
    return ids


def text_of(rows: datasets.Dataset) -> Iterator[str]:
    """The rows' texts, for the training of a tokenizer."""
    for pair in _texts(rows):
        yield from filter(None, pair)
