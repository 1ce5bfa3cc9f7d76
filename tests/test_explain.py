"""`dstool explain`: what a name finds, and the text it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstool.ds_config import glossary
from dstool.ds_config.keys import keys, removed
from dstool.errors import ConfigError
from dstool.explain import KeyList, KeyText, TopicText, explain, find, show

LANGS = ("en", "ko")


def command(*arguments: str, **environ: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "dstool", "explain", *arguments],
        env={**os.environ, "LC_ALL": "C.UTF-8", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refusal(name: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find(name)
    return caught.value


# what a name finds


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("zero_optimization.stage", "zero_optimization.stage"),
        ("stage", "zero_optimization.stage"),
        ("overlap_comm", "zero_optimization.overlap_comm"),
        ("params.lr", "optimizer.params.lr"),
        ("offload_param.device", "zero_optimization.offload_param.device"),
        ("live_param", "zero_optimization.stage3_max_live_parameters"),
        ("reduce-bucket-size", "zero_optimization.reduce_bucket_size"),
        ('"overlap_comm":', "zero_optimization.overlap_comm"),
        ("AIO", "aio"),
        ("check_grad_overflow", "bf16.check_grad_overflow"),  # also in bfloat16, which is outdated
        ("zenf", "zero_optimization.zenflow"),  # and all that is inside it
        ("stages", "stages"),
        ("batch", "batch"),
    ],
)
def test_a_part_of_a_path_finds_the_key(name: str, found: str) -> None:
    assert find(name) == found


def test_a_name_that_fits_several_keys_lists_them() -> None:
    error = refusal("pin_memory")
    assert error.message == (
        "pin_memory fits several keys: zero_optimization.offload_optimizer.pin_memory, "
        "zero_optimization.offload_param.pin_memory, data_efficiency.data_sampling.pin_memory"
    )
    assert error.hint == "dstool explain zero_optimization.offload_optimizer.pin_memory"
    assert refusal("enabled").message.endswith(" and 5 more")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ovrlap_comm", "overlap_comm"),
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.aio_block", "zero_optimization"),
        ("gradient_cliping", "gradient_clipping"),
        ("thread_count", "aio.intra_op_parallelism"),
        ("aio.thread_count", "aio.intra_op_parallelism"),
        ("qqqqqq", None),
        ("", None),
    ],
)
def test_a_name_that_is_none_suggests_the_nearest(name: str, near: str | None) -> None:
    error = refusal(name)
    assert "no key of DeepSpeed" in error.message
    if near:
        assert "did you mean" in error.message
        assert near in error.message
    assert find((error.hint or "").removeprefix("dstool explain").strip() or "stage")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mics_shard_size", "zero_optimization.mics_shard_size: DeepSpeed"),
        ("sparse_attention.mode", "sparse_attention: DeepSpeed"),
        ("zero_optimization.aio", "aio stands at the top level"),
        ("", "no key of DeepSpeed was named"),
        (".", "no key of DeepSpeed was named"),
    ],
)
def test_what_is_gone_or_elsewhere_is_found_by_a_part_of_its_path(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", removed())
def test_a_key_that_is_gone_says_so(name: str) -> None:
    assert "refuses this key" in refusal(name).message


@given(
    st.text() | st.sampled_from([*keys()]).flatmap(lambda path: st.sampled_from([path[i:] for i in range(9)]))
)
def test_no_name_makes_a_traceback(name: str) -> None:
    try:
        result = explain(name, "en")
    except ConfigError as error:
        assert error.hint
    else:
        assert show(result)


# what is shown


@pytest.mark.parametrize("lang", LANGS)
@pytest.mark.parametrize("path", keys())
def test_every_key_can_be_shown(path: str, lang: glossary.Lang) -> None:
    result = explain(path, lang)
    assert isinstance(result, KeyText)
    assert show(result).splitlines()[0] == result.key == path
    assert max(map(len, show(result).splitlines())) <= 100


@pytest.mark.parametrize("lang", LANGS)
def test_the_list_has_every_key_in_one_line(lang: glossary.Lang) -> None:
    result = explain(None, lang)
    assert isinstance(result, KeyList)
    lines = [line.split() for line in show(result).splitlines()]
    assert [words[0] for words in lines if len(words) > 1] == [*glossary.topics(lang), *keys()]


def test_a_topic() -> None:
    result = explain("stages", "en")
    assert isinstance(result, TopicText)
    assert show(result).startswith("Which ZeRO stage, and which offload\n\nP parameters in bf16")


# the command


def test_a_key_in_english() -> None:
    done = command("sub_group_size")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == """\
