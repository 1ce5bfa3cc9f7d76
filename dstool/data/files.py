"""Dataset files to rows: CSV, TSV, JSONL, Parquet and plain text.

Rows are streamed, and every row knows the file and line it came from, so that whatever is wrong
with it can be said in terms of the user's own file. Nothing is guessed: `NA` is a word, a label
keeps its type, and a row that cannot be used is refused or, on request, left out and counted.
"""

from __future__ import annotations

import codecs
import csv
import glob
import json
import logging
import os
import re
import textwrap
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dstool.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dstool.config import DataSection, Task

FORMATS: Mapping[str, str] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
}

_log = logging.getLogger("dstool.data")

_READ_HINT = "check the name, the permissions and whether the file is whole"
_SKIP_HINT = "mend the row, or leave broken rows out with data.skip_bad_rows=true"
_KNOWN_HINT = f"data files end in {', '.join(FORMATS)}"

_PIECE_BYTES = 4 * 1024
_DELIMITERS = ",;\t|"
_BATCH_ROWS = 1024

# The longest cell that csv accepts. An open quote would otherwise pull the rest of a file into memory.
_CELL_LIMIT = 128 * 1024 * 1024

# The longer marks first: the one of UTF-32 LE starts with the one of UTF-16 LE.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

# Decoded text never holds a lone surrogate, so these are free to stand for what is not text:
# the NUL that csv refuses before Python 3.11, and a byte that the encoding does not know.
_NUL = "\ud800"
_FIRST_BAD_BYTE = 0xDC00
_BAD_BYTE = re.compile("[\udc00-\udcff]")
_MARK_BAD_BYTES = "dstool.mark-bad-bytes"


@dataclass(frozen=True)
class Columns:
    """The names of the columns to read. With `label=None` rows have no label (language modelling)."""

    text: str = "text"
    label: str | None = None
    text_pair: str | None = None


def columns_for(section: DataSection, task: Task) -> Columns:
    """The columns that `task` reads, under the names that the run file gives them."""
    label = section.label_column if task == "text-classification" else None
    return Columns(section.text_column, label, section.text_pair_column)


def reading_options(section: DataSection) -> dict[str, Any]:
    """What the run file says of how its files are read: the options of `read_rows`."""
    return section.model_dump(include={"encoding", "delimiter", "skip_bad_rows"})


@dataclass(frozen=True)
class Row:
    """One example.

    `text` is a string, or a list of `{"role": ..., "content": ...}` messages where a JSONL or
    Parquet cell holds a list and no label is read. `where` is the file and the line that the row starts on
    ("reviews.csv:12"), for Parquet its number ("reviews.parquet: row 12"), counted from 1.
    """

    text: Any
    label: str | int | None
    text_pair: str | None
    where: str
    first: bool = True
    """Whether the text begins here, which is not so for the later pieces of a text file."""
    last: bool = True
    """Whether the text ends here."""


@dataclass(frozen=True)
class _Record:
    """A row as its file has it, nothing checked."""

    where: str
    cells: Mapping[str, Any]
    first: bool = True
    last: bool = True


class _RowError(Exception):
    """A row that cannot be used. `data.skip_bad_rows` leaves it out."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")

    def refusal(self) -> DataError:
        return DataError(str(self), hint=_SKIP_HINT)


# Which files


def find_files(spec: str | Sequence[str]) -> list[Path]:
    """The data files that `spec` names, each once, in the order given.

    `spec` is a file, a folder (every file of a known format in it, at any depth, sorted; hidden
    ones are left out), a glob pattern, or a list of these.

    Raises:
        DataError: nothing is there, or a named file is in no known format.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not all(one.strip() for one in specs) or not specs:
        raise DataError(
            "no data file is named", hint="name a file, a folder or a pattern such as 'data/*.csv'"
        )
    return list(dict.fromkeys(chain.from_iterable(_find(one) for one in specs)))


