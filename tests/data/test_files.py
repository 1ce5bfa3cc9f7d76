"""Dataset files to rows. The D numbers are those of the bugs that other tools shipped."""

from __future__ import annotations

import codecs
import csv
import io
import json
import logging
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstool.data.files import FORMATS, Columns, Row, find_files, read_rows
from dstool.errors import ConfigError, DataError

LABELLED = Columns(label="label")
UNLABELLED = Columns()
SKIP = "data.skip_bad_rows=true"


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_parquet(name: str, columns: dict[str, list], **types: pa.DataType) -> Path:
    arrays = {key: pa.array(values, types.get(key)) for key, values in columns.items()}
    pq.write_table(pa.table(arrays), name)
    return Path(name)


def write_rows(suffix: str, rows: list[dict]) -> Path:
    """The same rows in any format that has columns."""
    name = f"reviews{suffix}"
    if suffix == ".parquet":
        return write_parquet(name, {key: [row[key] for row in rows] for key in rows[0]})
    if suffix in (".jsonl", ".ndjson"):
        return write(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    separator = {".csv": ",", ".tsv": "\t"}[suffix]
    lines = [separator.join(rows[0]), *(separator.join(map(str, row.values())) for row in rows)]
    return write(name, "\n".join(lines) + "\n")


def rows_of(*files: Path, columns: Columns = LABELLED, **options) -> list[Row]:
    return list(read_rows(files, columns, **options))


def pairs_of(*files: Path, **options) -> list[tuple]:
    return [(row.text, row.label) for row in rows_of(*files, **options)]


def refusal(*files: Path, **options) -> DataError:
    """The error that reading ends in: one line, with a hint of one line if any."""
    with pytest.raises(DataError) as caught:
        rows_of(*files, **options)
    assert "\n" not in caught.value.message + (caught.value.hint or "")
    return caught.value


# Which files


def test_a_folder_gives_its_data_files_sorted_without_hidden_ones():
    for name in ("b.csv", "a.JSONL", "sub/c.tsv", "README.md", ".hidden.csv", ".ipynb_checkpoints/b.csv"):
        write(f"data/{name}", "")
    Path("data/folder.csv").mkdir()
    assert find_files("data") == [Path("data/a.JSONL"), Path("data/b.csv"), Path("data/sub/c.tsv")]


def test_a_glob_gives_its_data_files(tmp_path):
    for name in ("b.csv", "a.csv", "c.md", "sub/d.csv"):
        write(f"data/{name}", "")
    assert find_files("data/*") == [Path("data/a.csv"), Path("data/b.csv")]
    assert find_files("data/**/d.csv") == [Path("data/sub/d.csv")]
    assert find_files(f"{tmp_path}/data/a*") == [tmp_path / "data/a.csv"]


def test_a_list_is_taken_in_order_and_each_file_once():
    for name in ("a.csv", "b.csv"):
        write(name, "")
    assert find_files(["b.csv", "*.csv"]) == [Path("b.csv"), Path("a.csv")]


@pytest.mark.parametrize("name", ["리뷰 데이터.csv", "data[1].csv", "two words.txt", "A.CSV"])
def test_a_name_is_taken_as_it_is(name):
    write(name, "text\ngood\n")
    (file,) = find_files(name)
    assert str(file) == name
    assert rows_of(file, columns=UNLABELLED)[0].where.startswith(f"{name}:")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gone.csv", "no file or folder matches 'gone.csv'"),
        ("gone/*.csv", "no file or folder matches 'gone/*.csv'"),
        ("model.bin", "model.bin is in no known format"),
        ("*.bin", "nothing that matches '*.bin' is a data file"),
        ("empty", "folder empty has no data files"),
        ("folder.csv", "folder folder.csv has no data files"),
        ("", "no data file is named"),
        ([], "no data file is named"),
    ],
)
def test_finding_nothing_says_what_was_looked_for(spec, said):
    write("model.bin", "")
    Path("empty").mkdir()
    Path("folder.csv").mkdir()
    with pytest.raises(DataError) as caught:
        find_files(spec)
    assert said in caught.value.message
    assert caught.value.hint
    if "data file" in said or "format" in said:
        assert spec in ("", []) or all(suffix in caught.value.hint for suffix in FORMATS)


