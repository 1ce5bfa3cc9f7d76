"""What commands show, to the letter."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dstool.console import Console, StepProgress, human_bytes
from dstool.errors import DataError


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "DSTOOL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Result:
    """One field of every kind."""

    output_dir: Path
    files: tuple[str, ...]
    parameters: int
    tied: bool
    loss: float
    metrics: Mapping[str, float]
    nothing: str | None
    empty: tuple[str, ...]
    bytes: int = field(metadata={"unit": "bytes"})
    seconds: float = field(metadata={"unit": "seconds"})


def result(**changes):
    values = {
        "output_dir": Path.cwd() / "out",
        "files": ("a.safetensors", "b.safetensors"),
        "parameters": 1234567,
        "tied": True,
        "loss": 0.123456,
        "metrics": {"loss": 2.0, "f1": 0.98765},
        "nothing": None,
        "empty": (),
        "bytes": 1536,
        "seconds": 12.345,
    }
    return Result(**{**values, **changes})


def console(as_json=False):
    made = Console()
    made.as_json = as_json
    return made


def test_a_result_as_text(capsys):
    console().result("Merged", result(), next_command="dstool infer")
    shown = capsys.readouterr()
    assert shown.out == (
        "Merged\n"
        "  output dir  out\n"
        "  files       a.safetensors, b.safetensors\n"
        "  parameters  1,234,567\n"
        "  tied        True\n"
        "  loss        0.1235\n"
        "  metrics     loss 2  f1 0.9877\n"
        "  bytes       1.5 kB\n"
        "  seconds     12.3 s\n"
        "  next        dstool infer\n"
    )
    assert shown.err == ""


def test_a_result_as_json_has_raw_numbers_and_every_field(capsys):
    console(as_json=True).result("Merged", result(), next_command="dstool infer")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "output_dir": f"{Path.cwd()}/out",
        "files": ["a.safetensors", "b.safetensors"],
        "parameters": 1234567,
        "tied": True,
        "loss": 0.123456,
        "metrics": {"loss": 2.0, "f1": 0.98765},
        "nothing": None,
        "empty": [],
        "bytes": 1536,
        "seconds": 12.345,
    }


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_null_where_a_number_is_not_finite(capsys, number):
    console(as_json=True).result("", result(loss=number, metrics={"loss": number}))
    shown = json.loads(capsys.readouterr().out)
    assert shown["loss"] is None
    assert shown["metrics"] == {"loss": None}


def test_json_keeps_letters_of_every_script(capsys):
    console(as_json=True).result("", {"text": "좋아요"})
    assert capsys.readouterr().out == '{"text": "좋아요"}\n'


@pytest.mark.parametrize(
    ("path", "as_text", "as_json"),
    [
        ("{here}/out/x", "out/x", "{here}/out/x"),
        ("out/x", "out/x", "{here}/out/x"),
        ("/elsewhere/x", "/elsewhere/x", "/elsewhere/x"),
        ("{here}-too/x", "{here}-too/x", "{here}-too/x"),
    ],
)
def test_a_path_is_near_in_text_and_absolute_in_json(capsys, path, as_text, as_json):
    here = str(Path.cwd())
    value = Path(path.format(here=here))
    console().result("", {"path": value})
    assert capsys.readouterr().out == f"\n  path  {as_text.format(here=here)}\n"
    console(as_json=True).result("", {"path": value, "all": [value]})
    absolute = as_json.format(here=here)
    assert json.loads(capsys.readouterr().out) == {"path": absolute, "all": [absolute]}


def test_a_mapping_that_a_rank_has_reported_has_the_same_units(capsys):
    console().result("Trained", {"seconds": 3.21, "bytes": 2_000_000})
    assert capsys.readouterr().out == "Trained\n  seconds  3.2 s\n  bytes    2.0 MB\n"


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1536, "1.5 kB"),
        (999_949, "999.9 kB"),
        (999_999, "1.0 MB"),
        (10**9, "1.0 GB"),
        (4_940_000_000, "4.9 GB"),
        (10**12, "1.0 TB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_human_bytes(count, shown):
    assert human_bytes(count) == shown


def test_an_error_is_two_lines_on_stderr(capsys):
    console().error(DataError("reviews.csv has no rows", hint="name another file"))
    shown = capsys.readouterr()
    assert shown.err == "error: reviews.csv has no rows\ntry: name another file\n"
    assert shown.out == ""


def test_an_error_names_the_rank_unless_it_is_the_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    console().error(DataError("what", hint="try this"))
    assert capsys.readouterr().err == "[rank 2] error: what\n[rank 2] try: try this\n"


def test_progress_is_one_plain_line_for_each_note_where_stderr_is_no_terminal(capsys):
    progress = StepProgress()
    for step, note in ((1, ""), (10, "loss 0.5"), (19, ""), (20, "loss 0.25")):
        progress(step, 20, note)
    progress.close()
    shown = capsys.readouterr()
    assert shown.err == "step 10/20  loss 0.5\nstep 20/20  loss 0.25\n"
    assert shown.out == ""


NOISY = """
import os, subprocess, sys
from dstool.console import Console
out = Console()
print("before")
try:
    with out.guard_stdout():
        print("python")
        os.write(1, b"descriptor\\n")
        subprocess.run(["echo", "child"], check=True)
        sys.stdout.write("not flushed")
        if "fail" in sys.argv:
            raise RuntimeError
except RuntimeError:
    out.text("failed")
out.text("after")
"""


def noisy(*arguments, **variables):
    environment = {**os.environ, **variables}
    argv = [sys.executable, "-c", NOISY, *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)


def test_guarded_stdout_is_closed_to_everyone_even_to_children():
    done = noisy()
    assert done.stdout == "before\nafter\n"
    assert done.stderr == ""


def test_guarded_stdout_comes_back_after_an_error():
    assert noisy("fail").stdout == "before\nfailed\nafter\n"


def test_what_is_said_meanwhile_goes_to_stderr_for_debugging():
    done = noisy(DSTOOL_DEBUG="1")
    assert done.stdout == "before\nafter\n"
    assert sorted(done.stderr.split()) == sorted(["python", "descriptor", "child", "not", "flushed"])
