"""The run file and its one loader."""

import dataclasses
import logging
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dstool import config as module
from dstool.config import (
    REMOVED_ARGUMENTS,
    RUN_FILE,
    Config,
    dump,
    explain,
    load,
    resolve,
    scalar,
    training_arguments,
    without_secrets,
)
from dstool.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name=RUN_FILE):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def loaded(text, **options) -> Config:
    write(text)
    return load(**options).config


def refusal(text=None, path=None, **options) -> ConfigError:
    if text is not None:
        write(text)
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


# the order


def test_defaults_then_file_then_words_then_flags():
    write("infer:\n  seed: 1\n  batch_size: 2\n  max_new_tokens: 3\n")
    flags = {"infer.max_new_tokens": 5, "infer.top_p": None}
    found = load(words=["infer.batch_size=4", "infer.max_new_tokens=4"], flags=flags)
    infer = found.config.infer
    assert (infer.top_p, infer.seed, infer.batch_size, infer.max_new_tokens) == (1.0, 1, 4, 5)
    assert found.path == Path(RUN_FILE)


def test_the_later_of_two_words_counts():
    assert loaded("infer: {}\n", words=["infer.seed=1", "infer.seed=2"]).infer.seed == 2


def test_explain_says_where_each_value_is_from():
    write("# a comment\ninfer:\n  seed: 1\n  batch_size: 2\ntrain:\n  max_steps: 4\ndeepspeed: ds.json\n")
    rows = explain(load(words=["infer.batch_size=4"], flags={"infer.max_new_tokens": 5}))
    found = {key: (value, origin) for key, value, origin in rows}
    assert found["infer.seed"] == (1, "dstool.yaml:3")
    assert found["infer.batch_size"] == (4, "command line")
    assert found["infer.max_new_tokens"] == (5, "--max-new-tokens")
    assert found["infer.top_p"] == (1.0, "default")
    assert found["train.max_steps"] == (4, "dstool.yaml:6")
    assert found["train.output_dir"] == ("out", "default")
    assert found["deepspeed"] == ("ds.json", "dstool.yaml:7")
    assert "train.learning_rate" not in found


# values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("2E5", 2e5),
        ("+1.5e3", 1500.0),
        ("-.5e-3", -5e-4),
        ("1", 1),
        ("1.5", 1.5),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("2024-01-31", "2024-01-31"),
        ("2024-99-99", "2024-99-99"),
        ("=", "="),
        ("[1, no]", [1, "no"]),
        ("v1.0", "v1.0"),
    ],
)
def test_scalars_are_those_of_yaml_1_2_in_the_file_and_in_words(text, value):
    """`data_seed` and its like take what they get; `from_scratch` takes anything."""
    in_file = loaded(f"model:\n  from_scratch:\n    key: {text}\n").model.from_scratch
    in_word = loaded("model: {}\n", words=[f"model.from_scratch.key={text}"]).model.from_scratch
    assert in_file == in_word == {"key": value}
    assert type(in_file["key"]) is type(value)


def test_save_strategy_no_is_a_word_and_bf16_no_is_false():
    train = loaded("train:\n  save_strategy: no\n  bf16: no\n  learning_rate: 2e-5\n").train
    assert train.arguments() == {
        "output_dir": "out",
        "save_strategy": "no",
        "bf16": False,
        "learning_rate": 2e-5,
    }


def test_arguments_are_those_that_were_given_without_dstools_own():
    train = loaded("train:\n  output_dir: run\n  save_fp32: true\n  max_steps: 3\n").train
    assert train.arguments() == {"output_dir": "run", "max_steps": 3}
    assert train.save_fp32 is True


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("data.train=*.csv", "train", "*.csv"),
        ("data.train=data[1].csv", "train", "data[1].csv"),
        ("data.train=[a.csv, b.csv]", "train", ["a.csv", "b.csv"]),
        ("data.train=리뷰=1.csv", "train", "리뷰=1.csv"),
        ("data.text_column=@text", "text_column", "@text"),
        ("data.text_column=0x_", "text_column", "0x_"),
        ("data.train=", "train", None),
    ],
)
def test_a_word_that_is_no_yaml_is_text(word, key, value):
    assert getattr(loaded("data: {}\n", words=[word]).data, key) == value