def _find(spec: str) -> list[Path]:
    try:
        path = Path(spec).expanduser()
        if path.is_dir():
            return _in_folder(path)
        if path.exists():
            _format_of(path)
            return [path]
        return _matching(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user who is not there
        raise DataError(f"cannot read {spec}: {_reason(error)}", hint=_READ_HINT) from error


def _in_folder(folder: Path) -> list[Path]:
    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        files += [path for path in paths if _is_data_file(path)]
    if not files:
        raise DataError(f"folder {folder} has no data files", hint=_KNOWN_HINT)
    return sorted(files)


def _refuse(error: OSError) -> None:
    """Left alone, `os.walk` passes over a folder that it may not read, and its data would be missed."""
    raise DataError(f"cannot read {error.filename}: {_reason(error)}", hint=_READ_HINT) from error


def _matching(pattern: Path) -> list[Path]:
    matches = glob.glob(str(pattern), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    if not matches:
        raise DataError(f"no file or folder matches {str(pattern)!r}", hint=f"looked for from {Path.cwd()}")
    files = [path for path in map(Path, sorted(matches)) if _is_data_file(path)]
    if not files:
        raise DataError(f"nothing that matches {str(pattern)!r} is a data file", hint=_KNOWN_HINT)
    return files


def _is_data_file(path: Path) -> bool:
    return path.suffix.lower() in FORMATS and path.is_file()


def _format_of(path: Path) -> str:
    try:
        return FORMATS[path.suffix.lower()]
    except KeyError:
        raise DataError(f"{path} is in no known format", hint=_KNOWN_HINT) from None


# Their columns and rows


def read_rows(
    files: Sequence[Path],
    columns: Columns,
    *,
    encoding: str = "utf-8",
    delimiter: str = ",",
    skip_bad_rows: bool = False,
) -> Iterator[Row]:
    """The rows of `files`, one after the other, never a whole file in memory.

    A row is broken when it does not parse, when its text is missing or blank, or when its label is
    missing. With `skip_bad_rows` broken rows are left out, and one warning at the end counts them.
    `delimiter` is that of CSV files.

    Raises:
        DataError: a file that cannot be read, is empty or lacks a column; a broken row; labels that
            are not all strings or all whole numbers; broken rows and nothing else.
        ConfigError: there is no such encoding.
    """
    seen = _Seen()
    for path in files:
        before = seen.total
        for record in _records(path, columns, encoding, delimiter):
            try:
                row = _row(record, columns)
            except _RowError as error:
                if not skip_bad_rows:
                    raise error.refusal() from None
                seen.leave_out(error)
            else:
                seen.take(row)
                yield row
        if seen.total == before:
            raise _no_rows(path)
    seen.report()


@dataclass
class _Seen:
    """What a data set has shown so far, over all its files."""

    rows: int = 0
    broken: int = 0
    first_broken: list[_RowError] = field(default_factory=list)
    first_row: Row | None = None

    @property
    def total(self) -> int:
        return self.rows + self.broken

    def leave_out(self, error: _RowError) -> None:
        self.broken += 1
        if len(self.first_broken) < 5:
            self.first_broken.append(error)

    def take(self, row: Row) -> None:
        """Count `row`. Raises `DataError` when its label is of another type than the first one."""
        self.rows += 1
        self.first_row = first = self.first_row or row
        if type(row.label) is not type(first.label):
            raise DataError(
                f"labels of two types: {first.where} has {_shown(first.label)}, "
                f"{row.where} has {_shown(row.label)}",
                hint="write every label as a string, or every label as a whole number",
            )

    def report(self) -> None:
        """Warn of the rows left out. Raises `DataError` when no row is left."""
        if not self.total:
            raise DataError("no data files, so no rows", hint="name a file, a folder or a pattern")
        if not self.rows:
            raise DataError(
                f"every row is broken ({self.broken} in all); the first: {self.first_broken[0]}",
                hint="check data.text_column and data.label_column",
            )
        if self.broken:
            places = "; ".join(map(str, self.first_broken))
            more = f"; and {self.broken - 5} more" if self.broken > 5 else ""
            rows = "1 broken row" if self.broken == 1 else f"{self.broken} broken rows"
            _log.warning("left out %s: %s%s", rows, places, more)


def row_of(where: str, cells: Mapping[str, Any], columns: Columns, *, hint: str) -> Row:
    """The row `cells`, which was not read from a file.

    Raises:
        DataError: it has no text or label, or one that can be none; with `hint`.
    """
    try:
        return _row(_Record(where, cells), columns)
    except _RowError as error:
        raise DataError(str(error), hint=hint) from None


def _records(path: Path, columns: Columns, encoding: str, delimiter: str) -> Iterator[_Record | _RowError]:
    """What `path` holds, row by row. A broken row is yielded as its error, as reading goes on after it."""
    with _failures_named(path, encoding):
        match _format_of(path):
            case "parquet":
                yield from _parquet_records(path, columns)
            case "jsonl":
                yield from _jsonl_records(path, columns, encoding)
            case "text":
                yield from _text_pieces(path, columns, encoding)
            case "tsv":
                yield from _delimited_records(path, None, columns, encoding)
            case _:
                yield from _delimited_records(path, delimiter, columns, encoding)


# One row


def _row(record: _Record | _RowError, columns: Columns) -> Row:
    """Raises `_RowError` for a broken row, `DataError` for a label that can be none."""
    if isinstance(record, _RowError):
        raise record
    return Row(
        text=_text(record, columns.text, messages=columns.label is None),
        label=None if columns.label is None else _label(record, columns.label),
        text_pair=None if columns.text_pair is None else _text(record, columns.text_pair),
        where=record.where,
        first=record.first,
        last=record.last,
    )


def _text(record: _Record, column: str, *, messages: bool = False) -> Any:
    value = record.cells.get(column)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise _RowError(record.where, f"has no text in column {column!r}")
    if messages and isinstance(value, list):
        if not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value):
            raise _RowError(record.where, f"has a message without 'role' and 'content' in column {column!r}")
    elif not isinstance(value, str):
        raise _RowError(record.where, f"has {_shown(value)} in column {column!r}, which is no text")
    return value


def _label(record: _Record, column: str) -> str | int:
    value = record.cells.get(column)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        value = value.strip()
    # NaN, the only value unlike itself, is how pandas writes a label that is missing.
    if value is None or value == "" or value != value:  # noqa: PLR0124
        raise _RowError(record.where, f"has no label in column {column!r}")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (str, int)):
        return value
    raise DataError(
        f"{record.where} has the label {_shown(value)}, which is neither a string nor a whole number",
        hint="set data.label_column to a column of classes, or write the labels as strings",
    )


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 60, placeholder="…")