@pytest.mark.parametrize(
    ("spec", "said"), [("x" * 5000, "File name too long"), ("~nobody-here/a.csv", "home directory")]
)
def test_a_name_that_the_system_refuses(spec, said):
    with pytest.raises(DataError, match=said):
        find_files(spec)


# Rows, in every format


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"])
def test_columns_are_read_by_name(suffix):
    file = write_rows(suffix, [{"id": "7", "y": "pos", "q": "which?", "t": "this"}])
    columns = Columns(text="t", label="y", text_pair="q")
    (row,) = rows_of(file, columns=columns)
    assert (row.text, row.label, row.text_pair) == ("this", "pos", "which?")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_D01_na_words_stay_text(suffix):
    words = ["NA", "null", "nan", "None", "none", "N/A", "true", "1"]
    file = write_rows(suffix, [{"text": word, "label": word} for word in words])
    assert pairs_of(file) == [(word, word) for word in words]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("blank", ["", "  ", "\u3000"])
@pytest.mark.parametrize("column", ["text", "label", "q"])
def test_D02_D07_blank_cells_are_refused_or_left_out(suffix, blank, column, caplog):
    good = {"text": "fine", "label": "pos", "q": "which?"}
    file = write_rows(suffix, [good, {**good, column: blank}, good])
    columns = Columns(label="label", text_pair="q")
    where = f"{file}: row 2" if suffix == ".parquet" else f"{file}:{2 if suffix == '.jsonl' else 3}"

    error = refusal(file, columns=columns)
    what = "label" if column == "label" else "text"
    assert error.message == f"{where} has no {what} in column '{column}'"
    assert SKIP in error.hint

    assert len(rows_of(file, columns=columns, skip_bad_rows=True)) == 2
    assert f"left out 1 broken row: {where} has no {what}" in caplog.text


def test_skipping_warns_once_with_the_first_five_places(caplog):
    file = write("a.csv", "text,label\n" + "good,1\n" + ",1\n" * 7)
    other = write("b.csv", "text,label\ngood,\nfine,1\n")
    with caplog.at_level(logging.WARNING, "dstool.data"):
        assert len(rows_of(file, other, skip_bad_rows=True)) == 2
    (warning,) = caplog.messages
    assert warning.startswith("left out 8 broken rows: a.csv:3 has no text")
    assert warning.endswith("a.csv:7 has no text in column 'text'; and 3 more")


def test_skipping_nothing_warns_of_nothing(caplog):
    rows_of(write("a.csv", "text,label\ngood,1\n"), skip_bad_rows=True)
    assert not caplog.messages


def test_skipping_every_row_is_an_error():
    error = refusal(write("a.csv", "text,label\n,1\n,2\n"), skip_bad_rows=True)
    assert error.message == "every row is broken (2 in all); the first: a.csv:2 has no text in column 'text'"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_D04_a_missing_column_is_named_with_the_columns_there(suffix):
    file = write_rows(suffix, [{"text": "good", "y": "1"}])
    error = refusal(file)
    assert error.message == f"{file} has no column 'label'; its columns are: text, y"
    assert error.hint.startswith("set data.label_column")
    assert "data.text_pair_column" in refusal(file, columns=Columns(text_pair="q")).hint
    assert "data.text_column" in refusal(file, columns=Columns(text="review")).hint


def test_D04_the_second_of_two_files_lacks_the_column():
    train = write("train.csv", "text,label\ngood,1\n")
    valid = write("valid.csv", "text,y\ngood,1\n")
    assert refusal(train, valid).message == "valid.csv has no column 'label'; its columns are: text, y"


def test_a_column_that_is_there_twice_is_refused():
    error = refusal(write("a.csv", "text,text,label\na,b,1\n"))
    assert error.message == "a.csv has two columns 'text'; its columns are: text, text, label"