@pytest.mark.parametrize("word", ["train", "--lr=1", "=1", "a b=1", ".x=1", "train..x=1"])
def test_what_is_no_word(word):
    assert refusal("data: {}\n", words=[word]).message == f"{word}: not KEY=VALUE"


def test_a_deepspeed_mapping_is_taken_as_it_is():
    inline = loaded("deepspeed:\n  zero_optimization: {stage: 2}\n  x: null\n").deepspeed
    assert inline == {"zero_optimization": {"stage": 2}, "x": None}


def test_a_section_whose_lines_are_all_commented_out_is_an_empty_one():
    assert loaded("train:\n#  max_steps: 3\nmodel:\n  name: m\n").train.arguments() == {"output_dir": "out"}


# what is wrong with a key


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "train:\n  learnin_rate: 1\n",
            "train.learnin_rate: unknown key, did you mean learning_rate? (line 2)",
        ),
        ("trian: {}\n", "trian: unknown key, did you mean train? (line 1)"),
        ("train:\n  text_column: x\n", "train.text_column: unknown key, it belongs in data: (line 2)"),
        ("max_steps: 3\n", "max_steps: unknown key, it belongs in train: (line 1)"),
        ("quantum: {}\n", "quantum: unknown key (line 1)"),
        ("zzz zzz: 1\n", "zzz zzz: unknown key (line 1)"),
        ("data:\n  열: 1\n", "data.열: unknown key (line 2)"),
        ("1: x\n", "1: unknown key (line 1)"),
        (
            "train.learning_rate: 1\n",
            "train.learning_rate: unknown key, "
            "in the file learning_rate stands on a line below train: (line 1)",
        ),
        ("train:\n  a.b: 1\n", "train.a.b: unknown key (line 2)"),
        (
            "train:\n  max_steps: x\n",
            "train.max_steps: should be a valid integer, not 'x' (line 2)",
        ),
        (
            "train:\n  learning_rate: x\n",
            "train.learning_rate: should be a valid number, not 'x' (line 2)",
        ),
        ("train:\n  bf16: maybe\n", "train.bf16: should be a valid boolean, not 'maybe' (line 2)"),
        (
            "infer:\n  top_p: 2\n",
            "infer.top_p: should be less than or equal to 1, not 2 (line 2)",
        ),
        (
            "model:\n  task: generation\n",
            "model.task: should be 'text-classification' or 'causal-lm', not 'generation' (line 2)",
        ),
        ("model: 4\n", "model: must be a section with keys of its own, not 4 (line 1)"),
        ("deepspeed: 7\n", "deepspeed: should be the path of a JSON file or a mapping, not 7 (line 1)"),
        ("data:\n  train: {a: 1}\n", "data.train: should be a valid list, not {'a': 1} (line 2)"),
    ],
)
def test_a_problem_is_said_once_with_its_place(text, said):
    error = refusal(text)
    assert error.message == f"dstool.yaml: {said}"
    assert error.hint == "correct dstool.yaml"


@pytest.mark.parametrize(("name", "said"), REMOVED_ARGUMENTS.items(), ids=REMOVED_ARGUMENTS)
def test_an_argument_that_is_gone_says_what_took_its_place(name, said):
    assert (
        refusal(f"train:\n  {name}: 1\n").message
        == f"dstool.yaml: train.{name}: unknown key: {said} (line 2)"
    )