def require_columns(source: str | Path, names: Sequence[str], columns: Columns) -> None:
    """Raise `DataError` unless each of `columns` is once among `names`, the columns of `source`."""
    times = Counter(names)
    for option, name in vars(columns).items():
        if name is None or times[name] == 1:
            continue
        listed = textwrap.shorten(", ".join(names), 200, placeholder=" …")
        found = "two columns" if times[name] else "no column"
        raise DataError(
            f"{source} has {found} {name!r}; its columns are: {listed}",
            hint=f"set data.{option}_column to one of them",
        )


def _no_rows(path: Path) -> DataError:
    return DataError(f"{path} has no rows", hint="name a file with rows: data.train=FILE")


# CSV and TSV


def _delimited_records(
    path: Path, delimiter: str | None, columns: Columns, encoding: str
) -> Iterator[_Record | _RowError]:
    lines = _delimited_lines(path, delimiter, encoding)
    try:
        header = _header(path, lines)
        require_columns(path, header, columns)
    except DataError:
        _refuse_other_delimiter(path, delimiter, encoding)
        raise
    for where, fields in lines:
        if isinstance(fields, _RowError):
            yield fields
        elif len(fields) != len(header):
            counted = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            yield _RowError(where, f"has {counted} where the header has {len(header)}")
        else:
            yield _Record(where, dict(zip(header, fields, strict=True)))


def _header(path: Path, lines: Iterator[tuple[str, list[str] | _RowError]]) -> list[str]:
    for _, fields in lines:
        if isinstance(fields, _RowError):
            raise DataError(f"{fields}, and this is the header", hint="the first line names the columns")
        return [name.strip() for name in fields]
    raise _no_rows(path)