def test_a_file_without_a_header_is_shown_in_one_short_line():
    error = refusal(write("a.csv", '"' + "word\n" * 500 + '",1\nmore,0\n'))
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", ""),
        ("a.csv", "text,label\n"),
        ("a.csv", "\n\n"),
        ("a.csv", "text,label\n\n\n"),
        ("a.csv", codecs.BOM_UTF8),
        ("a.tsv", "text\tlabel\n"),
        ("a.jsonl", ""),
        ("a.jsonl", "\n \n"),
        ("a.txt", ""),
    ],
)
def test_D10_a_file_without_rows_is_named(name, content):
    columns = UNLABELLED if name.endswith(".txt") else LABELLED
    file = write(name, content)
    assert refusal(file, columns=columns).message == f"{name} has no rows"


def test_D10_an_empty_file_among_others_is_named():
    full = write("data/a.csv", "text,label\ngood,1\n")
    empty = write("data/b.csv", "text,label\n")
    assert refusal(full, empty).message == f"{empty} has no rows"
    full.write_text("")
    assert refusal(*find_files("data")).message == f"{full} has no rows"


def test_no_files_are_no_rows():
    assert "no rows" in refusal().message


# CSV and TSV


def test_lines_are_counted_through_quoted_line_breaks_and_blank_lines():
    content = '\ntext,label\n"two\nlines",a\n\nplain,b\n"three\r\n\nlines",c\nend,d'
    rows = rows_of(write("a.csv", content))
    assert [(row.where, row.text) for row in rows] == [
        ("a.csv:3", "two\nlines"),
        ("a.csv:6", "plain"),
        ("a.csv:7", "three\r\n\nlines"),
        ("a.csv:10", "end"),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_every_line_end_works(end, suffix):
    file = write_rows(suffix, [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    file.write_bytes(file.read_bytes().replace(b"\n", end.encode()))
    assert pairs_of(file) == [("a", "x"), ("b", "y")]


def test_csv_labels_are_stripped_strings_and_texts_are_kept():
    assert pairs_of(write("a.csv", "text, label \n spaced , 1 \n")) == [(" spaced ", "1")]


def test_tsv_quotes_are_plain_characters():
    file = write("a.tsv", 'text\tlabel\n"open\t1\nsaid "so"\t0\n')
    assert pairs_of(file) == [('"open', "1"), ('said "so"', "0")]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,1,x", "has 3 fields where the header has 2"),
        ("alone", "has 1 field where the header has 2"),
        ('"an "inner" quote",1', "has a stray quote"),
    ],
)
def test_a_csv_row_that_does_not_fit_is_broken(row, said):
    file = write("a.csv", f"text,label\ngood,1\n{row}\nfine,0\n")
    error = refusal(file)
    assert error.message.startswith(f"a.csv:3 {said}")
    assert SKIP in error.hint
    assert pairs_of(file, skip_bad_rows=True) == [("good", "1"), ("fine", "0")]


def test_a_quote_that_is_never_closed_is_named_by_the_line_it_opens_on():
    file = write("a.csv", 'text,label\n"two\nlines",1\n"open,0\nmore,1\nmore,1\n')
    assert refusal(file).message == "a.csv:4 opens a quote that is never closed"
    assert pairs_of(file, skip_bad_rows=True) == [("two\nlines", "1")]
    assert "never closed" in refusal(write("b.csv", '"text,label\na,1\n')).message


@pytest.mark.parametrize(
    ("delimiter", "header"),
    [
        (";", "text;label"),
        (";", '"text";"label"'),
        (";", "\nid;text, as written;label"),
        ("\t", "text\tlabel"),
        ("|", "text|stars"),
    ],
)
def test_another_delimiter_is_named_and_can_be_set(delimiter, header):
    file = write("a.csv", f"{header}\n")
    error = refusal(file)
    shown = json.dumps(delimiter)
    assert error.message == f'a.csv looks divided by {shown} rather than by ","'
    assert error.hint == f"'data.delimiter={shown}'"
    good = write("b.csv", f'text{delimiter}label\n"a{delimiter}b, c"{delimiter}1\n')
    assert pairs_of(good, delimiter=delimiter) == [(f"a{delimiter}b, c", "1")]
    assert 'by "," rather than by' in refusal(write("c.csv", "text,label\n"), delimiter=delimiter).message


def test_a_missing_column_is_no_delimiter():
    assert "has no column 'label'" in refusal(write("a.csv", "text,a;b\n")).message
    assert "has no column 'text'" in refusal(write("a.tsv", "text,label\n")).message


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_nul_is_kept(suffix):
    assert pairs_of(write_rows(suffix, [{"text": "a\0b", "label": "1"}])) == [("a\0b", "1")]


def test_a_cell_longer_than_the_default_limit_of_csv():
    long = "x" * 300_000
    assert pairs_of(write("a.csv", f"text,label\n{long},1\n")) == [(long, "1")]


# JSONL


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a", "label": 1,}', "is not JSON: "),
        ('["a", 1]', "is no JSON object but ['a', 1]"),
        ("null", "is no JSON object but None"),
        ("[" * 100_000, "is not JSON that can be read"),
        ('{"text": "a", "label": ' + "1" * 5000 + "}", "is not JSON that can be read"),
        ('{"text": "\\ud83d", "label": 1}', "has half of a \\u surrogate pair"),
        ('{"text": "a"}', "has no label"),
        ('{"text": "a", "label": null}', "has no label"),
        ('{"text": "a", "label": NaN}', "has no label"),
        ('{"text": null, "label": 1}', "has no text"),
        ('{"label": 1}', "has no text"),
        ('{"text": 5, "label": 1}', "has 5 in column 'text', which is no text"),
        ('{"text": [], "label": 1}', "has no text"),
        ('{"text": ["a"], "label": 1}', "has ['a'] in column 'text', which is no text"),
    ],
)
def test_D10_a_broken_json_line_is_named(line, said):
    good = '{"text": "good", "label": 0}'
    file = write("a.jsonl", f"{good}\n\n{line}\n{good}\n")
    error = refusal(file)
    assert error.message.startswith(f"a.jsonl:3 {said}")
    assert SKIP in error.hint
    assert len(rows_of(file, skip_bad_rows=True)) == 2


