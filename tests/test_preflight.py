"""What is found wrong with a run before anything is started for it."""

import json
import logging
import shlex
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dstool import preflight
from dstool.config import load
from dstool.errors import ConfigError, DataError, DstoolError, ModelError

JSON = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}}


@pytest.fixture(autouse=True)
def _a_run_that_is_fine(tmp_path, monkeypatch):
    """A folder with all that a run needs; each test takes something away."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(JSON))
    Path("reviews.csv").write_text("text,label\ngood,1\nbad,0\n")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    run_file()


def run_file(**sections):
    """Write the run file; a section given as None is left out."""
    fine = {
        "model": {"name": "model"},
        "data": {"train": "reviews.csv"},
        "train": {"output_dir": "out"},
        "deepspeed": "ds.json",
    }
    given = {key: value for key, value in {**fine, **sections}.items() if value is not None}
    Path("dstool.yaml").write_text(json.dumps(given))  # JSON is YAML


def contents():
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(Path().rglob("*"))}


def check(*words, **options):
    return preflight.check(load(words=words).config, **options)


def refusal(*words, **options) -> DstoolError:
    """The error that the check ends in; it has a hint, and nothing was written."""
    before = contents()
    with pytest.raises(DstoolError) as caught:
        check(*words, **options)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert contents() == before
    return caught.value


def test_a_run_that_is_fine_passes_in_well_under_a_second_and_nothing_is_written():
    before, started = contents(), time.monotonic()
    assert check()
    assert time.monotonic() - started < 1
    assert contents() == before


def test_no_run_file():
    Path("dstool.yaml").unlink()
    error = refusal()
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert error.hint.startswith("dstool init-config")


def test_an_unknown_key():
    run_file(train={"learnin_rate": 1e-5})
    error = refusal()
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert "train.learnin_rate: unknown key, did you mean learning_rate?" in error.message


# the JSON


def test_no_json_is_named():
    run_file(deepspeed=None)
    error = refusal()
    assert (type(error), error.message) == (ConfigError, "the run file names no DeepSpeed JSON")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "ds.json: no such file"),
        ("", "ds.json: the file is empty"),
        ('{"zero_optimization": {"stage": 2},}', "ds.json:1:35: a comma before } is one too many"),
        ('{"zero_optimisation": {"stage": 2}}', "did you mean zero_optimization?"),
    ],
    ids=["missing", "empty", "broken", "unknown key"],
)
def test_a_json_that_cannot_be_used(text, said):
    Path("ds.json").unlink()
    if text is not None:
        Path("ds.json").write_text(text)
    error = refusal()
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert said in error.message


def test_a_json_that_contradicts_the_run_file():
    Path("ds.json").write_text(json.dumps({**JSON, "train_micro_batch_size_per_gpu": 4}))
    error = refusal("train.per_device_train_batch_size=8")
    assert type(error) is ConfigError
    assert "ds.json and dstool.yaml disagree" in error.message


def test_a_json_written_into_the_run_file_is_checked_alike():
    run_file(deepspeed=JSON)
    assert check()
    run_file(deepspeed={"zero_optimization": {"stage": 7}})
    assert "zero_optimization.stage is 7" in refusal().message


# the model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "the run file names no model"),
        ({"name": "model", "from_scratch": {"model_type": "bert"}}, "both model.name and model.from_scratch"),
    ],
)
def test_exactly_one_model_is_named(model, said):
    run_file(model=model)
    error = refusal()
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert said in error.message


def test_a_model_folder_without_a_config():
    Path("model/config.json").unlink()
    error = refusal()
    assert (type(error), error.exit_code) == (ModelError, 3)
    assert error.message == "model has no config.json"


def test_a_file_in_place_of_a_model_folder():
    Path("model/model.safetensors").touch()
    error = refusal("model.name=model/model.safetensors")
    assert (type(error), error.message) == (ModelError, "model/model.safetensors is a file")
    assert error.hint == "name its folder: model.name=model"


@pytest.mark.parametrize("name", ["./gone", "../gone", "/gone/model", "runs/of/mine"])
def test_a_model_folder_that_is_not_there(name):
    error = refusal(f"model.name={name}")
    assert (type(error), error.exit_code) == (ModelError, 3)
    assert "no such folder" in error.message


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine that knows nothing, which is for the ranks to find out."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.parametrize("name", ["bert-base-uncased", "google-bert/bert-base-uncased"])
def test_a_name_on_the_hub_is_left_to_the_hub(name, hub):
    assert check(f"model.name={name}", "data.train=stanfordnlp/imdb")


# the data


def test_no_data():
    run_file(data={})
    error = refusal()
    assert (type(error), error.message) == (ConfigError, "the run file names no data")


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no file or folder matches 'other.csv'"),
        ("", "other.csv has no rows"),
        ("text,label\n", "other.csv has no rows"),
        ("text,label\n\n\n", "other.csv has no rows"),
        ("text,stars\ngood,1\n", "other.csv has no column 'label'; its columns are: text, stars"),
        ("review,label\ngood,1\n", "other.csv has no column 'text'; its columns are: review, label"),
        ("text,label\ngood\n", "other.csv:2 has 1 field where the header has 2"),
        ("text,label\n,1\n", "other.csv:2 has no text in column 'text'"),
    ],
    ids=["missing", "empty", "header", "blank lines", "no label", "no text", "too few fields", "blank text"],
)
def test_a_data_file_that_cannot_be_used(key, text, said):
    if text is not None:
        Path("other.csv").write_text(text)
    error = refusal(f"data.{key}=other.csv")
    assert (type(error), error.exit_code) == (DataError, 3)
    assert error.message == said


def test_a_lost_column_is_mended_by_the_key_in_the_hint():
    Path("reviews.csv").write_text("text,stars\ngood,1\n")
    assert refusal().hint == "set data.label_column to one of them"
    assert check("data.label_column=stars")


def test_the_second_file_of_a_list_is_looked_at_too():
    Path("more.csv").write_text("text\ngood\n")
    assert "more.csv has no column 'label'" in refusal("data.train=[reviews.csv, more.csv]").message


def test_a_language_model_needs_no_label():
    Path("book.txt").write_text("once upon a time\n")
    assert check("model.task=causal-lm", "data.train=book.txt")
    error = refusal("data.train=book.txt")
    assert (type(error), "a text file has no labels" in error.message) == (DataError, True)
    assert "put text and label into a file" in error.hint


def test_a_semicolon_is_said_and_the_hint_mends_it():
    Path("reviews.csv").write_text("text;label\ngood;1\nbad;0\n")
    error = refusal()
    assert error.message == 'reviews.csv looks divided by ";" rather than by ","'
    assert check(*shlex.split(error.hint))


def test_a_broken_first_row_that_is_to_be_left_out_is_no_fault():
    Path("reviews.csv").write_text("text,label\n,1\ngood,1\n")
    assert type(refusal()) is DataError
    assert check("data.skip_bad_rows=true")


def test_the_wrong_encoding_names_the_right_one():
    Path("reviews.csv").write_bytes("text,label\n정말 재미있는 영화였다,1\n".encode("cp949"))
    assert refusal().hint == "data.encoding=cp949"
    assert check("data.encoding=cp949")


# the output folder


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_output_that_exists(kind):
    Path("out").mkdir() if kind == "folder" else Path("out").touch()
    if kind == "folder":
        Path("out/config.json").touch()
    error = refusal()
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert error.message == "out exists and is not empty"
    assert all(way in error.hint for way in ("--resume", "--force", "train.output_dir="))


def test_an_output_that_exists_is_fine_for_who_goes_on_or_starts_anew():
    Path("out").mkdir()
    assert check()
    Path("out/config.json").touch()
    assert check(may_exist=True)
    assert check("train.resume_from_checkpoint=true")


def test_a_check_says_nothing_when_all_is_fine(caplog):
    with caplog.at_level(logging.DEBUG):
        check()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("model.name=someone/model",), ModelError),
        (("data.train=someone/reviews",), DataError),
        (("data.eval=someone/reviews",), DataError),
    ],
)
def test_a_hub_that_cannot_be_reached_is_said_at_once(words, error, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused = refusal(*words)
    assert type(refused) is error
    assert "is not on this machine, and the Hugging Face hub cannot be reached" in refused.message


def test_a_model_that_was_fetched_before_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub/models--someone--model").mkdir(parents=True)
    assert check("model.name=someone/model")


@pytest.mark.parametrize(
    "word",
    [
        "per_device_train_batch_size=0",
        "per_device_eval_batch_size=-1",
        "gradient_accumulation_steps=0",
        "learning_rate=-1e-3",
        "learning_rate=.nan",
        "warmup_steps=-1",
        "num_train_epochs=0",
        "max_steps=0",
    ],
)
def test_numbers_that_train_nothing_are_refused(word):
    error = refusal(f"train.{word}")
    assert (type(error), error.exit_code) == (ConfigError, 2)
    assert word.partition("=")[0] in error.message


def test_a_push_to_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    error = refusal("train.push_to_hub=true")
    assert (error.exit_code, "push_to_hub" in error.message) == (4, True)
