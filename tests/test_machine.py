"""What is found out about a machine without torch."""

import os
import sys
from pathlib import Path

import pytest

from dstool import machine


def tool(folder: Path, answer: str, code: int = 0) -> None:
    """A driver's tool that gives this answer, as there is no GPU to ask."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\nimport sys\nprint({answer!r})\nsys.exit({code})\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "bf16"),
    [
        ("8.0", True),
        ("9.0\n9.0", True),
        ("12.0", True),
        ("7.5", False),
        ("9.0\n7.0", False),
        ("6.1", False),
        ("[N/A]", True),
        ("No devices were found", True),
    ],
)
def test_bf16_is_that_of_the_oldest_gpu(answer, bf16, tmp_path, monkeypatch):
    tool(tmp_path, answer)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.has_bf16() is bf16
    assert machine.look({"bf16": {"enabled": True}}).bf16 is bf16
    assert machine.look({"bf16": {"enabled": False}}).bf16


def test_without_the_tool_nothing_is_said_against_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.has_bf16()


def test_the_installed_deepspeed_is_found_without_an_import():
    from importlib.metadata import version

    assert machine.look({}).deepspeed == version("deepspeed")