def test_a_broken_first_line_can_be_left_out():
    file = write("a.jsonl", 'oops\n{"text": "good", "label": 0}\n')
    assert pairs_of(file, skip_bad_rows=True) == [("good", 0)]
    assert refusal(file).message.startswith("a.jsonl:1 is not JSON")


@pytest.mark.parametrize(
    ("written", "read"), [("1", 1), ("2.0", 2), ("true", "true"), ("false", "false"), ('" pos "', "pos")]
)
def test_json_labels_keep_their_type(written, read):
    ((_, label),) = pairs_of(write("a.jsonl", f'{{"text": "a", "label": {written}}}'))
    assert (label, type(label)) == (read, type(read))


@pytest.mark.parametrize("written", ["1.5", "Infinity", '["a"]', '{"a": 1}'])
def test_a_label_of_another_type_is_refused_even_when_skipping(written):
    file = write("a.jsonl", f'{{"text": "a", "label": {written}}}')
    assert "a.jsonl:1 has the label" in refusal(file, skip_bad_rows=True).message


def test_D11_mixed_label_types_name_both_rows():
    file = write("a.jsonl", '{"text": "a", "label": 0}\n{"text": "b", "label": "pos"}\n')
    error = refusal(file, skip_bad_rows=True)
    assert error.message == "labels of two types: a.jsonl:1 has 0, a.jsonl:2 has 'pos'"
    assert error.hint


def test_D11_mixed_label_types_over_two_files():
    one = write("a.jsonl", '{"text": "a", "label": 0}\n')
    two = write("b.csv", "text,label\nb,0\n")
    assert refusal(one, two).message == "labels of two types: a.jsonl:1 has 0, b.csv:2 has '0'"


# Chat messages, and Parquet


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_are_kept_as_a_list(suffix):
    file = write_rows(suffix, [{"messages": MESSAGES}])
    (row,) = rows_of(file, columns=Columns(text="messages"))
    assert row.text == MESSAGES


@pytest.mark.parametrize("turn", ["hi", {"role": "user"}, {"content": "hi"}, None])
def test_a_message_without_role_or_content_is_broken(turn):
    file = write("a.jsonl", json.dumps({"text": [*MESSAGES, turn]}))
    said = "a.jsonl:1 has a message without 'role' and 'content'"
    assert refusal(file, columns=UNLABELLED).message.startswith(said)


