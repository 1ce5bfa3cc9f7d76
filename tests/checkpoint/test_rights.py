"""Checkpoints, files in them and targets that this user may not see: one line, and what opens them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from by_hand import Model, save

AsNobody = Callable[..., subprocess.CompletedProcess[str]]
TAG = "out/checkpoint-7/global_step7"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of another user's with a run in it; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = save(folder / "out" / "checkpoint-7", Model([{"w": torch.randn(4, 4)}]), 2, 2)
        (root / "tokenizer.json").write_text("{}")
        (folder / "closed").mkdir()
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
        monkeypatch.chdir(folder)
        yield folder


@pytest.mark.parametrize(
    ("shut", "words"),
    [
        *(("out", words) for words in ("inspect", "inspect checkpoint-7", "consolidate", "merge -o w")),
        *(
            ("out/checkpoint-7", words)
            for words in ("inspect checkpoint-7", f"inspect {TAG}", "consolidate checkpoint-7", "merge -o w")
        ),
        *((TAG, words) for words in ("inspect checkpoint-7", f"inspect {TAG}", f"consolidate {TAG} -o w")),
        ("out/checkpoint-7/latest", "consolidate checkpoint-7"),
        (f"{TAG}/mp_rank_00_model_states.pt", "consolidate checkpoint-7"),
        (f"{TAG}/mp_rank_00_model_states.pt", "inspect checkpoint-7"),
        ("out/checkpoint-7/tokenizer.json", "consolidate checkpoint-7"),
        ("closed", "consolidate checkpoint-7 -o closed/w"),
        ("closed", "merge -o closed/w"),
    ],
)
def test_what_may_not_be_seen_is_said_with_what_opens_it(
    shut: str, words: str, place: Path, as_nobody: AsNobody
) -> None:
    Path(shut).chmod(0)
    done = as_nobody(sys.executable, "-m", "dstool", *words.split())
    said = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
    assert done.returncode in (2, 3), said
    assert "Traceback" not in done.stderr
    assert any("this user may not read it" in line for line in said)
    hint = next(line for line in said if line.startswith(("try: ", "next ")))
    command = shlex.split(hint.removeprefix("try: ").removeprefix("next "))
    assert command[0] == "chmod"
    assert Path(command[-1]).resolve() == (place / shut).resolve()
    assert as_nobody(*command).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        "inspect {long}",
        "consolidate {long}",
        "merge --input-dir {long} -o w",
        "consolidate out/checkpoint-7 -o {long}",
        "consolidate out/checkpoint-7 -o {fits}",
        "inspect loop",
        "merge --input-dir loop -o w",
        "consolidate out/checkpoint-7 -o loop",
        "merge --input-dir out/checkpoint-7 -o loop/w",
    ],
)
def test_names_that_lead_nowhere_are_one_line(
    words: str, place: Path, command: Callable[..., object]
) -> None:
    Path("loop").symlink_to("pool")
    Path("pool").symlink_to("loop")
    given = words.format(long="a" * 300, fits="a" * 250).split()
    done = subprocess.run(
        [sys.executable, "-m", "dstool", *given], capture_output=True, text=True, check=False
    )
    assert done.returncode in (2, 3), done.stderr
    _, hint = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "try: "))]
    assert "df -h" not in hint
    assert "Traceback" not in done.stderr
    assert not list(place.glob(".tmp-*"))


def test_a_name_like_an_option_is_typed_as_a_path(place: Path, as_nobody: AsNobody) -> None:
    Path("out/checkpoint-7").rename("-c7")
    done = as_nobody(sys.executable, "-m", "dstool", "inspect", "./-c7")
    following = done.stdout.splitlines()[-1].strip().removeprefix("next").strip()
    assert following == "dstool consolidate ./-c7"
