"""The words on the keys: in both languages, for all that init-config writes, and true to the table."""

from __future__ import annotations

import contextlib
import itertools
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typer

from dstool.cli import app
from dstool.config import training_arguments
from dstool.ds_config import glossary
from dstool.ds_config.build import build
from dstool.ds_config.keys import keys
from dstool.ds_config.options import CHOICES, Options
from dstool.errors import ConfigError

LANGS = ("en", "ko")
# Written with the same value whatever the options are.
ALWAYS_THE_SAME = {"steps_per_print", "wall_clock_breakdown"}


def paths(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield above + name
        if isinstance(value, dict):
            yield from paths(value, f"{above}{name}.")


def every_build() -> Iterator[dict[str, Any]]:
    """What init-config writes for every optimizer and offload at every stage, and for each other option."""
    crossed = ("stage", "offload_optimizer", "offload_param", "optimizer")
    for values in itertools.product(*(CHOICES[name] for name in crossed)):
        for path in (None, "/nvme"):
            yield from built(dict(zip(crossed, values, strict=True)) | {"nvme_path": path})
    for name in set(CHOICES) - set(crossed):
        for value in CHOICES[name]:
            yield from built({name: value})
    yield from built({"lr": 1e-5, "warmup": 10, "micro_batch": 1, "global_batch": 8, "clip": 1.0})


def columns(line: str) -> int:
    """How wide `line` is in a terminal, where a Korean letter takes two columns."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in line)


def built(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if options.get("optimizer") != "OneBitAdam":  # DeepSpeed no longer has it, nor its keys
        with contextlib.suppress(ConfigError):
            yield build(Options(**options))


@pytest.fixture(scope="module")
def written() -> set[str]:
    return {path for config in every_build() for path in paths(config)}


def test_the_builds_are_many(written: set[str]) -> None:
    assert {"aio.block_size", "optimizer.params.adam_w_mode", "zero_optimization.sub_group_size"} <= written


@pytest.mark.parametrize("lang", LANGS)
def test_every_key_that_init_config_writes_is_explained(lang: glossary.Lang, written: set[str]) -> None:
    assert written - set(glossary.entries(lang)) == set()


def test_every_key_that_init_config_writes_is_a_key(written: set[str]) -> None:
    assert written - set(keys()) == set()


def test_every_key_that_init_config_writes_says_what_sets_it(written: set[str]) -> None:
    silent = {path for path in written - ALWAYS_THE_SAME if not glossary.set_by(path)}
    assert silent <= {"scheduler.params.warmup_min_lr"}  # Trainer's "auto" is always 0


def test_every_option_that_is_named_writes_that_key_and_is_one(written: set[str]) -> None:
    assert set(glossary.OPTIONS) - written == set()
    command = typer.main.get_command(app).commands["init-config"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    assert {name for names in glossary.OPTIONS.values() for name in names} <= options


def test_every_key_of_the_run_file_that_is_named_is_one() -> None:
    named = {name for path in keys() for name in glossary.set_by(path) if not name.startswith("--")}
    assert {name.removeprefix("train.") for name in named} <= set(training_arguments())


def test_every_auto_of_trainer_says_what_it_becomes() -> None:
    assert set(glossary.AUTO_FROM) == {path for path, key in keys().items() if key.auto == "trainer"}


@pytest.mark.parametrize("lang", LANGS)
def test_every_key_is_explained_in_the_order_of_the_table(lang: glossary.Lang) -> None:
    assert list(glossary.entries(lang)) == list(keys())


def test_the_languages_say_as_much() -> None:
    english, korean = (glossary.entries(lang) for lang in LANGS)
    assert list(english) == list(korean)
    assert [path for path in english if bool(english[path].cost) != bool(korean[path].cost)] == []
    assert list(glossary.topics("en")) == list(glossary.topics("ko"))
    assert set(glossary.labels("en")) == set(glossary.labels("ko"))


@pytest.mark.parametrize("lang", LANGS)
def test_the_words_are_sentences_in_their_language(lang: glossary.Lang) -> None:
    for path, entry in glossary.entries(lang).items():
        for text in (entry.meaning, entry.cost):
            assert text == text.strip()
            assert not text or text.endswith("."), path
        assert entry.meaning
        assert "\n" not in entry.summary
        assert (lang == "ko") == any("가" <= letter <= "힣" for letter in entry.meaning), path


@pytest.mark.parametrize("lang", LANGS)
def test_the_topics_fit_a_terminal(lang: glossary.Lang) -> None:
    assert list(glossary.topics(lang)) == ["stages", "offload", "precision", "batch", "checkpoints"]
    for topic in glossary.topics(lang).values():
        assert topic.lines
        assert max(map(columns, topic.lines)) <= 108
        assert all(line == line.rstrip() for line in topic.lines)


@pytest.mark.parametrize("lang", LANGS)
def test_the_commands_in_the_topics_exist(lang: glossary.Lang) -> None:
    lines = [line.split() for topic in glossary.topics(lang).values() for line in topic.lines]
    commands = [words for words in lines if words[:1] == ["dstool"]]
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {words[1] for words in commands} == {"init-config", "consolidate", "merge"}
    for words in commands:
        options = {name for parameter in known[words[1]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize(
    ("environ", "lang"),
    [
        ({}, "en"),
        ({"LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "C.UTF-8", "LC_MESSAGES": "ko"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": ""}, "ko"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
    ],
    ids=str,
)
def test_the_language_is_that_of_the_locale(environ: dict[str, str], lang: str) -> None:
    assert glossary.language(environ) == lang