def test_all_problems_are_said_at_once_and_each_where_it_was_given():
    error = refusal(
        "train:\n  learnin_rate: 1\n  max_steps: x\nmodell: {}\n",
        words=["data.max_length=-1", "train.nope.deep=1"],
        flags={"infer.max_new_tokens": 0},
    )
    assert set(error.message.splitlines()) == {
        "dstool.yaml: train.learnin_rate: unknown key, did you mean learning_rate? (line 2)",
        "dstool.yaml: train.max_steps: should be a valid integer, not 'x' (line 3)",
        "dstool.yaml: modell: unknown key, did you mean model? (line 4)",
        "command line: data.max_length: should be greater than 0, not -1",
        "command line: train.nope: unknown key",
        "--max-new-tokens: infer.max_new_tokens: should be greater than 0, not 0",
    }
    assert all(place in error.hint for place in ("dstool.yaml", "command line", "--max-new-tokens"))


# what is wrong with the file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "dstool.yaml is empty"),
        ("# only a comment\n", "dstool.yaml is empty"),
        ("- a\n- b\n", "dstool.yaml: must hold `section: ...` lines"),
        ("just words\n", "dstool.yaml: must hold `section: ...` lines"),
        ("data:\n  train: a: b\n", "dstool.yaml:2:11: mapping values are not allowed here"),
        ("data:\n\ttrain: a\n", "dstool.yaml:2:1: found character '\\t' that cannot start any token"),
        ("model: {name: x\n", "dstool.yaml:2:1: expected ',' or '}', but got '<stream end>'"),
        ("model: !foo x\n", "dstool.yaml:1:8: could not determine a constructor for the tag '!foo'"),
        ("? [a]\n: b\n", "dstool.yaml:1:3: found unhashable key"),
        ("infer:\n  seed: 0x_\n", "dstool.yaml: invalid literal for int() with base 16: ''"),
        (b"model:\n  name: \xb8\xae\n", "dstool.yaml: not UTF-8 text (byte 15)"),
    ],
)
def test_a_file_that_cannot_be_read(text, said):
    assert refusal(text).message == said


@pytest.mark.parametrize("text", ["a: \x00\n", "train: &a {b: *a}\n"], ids=["NUL", "a mapping in itself"])
def test_a_stranger_file_is_an_expected_failure_of_one_line(text):
    message = refusal(text).message
    assert message.startswith("dstool.yaml: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "train:\n  max_steps: 1\n  bf16: true\n  max_steps: 2\n",
            "train.max_steps: given twice, in lines 2 and 4",
        ),
        ("train: {}\nmodel: {}\ntrain: {}\n", "train: given twice, in lines 1 and 3"),
        ("deepspeed:\n  aio:\n    a: 1\n    a: 1\n", "deepspeed.aio.a: given twice, in lines 3 and 4"),
    ],
)
def test_a_key_given_twice(text, said):
    assert refusal(text).message == f"dstool.yaml: {said}"


def test_a_byte_order_mark_is_skipped():
    write(b"\xef\xbb\xbf" + b"infer:\n  seed: 7\n")
    assert load().config.infer.seed == 7


def test_windows_line_ends_are_line_ends():
    assert loaded("infer:\r\n  seed: 7\r\n").infer.seed == 7


def test_a_missing_run_file():
    error = refusal()
    assert error.message == f"no dstool.yaml in {Path.cwd()}"
    assert error.hint.startswith("dstool init-config")
    found = load(required=False, words=["infer.seed=3"])
    assert found.path is None
    assert found.config.infer.seed == 3


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", ["gone.yaml", "file/gone.yaml"])
def test_a_run_file_that_was_named_has_to_be_there(name, required):
    Path("file").touch()
    assert refusal(path=name, required=required).message == f"{name}: no such run file"


# a run file somewhere else