def test_messages_are_no_text_to_classify():
    file = write("a.jsonl", json.dumps({"text": MESSAGES, "label": "pos"}))
    assert refusal(file).message.startswith("a.jsonl:1 has [{'role': 'user',")


def test_parquet_rows_are_numbered_over_batches():
    file = write_parquet("a.parquet", {"text": ["x"] * 2500, "label": [0] * 2499 + [None]})
    assert refusal(file).message == "a.parquet: row 2500 has no label in column 'label'"
    rows = rows_of(file, skip_bad_rows=True)
    assert [row.where for row in rows[1023:1025]] == ["a.parquet: row 1024", "a.parquet: row 1025"]


@pytest.mark.parametrize(
    ("labels", "kind", "read"),
    [
        ([0, 1], pa.int8(), [0, 1]),
        ([0.0, 1.0], pa.float64(), [0, 1]),
        ([True, False], pa.bool_(), ["true", "false"]),
        (["a", "b"], pa.dictionary(pa.int8(), pa.string()), ["a", "b"]),
    ],
)
def test_parquet_labels(labels, kind, read):
    file = write_parquet("a.parquet", {"text": ["x", "y"], "label": labels}, label=kind)
    assert [row.label for row in rows_of(file)] == read


def test_a_parquet_file_without_rows():
    file = write_parquet("a.parquet", {"text": [], "label": []}, text=pa.string(), label=pa.string())
    assert refusal(file).message == "a.parquet has no rows"