def _refuse_other_delimiter(path: Path, delimiter: str | None, encoding: str) -> None:
    """Raise `DataError` where the header of a CSV file looks divided by something else than `delimiter`."""
    if delimiter is None:
        return
    with _open(path, encoding) as file:
        header = next((line for line in file if line.strip()), "")
    found = max(_DELIMITERS, key=header.count)
    if header.count(found) > header.count(delimiter):
        shown = json.dumps(found)
        raise DataError(
            f"{path} looks divided by {shown} rather than by {json.dumps(delimiter)}",
            hint=f"'data.delimiter={shown}'",
        )


def _delimited_lines(
    path: Path, delimiter: str | None, encoding: str
) -> Iterator[tuple[str, list[str] | _RowError]]:
    """Where each row starts, with its fields or the reason that it has none. Blank lines are left out.

    CSV is quoted as in RFC 4180. TSV, which has no `delimiter` but the tab, is not quoted at all: in
    corpora such as NSMC a quote is a quote.
    """
    csv.field_size_limit(max(_CELL_LIMIT, csv.field_size_limit()))
    with _open(path, encoding) as file:
        lines = (line.replace("\0", _NUL) for line in file)
        if delimiter is None:
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield where, _RowError(where, _quoting_fault(error))
            else:
                if fields:
                    yield where, [cell.replace(_NUL, "\0") for cell in fields]


def _quoting_fault(error: csv.Error) -> str:
    match str(error):
        case "unexpected end of data":
            return "opens a quote that is never closed"
        case fault if "expected after" in fault:
            return 'has a stray quote in a quoted field (inside one, write "" for ")'
        case fault:
            return f"does not parse: {fault}"


# JSONL


def _jsonl_records(path: Path, columns: Columns, encoding: str) -> Iterator[_Record | _RowError]:
    checked = False
    for record in _json_lines(path, encoding):
        if isinstance(record, _Record) and not checked:
            require_columns(path, list(record.cells), columns)
            checked = True
        yield record


def _json_lines(path: Path, encoding: str) -> Iterator[_Record | _RowError]:
    with _open(path, encoding) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_record(f"{path}:{number}", line)