def test_paths_of_a_run_file_elsewhere_are_relative_to_it():
    for name in ("there/data/a.csv", "there/model/config.json"):
        write("x", name)
    text = (
        "model:\n  name: model\n  tokenizer: some/hub-name\n"
        "data:\n  train: [data/a.csv, gone.csv]\n  eval: data/*.csv\n"
        "deepspeed: ds.json\ntrain:\n  output_dir: out\nmerge:\n  input_dir: checkpoint-1\n"
        "consolidate:\n  output_dir: /abs\n"
    )
    config = load(write(text, "there/run.yaml"), words=["merge.output_dir=merged"]).config
    assert config.model.name == "there/model"
    assert config.model.tokenizer == "some/hub-name"
    assert config.data.train == ["there/data/a.csv", "gone.csv"]
    assert config.data.eval == "there/data/*.csv"
    assert config.deepspeed == "there/ds.json"
    assert config.train.output_dir == "there/out"
    assert config.merge.input_dir == "checkpoint-1"
    assert config.merge.output_dir == "merged"
    assert config.consolidate.output_dir == "/abs"


def test_a_sample_and_an_inline_mapping_stay_as_they_are_elsewhere():
    text = "data:\n  train: sample:reviews_en\ndeepspeed: {zero_optimization: {stage: 2}}\n"
    config = load(write(text, "there/run.yaml")).config
    assert config.data.train == "sample:reviews_en"
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}


def test_a_resolved_config_means_the_same_from_any_folder(monkeypatch):
    here = Path.cwd()
    write("text\nx\n", "data/a.csv")
    config = loaded("data:\n  train: data/*.csv\ndeepspeed: ds.json\n")
    write(dump(resolve(config)), "out/dstool.yaml")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    found = load("../out/dstool.yaml").config
    assert found.data.train == str(here / "data/*.csv")
    assert found.deepspeed == str(here / "ds.json")
    assert found.train.output_dir == str(here / "out")


def test_resolving_keeps_what_was_given_and_what_was_not():
    text = "model:\n  name: hub-name\ntrain:\n  max_steps: 3\n  output_dir: out\ninfer:\n  seed: 3\n"
    config = loaded(text)
    resolved = resolve(config)
    assert resolved.train.arguments() == {"output_dir": str(Path.cwd() / "out"), "max_steps": 3}
    assert (resolved.model, resolved.infer) == (config.model, config.infer)


# dump


words = st.text(min_size=1, max_size=20) | st.sampled_from(
    [
        "no",
        "1e5",
        "2e-5",
        ".5e1",
        "null",
        "~",
        "1:30",
        "0x1",
        "010",
        "2024-01-01",
        "=",
        "<<",
        "a: b",
        "*x",
        "#",
    ]
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)
run_files = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries(
            {}, optional={"name": words, "from_scratch": st.dictionaries(words, nested, max_size=3)}
        ),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "train": words | st.lists(words, max_size=3),
                "text_column": words,
                "eval_split": st.floats(0, 0.9),
                "max_length": st.none() | st.integers(1, 10**6),
            },
        ),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "output_dir": words,
                "learning_rate": st.floats(allow_nan=False),
                "save_strategy": words,
                "lr_scheduler_kwargs": st.dictionaries(words, nested, max_size=3),
                "report_to": st.none() | st.lists(words, max_size=2),
                "save_fp32": st.booleans(),
            },
        ),
        "deepspeed": st.none() | words | st.dictionaries(words, nested, max_size=3),
    },
)


@example({"deepspeed": {"0": float("inf")}})
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run_files)
@example({"model": {"name": "1e5", "from_scratch": {"no": {"a": None, "b": ".5e-1"}}}})
@example({"deepspeed": {"a": "\x85", "b": "\ufeff", "c": "\u2028"}})
@example({"train": {"report_to": None, "learning_rate": 2e-5, "save_strategy": "no"}})
def test_a_dumped_config_loads_as_the_same_one(values):
    config = module._config_model().model_validate(values)
    again = loaded(dump(config))
    assert again == config
    assert again.train.arguments() == {"output_dir": config.train.output_dir, **config.train.arguments()}


