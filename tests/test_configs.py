"""configs/: each file is what the command in its README writes, byte for byte."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstool.cli import app
from dstool.ds_config.presets import PRESETS

CONFIGS = Path(__file__).parents[1] / "configs"
COMMANDS = re.findall(r"\[(\S+\.json)\].*`(dstool init-config [^`]+)`", (CONFIGS / "README.md").read_text())


def test_every_preset_has_its_file_and_its_line():
    files = sorted(path.name for path in CONFIGS.glob("*.json"))
    assert files == sorted(f"{name}.json" for name in PRESETS)
    assert sorted(name for name, _ in COMMANDS) == files


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_the_command_writes_the_file(name, line, here):
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    assert (here / name).read_bytes() == (CONFIGS / name).read_bytes()
    assert (here / "dstool.yaml").is_file()