zero_optimization.sub_group_size
  Elements that the optimizer steps at a time; they are also what is moved to and from NVMe.
  type     int
  default  1,000,000,000
  allowed  at least 0
  stages   3
  cost     Lower: a lower peak in the step (4 bytes an element), slower steps. Higher: the reverse.
  set by   dstool init-config --stage
"""
    )


@pytest.mark.parametrize(
    ("lang", "line"),
    [
        ("en", "  use instead  offload_param or offload_optimizer"),
        ("ko", "  대신 쓸 키  offload_param 또는 offload_optimizer"),
    ],
)
def test_an_old_key_names_the_new_ones(lang: glossary.Lang, line: str) -> None:
    assert line in show(explain("zero_optimization.cpu_offload_use_pin_memory", lang)).splitlines()


def test_a_key_in_korean_by_the_locale() -> None:
    done = command("reduce_bucket", LC_ALL="ko_KR.UTF-8", PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == """\
zero_optimization.reduce_bucket_size
  한 번에 리듀스(reduce)하는 기울기 원소 수입니다.
  타입       int
  기본값     500,000,000
  허용 값    1 이상
  auto       Trainer: hidden_size * hidden_size
  스테이지   1, 2, 3
  비용       높이면 메시지가 적고 커집니다. 버퍼마다 bf16에서 원소당 2바이트이고 overlap_comm이면
             둘입니다. 장치 메모리가 모자라면 낮추세요.
  설정 위치  dstool init-config --stage
"""
    )


def test_the_option_beats_the_locale() -> None:
    assert command("stage", "--lang", "en", LC_ALL="ko_KR.UTF-8").stdout == command("stage").stdout
    assert command("stage", "--lang", "ko").stdout != command("stage").stdout


def test_a_terminal_that_cannot_write_korean_is_no_traceback() -> None:
    done = command("stage", "--json", LC_ALL="ko_KR.UTF-8", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["meaning"].startswith("랭크끼리")
    assert "\\ub7ad" in command("stage", "--lang", "ko", PYTHONIOENCODING="ascii").stdout


def test_a_block_names_what_is_inside() -> None:
    names = "block_size, intra_op_parallelism, overlap_events, queue_depth, single_submit, use_gds"
    assert f"  inside  {names}\n" in command("aio").stdout


def test_json() -> None:
    found = json.loads(command("gradient_clipping", "--json").stdout)
    assert found["key"] == "gradient_clipping"
    assert (found["default"], found["minimum"], found["auto"]) == (1.0, 0, "trainer")
    assert found["set_by"] == ["--clip", "train.max_grad_norm"]
    assert set(json.loads(command("--json").stdout)["keys"]) == set(keys())
    assert json.loads(command("batch", "--json", "--lang", "ko").stdout)["lang"] == "ko"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "ovrlap_comm",
            [
                "error: ovrlap_comm: no key of DeepSpeed 0.19.8, did you mean overlap_comm?",
                "try: dstool explain overlap_comm",
            ],
        ),
        (
            "buffer_count",
            [
                "error: buffer_count fits several keys: zero_optimization.offload_optimizer.buffer_count, "
                "zero_optimization.offload_param.buffer_count",
                "try: dstool explain zero_optimization.offload_optimizer.buffer_count",
            ],
        ),
    ],
)
def test_a_failure(name: str, lines: list[str], tmp_path: Path) -> None:
    done = command(name)
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", lines)
