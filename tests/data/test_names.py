"""What the name of a data set means, and the samples that come with dstool."""

from collections import Counter
from pathlib import Path

import pytest

from dstool.data.files import Columns, read_rows
from dstool.data.names import local_files, looks_local, sample_file
from dstool.errors import DataError


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def touch(name):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    "spec",
    [
        *("gone.csv", "gone.JSONL", "some/gone.parquet", "/gone", "./gone", "../gone", ".", "~/gone"),
        *("data/*", "part-?", "part[01]", "back\\slash", "folder", "there/file"),
    ],
)
def test_meant_as_a_path(spec):
    Path("folder").mkdir()
    touch("there/file")
    assert looks_local(spec)


@pytest.mark.parametrize("spec", ["imdb", "stanfordnlp/imdb", "gone/file", "e9t/nsmc", "리뷰", "v1.0"])
def test_meant_as_a_name_on_the_hub(spec):
    assert not looks_local(spec)
    assert local_files(spec) == []


def test_no_name_is_no_file():
    assert local_files(None) == []


def test_the_files_that_a_name_stands_for():
    files = [touch("data/a.csv"), touch("data/b.csv")]
    assert local_files("data") == local_files("data/*.csv") == files
    assert local_files("data/b.csv") == files[1:]
    assert local_files(["data/b.csv", "data/a.csv"]) == files[::-1]
    assert local_files("sample:reviews_ko") == [sample_file("sample:reviews_ko")]


@pytest.mark.parametrize("spec", ["gone.csv", "./gone", "data/*.csv", ["gone.csv"], ["imdb"], []])
def test_a_path_that_is_not_there_is_an_error(spec):
    with pytest.raises(DataError) as caught:
        local_files(spec)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("spec", ["sample:reviews_fr", "sample:", "sample:../setup"])
def test_an_unknown_sample_says_which_there_are(spec):
    with pytest.raises(DataError) as caught:
        local_files(spec)
    assert caught.value.message == f"{spec}: no such sample"
    assert caught.value.hint == "there are sample:reviews_en, sample:reviews_ko"


def rows_of(name):
    return list(read_rows(local_files(name), Columns(label="label")))


@pytest.mark.parametrize(
    ("name", "least", "most"), [("sample:reviews_en", 200, 1000), ("sample:reviews_ko", 60, 60)]
)
def test_a_sample_has_enough_rows_in_balance_and_none_twice(name, least, most):
    rows = rows_of(name)
    assert least <= len(rows) <= most
    counts = Counter(row.label for row in rows)
    assert len(counts) == 2
    assert max(counts.values()) <= 1.1 * min(counts.values())
    assert [text for text, times in Counter(row.text for row in rows).items() if times > 1] == []


@pytest.mark.parametrize(("name", "korean"), [("sample:reviews_en", False), ("sample:reviews_ko", True)])
def test_a_sample_is_in_the_language_of_its_name(name, korean):
    assert {any("가" <= letter <= "힣" for letter in row.text) for row in rows_of(name)} == {korean}