def _json_record(where: str, line: str) -> _Record | _RowError:
    try:
        cells = json.loads(line)
        if "\\u" in line:
            json.dumps(cells, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return _RowError(where, f"is not JSON: {error.msg} (character {error.colno})")
    except UnicodeEncodeError:
        return _RowError(where, "has half of a \\u surrogate pair, which is no character")
    except (ValueError, RecursionError) as error:
        return _RowError(where, f"is not JSON that can be read: {error}")
    if not isinstance(cells, dict):
        return _RowError(where, f"is no JSON object but {_shown(cells)}")
    return _Record(where, cells)


# Parquet


def _parquet_records(path: Path, columns: Columns) -> Iterator[_Record]:
    with _parquet_file(path) as file:
        require_columns(path, file.schema_arrow.names, columns)
        names = list(dict.fromkeys(filter(None, vars(columns).values())))
        number = 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=names):
            for cells in batch.to_pylist():
                number += 1
                yield _Record(f"{path}: row {number}", cells)


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """An open `pyarrow.parquet.ParquetFile`. What pyarrow raises in the block becomes a `DataError`."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            yield file
    except (pyarrow.ArrowException, UnicodeError) as error:
        raise DataError(f"cannot read {path}: {_reason(error)}", hint=_READ_HINT) from error


# Text


def _text_pieces(path: Path, columns: Columns, encoding: str) -> Iterator[_Record]:
    """The file in pieces of whole lines, about 4 KiB each; joined they are the file again.

    Small enough that a part of them can be held out, and large enough to be cut there at no cost.
    """
    if columns.label is not None:
        raise DataError(
            f"{path} is a text file, and a text file has no labels",
            hint=f"put text and label into a file that ends in {', '.join(FORMATS)}".removesuffix(", .txt"),
        )
    require_columns(path, ["text"], columns)
    start, lines, size = 1, list[str](), 0
    with _open(path, encoding) as file:
        for number, line in enumerate(file, 1):
            if size >= _PIECE_BYTES:
                yield _Record(f"{path}:{start}", {"text": "".join(lines)}, first=start == 1, last=False)
                start, lines, size = number, [], 0
            lines.append(line)
            size += len(line.encode())
    if lines:
        yield _Record(f"{path}:{start}", {"text": "".join(lines)}, first=start == 1)


# Encodings, and files that do not open


def _open(path: Path, encoding: str) -> TextIO:
    """`path` as text. Its lines end at LF, CRLF or a lone CR and keep these ends."""
    return path.open(encoding=_codec(path, encoding), newline="")


def _codec(path: Path, encoding: str) -> str:
    """Python's name for what `path` is encoded in: a byte-order mark refines UTF-8.

    Raises:
        DataError: UTF-16 without a byte-order mark, which would read as text full of NULs.
        ConfigError: there is no such encoding.
    """
    try:
        "".encode(encoding)  # unlike codecs.lookup, this refuses what is no text encoding, such as hex
    except (LookupError, ValueError):
        raise ConfigError(f"unknown encoding {encoding!r}", hint="data.encoding=utf-8") from None
    name = codecs.lookup(encoding).name
    if name not in ("utf-8", "utf-16"):
        return name
    with path.open("rb") as file:
        head = file.read(4)
    for mark, marked in _BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return marked
    for odd, twin in enumerate(("utf-16-be", "utf-16-le")):
        if head[odd::2] == b"\0\0":
            raise DataError(f"{path} is UTF-16 without a byte-order mark", hint=f"data.encoding={twin}")
    return name


@contextmanager
def _failures_named(path: Path, encoding: str) -> Iterator[None]:
    """Turn what the system or a decoder raises in the block into a `DataError` about `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {_reason(error)}", hint=_READ_HINT) from error
    except UnicodeError as error:
        raise _undecodable(path, encoding, error) from error


def _reason(error: Exception) -> str:
    """One line of it, without the path that an `OSError` repeats."""
    system = error.strerror if isinstance(error, OSError) else None
    return system or textwrap.shorten(str(error), 200, placeholder=" …")


def _undecodable(path: Path, encoding: str, error: UnicodeError) -> DataError:
    """The error for a file that is not in `encoding`, which is read once more to find the line."""
    codec = _codec(path, encoding)
    hint = _encoding_hint(path, codec)
    # utf-16 fails a second time where it finds no byte-order mark: a fault of no line.
    with suppress(UnicodeError), path.open(encoding=codec, errors=_MARK_BAD_BYTES, newline="") as file:
        for number, line in enumerate(file, 1):
            if bad := _BAD_BYTE.search(line):
                byte = ord(bad[0]) - _FIRST_BAD_BYTE
                return DataError(f"{path}:{number} is not {codec}: byte 0x{byte:02x}", hint=hint)
    return DataError(f"{path} is not {codec}: {error}", hint=hint)


def _mark_bad_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return chr(_FIRST_BAD_BYTE + error.object[error.start]), error.end


codecs.register_error(_MARK_BAD_BYTES, _mark_bad_byte)


def _encoding_hint(path: Path, codec: str) -> str:
    if codec != "cp949" and _is_korean(path):
        return "data.encoding=cp949"
    others = [name for name in ("utf-8", "cp949", "utf-16", "utf-16-le", "latin-1") if name != codec]
    return f"set data.encoding to what the file was saved in; try {', '.join(others)}"


def _is_korean(path: Path) -> bool:
    """Whether all of `path` decodes as cp949, into a text whose foreign characters are mostly Hangul."""
    foreign = hangul = 0
    try:
        with path.open(encoding="cp949") as file:
            while piece := file.read(1 << 16):
                foreign += len(re.findall(r"[^\x00-\x7f]", piece))
                hangul += len(re.findall("[가-힣ㄱ-ㆎ]", piece))
    except UnicodeError:
        return False
    return hangul > foreign / 2
