"""Files that this user may not read: one line, and the command that opens them, which works as printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstool.ds_config.options import Options
from dstool.init_config import generate

AsNobody = Callable[..., subprocess.CompletedProcess[str]]
NOBODY = 65534


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of another user's, with a run file and a JSON; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sub").mkdir()
        for path in (folder / "ds_config.json", folder / "sub" / "ds.json"):
            path.write_text(generate(Options()))
        (folder / "dstool.yaml").write_text("model: {name: m}\ndeepspeed: ds_config.json\n")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        monkeypatch.chdir(folder)
        yield folder


@pytest.mark.parametrize(
    ("shut", "words", "opens"),
    [
        ("dstool.yaml", ["check"], "chmod u+r dstool.yaml"),
        ("dstool.yaml", ["train", "--show-config"], "chmod u+r dstool.yaml"),
        ("dstool.yaml", ["init-config", "--force"], "chmod u+r dstool.yaml"),
        ("dstool.yaml", ["plan"], "chmod u+r dstool.yaml"),
        ("dstool.yaml", ["check", "-c", "dstool.yaml"], "chmod u+r dstool.yaml"),
        ("ds_config.json", ["check"], "chmod u+r ds_config.json"),
        ("ds_config.json", ["check", "ds_config.json"], "chmod u+r ds_config.json"),
        ("ds_config.json", ["train"], "chmod u+r ds_config.json"),
        ("sub", ["check", "sub/ds.json"], "chmod u+x {}/sub"),
    ],
)
def test_what_may_not_be_read_is_said_with_the_command_that_opens_it(
    shut: str, words: list[str], opens: str, place: Path, as_nobody: AsNobody
) -> None:
    Path(shut).chmod(0)
    done = as_nobody(sys.executable, "-m", "dstool", *words)
    *_, first, second = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert first.startswith("error: ")
    assert first.endswith(": this user may not read it")
    assert second == f"try: {opens.format(place)}"
    assert as_nobody(*shlex.split(second.removeprefix("try: "))).returncode == 0
    assert "may not read" not in as_nobody(sys.executable, "-m", "dstool", *words).stderr


def test_a_file_of_another_user_is_opened_by_root(place: Path, as_nobody: AsNobody) -> None:
    os.chown("ds_config.json", 0, 0)
    Path("ds_config.json").chmod(0o600)
    done = as_nobody(sys.executable, "-m", "dstool", "check", "ds_config.json")
    assert done.stderr.splitlines()[-1] == "try: sudo chmod a+r ds_config.json"