@given(st.text())
@example("1e5")
@example("a: b")
@example("two\nlines")
@example("\x85")
def test_a_scalar_is_one_line_that_both_versions_of_yaml_read_as_the_text(text):
    written = scalar(text)
    assert len(written.splitlines()) == 1
    for loader in (module.Loader, yaml.SafeLoader):
        assert yaml.load(f"key: {written} # comment", Loader=loader) == {"key": text}


# TrainingArguments


def test_the_fields_of_train_are_those_of_the_installed_training_arguments():
    from transformers import TrainingArguments

    assert set(training_arguments()) == {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("max_steps", int),
        ("learning_rate", float),
        ("bf16", bool),
        ("num_train_epochs", float),
        ("resume_from_checkpoint", str | bool | None),
    ],
)
def test_the_types_of_training_arguments_are_known(name, kind):
    assert training_arguments()[name] == kind


def test_every_key_has_a_description():
    sections = {name: field.annotation for name, field in module._config_model().model_fields.items()}
    keys = {
        f"{section}.{name}": field.description
        for section, kind in sections.items()
        for name, field in getattr(kind, "model_fields", {}).items()
    }
    assert len(keys) > 100
    assert [key for key, description in keys.items() if not description] == []


def test_loading_says_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        loaded("infer: {seed: 1}\n")
    assert caplog.records == []


def test_a_word_into_a_json_that_is_a_file_is_refused():
    error = refusal("deepspeed: ds_config.json\n", words=["deepspeed.zero_optimization.stage=3"])
    assert "deepspeed: is the file ds_config.json" in error.message


# what is left out and put right


def test_secrets_of_trainer_and_of_a_monitor_are_left_out():
    words = [
        "train.hub_token=hf_X",
        "train.push_to_hub=true",
        "deepspeed={comet: {api_key: k, enabled: true}}",
    ]
    found = without_secrets(load(words=words, required=False).config)
    text = dump(found)
    assert "hf_X" not in text
    assert "api_key" not in text
    assert found.train.arguments()["push_to_hub"] is True
    assert found.deepspeed == {"comet": {"enabled": True}}


def test_the_checkpoint_to_resume_from_is_relative_to_its_run_file(tmp_path):
    Path("runs/out/checkpoint-2").mkdir(parents=True)
    write("train:\n  resume_from_checkpoint: out/checkpoint-2\n", "runs/dstool.yaml")
    named = load("runs/dstool.yaml").config.train.arguments()["resume_from_checkpoint"]
    assert named == "runs/out/checkpoint-2"
    write("train:\n  resume_from_checkpoint: checkpoint-2\n", "runs/dstool.yaml")
    assert load("runs/dstool.yaml").config.train.arguments()["resume_from_checkpoint"] == "checkpoint-2"
    write("train:\n  resume_from_checkpoint: true\n", "runs/dstool.yaml")
    assert load("runs/dstool.yaml").config.train.arguments()["resume_from_checkpoint"] is True


# a run file that cannot be read


def test_a_folder_in_the_place_of_the_run_file_says_what_to_do():
    Path("dstool.yaml").mkdir()
    error = refusal()
    assert error.message == "dstool.yaml: a folder, not a run file"
    assert error.hint == "mv dstool.yaml dstool.yaml.old, then dstool init-config"


def test_a_folder_with_a_run_file_in_it_says_how_to_name_that():
    write("infer:\n  seed: 7\n", "a run/dstool.yaml")
    assert refusal(path="a run").hint == "--config 'a run/dstool.yaml'"
    assert load("a run/dstool.yaml").config.infer.seed == 7


def test_a_key_of_the_json_that_is_no_text_is_named():
    error = refusal("deepspeed:\n  zero_optimization: {stage: 2}\n  1: 2\n")
    assert "deepspeed: the key 1 is no text, as JSON needs it" in error.message