@pytest.mark.parametrize("content", [b"", b"text,label\n", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_an_unreadable_parquet_file(content):
    file = write("a.parquet", content)
    assert refusal(file).message.startswith("cannot read a.parquet: ")


def test_parquet_text_that_is_not_utf8():
    bad = pa.array([b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": bad}), "a.parquet")
    assert refusal(Path("a.parquet"), columns=UNLABELLED).message.startswith("cannot read a.parquet: ")


# Text


def test_text_is_cut_into_pieces_of_whole_lines():
    lines = [f"{number} 줄\r\n" if number % 3 else "\n" for number in range(1, 30_001)]
    file = write("a.txt", "".join(lines))
    rows = rows_of(file, columns=UNLABELLED)
    assert "".join(row.text for row in rows) == "".join(lines)
    assert all(4 * 1024 <= len(row.text.encode()) < 5 * 1024 for row in rows[:-1])
    before = 0
    for row in rows:
        assert row.where == f"a.txt:{before + 1}"
        before += row.text.count("\n")
    assert [row.first for row in rows] == [True, *[False] * (len(rows) - 1)]
    assert [row.last for row in rows] == [*[False] * (len(rows) - 1), True]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_text_of_exactly_one_piece_is_whole(end):
    (row,) = rows_of(write("a.txt", "x" * 5000 + end), columns=UNLABELLED)
    assert (row.first, row.last) == (True, True)


def test_text_has_no_labels():
    error = refusal(write("a.txt", "words\n"))
    assert error.message == "a.txt is a text file, and a text file has no labels"
    assert error.hint.endswith(".csv, .tsv, .jsonl, .ndjson, .parquet")


# Encodings


@pytest.mark.parametrize("codec", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".txt"])
def test_a_byte_order_mark_is_honoured(codec, suffix):
    if suffix == ".txt":
        file = write("a.txt", "영화가 좋다\n")
    else:
        file = write_rows(suffix, [{"text": "영화가 좋다"}])
    file.write_bytes(("\ufeff" + file.read_text("utf-8")).encode(codec))
    assert [row.text.strip() for row in rows_of(file, columns=UNLABELLED)] == ["영화가 좋다"]


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_recognised(codec):
    file = write("a.csv", "text,label\n좋다,1\n".encode(codec))
    assert refusal(file).hint == f"data.encoding={codec}"
    assert refusal(file, encoding="utf-16").hint == f"data.encoding={codec}"
    assert pairs_of(file, encoding=codec) == [("좋다", "1")]


def test_korean_in_cp949_is_recognised_and_read():
    file = write("a.csv", 'text,label\n"fine\n",1\n똠방각하,0\n'.encode("cp949"))
    error = refusal(file, skip_bad_rows=True)
    assert error.message == "a.csv:4 is not utf-8: byte 0x8c"
    assert error.hint == "data.encoding=cp949"
    assert pairs_of(file, encoding="cp949") == [("fine\n", "1"), ("똠방각하", "0")]


@pytest.mark.parametrize(
    ("content", "encoding", "line", "byte", "not_tried"),
    [
        ("text\ncafé\n".encode("latin-1"), "utf-8", 2, "0xe9", "utf-8"),
        ("text\nfine\n좋다\n".encode()[:-2], "utf8", 3, "0xeb", "utf-8"),
        (b"text\r\rok\r\xff\xff", "cp949", 4, "0xff", "cp949"),
        ("\ufefftext\nok\n".encode("utf-16-le") + b"!", "utf-8", 3, "0x21", "utf-16"),
        (b"text\n" + b"ok\n" * 50_000 + b"\xe9\n", "utf-8", 50_002, "0xe9", "utf-8"),
    ],
)
def test_bytes_that_are_not_in_the_encoding_are_named(content, encoding, line, byte, not_tried):
    error = refusal(write("a.csv", content), columns=UNLABELLED, encoding=encoding)
    assert error.message.startswith(f"a.csv:{line} is not ")
    assert error.message.endswith(f": byte {byte}")
    tried = error.hint.split("try ")[1].split(", ")
    assert set(tried) == {"utf-8", "cp949", "utf-16", "utf-16-le", "latin-1"} - {not_tried}


def test_utf_16_that_python_refuses_for_want_of_a_mark():
    error = refusal(write("a.csv", "텍스트\n좋다\n".encode("utf-16-le")), encoding="utf-16")
    assert error.message.startswith("a.csv is not utf-16: ")
    assert "utf-16-le" in error.hint


@pytest.mark.parametrize("encoding", ["utf-9", "hex", "", "a\0b"])
def test_an_unknown_encoding_is_a_config_error(encoding):
    file = write("a.csv", "text,label\na,1\n")
    with pytest.raises(ConfigError) as caught:
        rows_of(file, encoding=encoding)
    assert repr(encoding) in caught.value.message


# Files that do not open


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet", "x.txt"])
@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None])
def test_a_folder_or_nothing_under_a_file_name(name, make):
    make(Path(name))
    assert refusal(Path(name), columns=UNLABELLED).message.startswith(f"cannot read {name}: ")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission():
    file = write("a.csv", "text,label\na,1\n")
    file.chmod(0)
    assert refusal(file).message == "cannot read a.csv: Permission denied"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_subfolder_without_read_permission_is_not_passed_over():
    write("data/a.csv", "")
    write("data/shut/b.csv", "").parent.chmod(0)
    with pytest.raises(DataError, match="cannot read data/shut: Permission denied"):
        find_files("data")


def test_an_unknown_format_is_refused():
    assert refusal(write("a.xlsx", "")).message == "a.xlsx is in no known format"


def test_rows_are_streamed():
    file = write("a.csv", "text,label\n" + f"{'word ' * 200},1\n" * 20_000)
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_rows([file], LABELLED))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak < file.stat().st_size / 10


# Anything that is written is read back

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(str.strip)
examples = st.lists(st.tuples(texts, texts.map(str.strip)), min_size=1)


def as_csv(rows: list[tuple[str, str]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("text", "label"), *rows])
    return out.getvalue()


def as_jsonl(rows: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"text": t, "label": y}, ensure_ascii=False) + "\n" for t, y in rows)


@pytest.mark.parametrize(("suffix", "written"), [(".csv", as_csv), (".jsonl", as_jsonl)])
def test_what_is_written_is_read_back(suffix, written):
    @settings(max_examples=150, deadline=None)
    @given(examples)
    def check(rows):
        file.write_bytes(written(rows).encode())
        read = rows_of(file)
        assert [(row.text, row.label) for row in read] == rows
        lines = [int(row.where.rpartition(":")[2]) for row in read]
        assert lines == sorted(set(lines))

    file = Path(f"a{suffix}")
    check()
