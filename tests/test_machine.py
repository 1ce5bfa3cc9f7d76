"""What is found out about a machine without torch."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dstool import machine

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize("folder", ["/proc", "/proc/x/y", "/sys/x"])
def test_a_folder_of_the_kernel_cannot_be_written_by_anyone(folder):
    assert machine.state(Path(folder)) == "unwritable"


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="another user is needed")
def test_a_folder_below_one_that_may_not_be_searched_cannot_be_written():
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are for their owner alone
        Path(place).chmod(0o644)
        argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c"]
        code = "import sys; from pathlib import Path; from dstool import machine\n"
        code += "print(machine.state(Path(sys.argv[1])))"
        done = subprocess.run(
            [*argv, code, f"{place}/nvme"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        if "No module named 'dstool'" in done.stderr:
            pytest.skip("another user may not read dstool itself")
        assert done.stdout == "unwritable\n", done.stderr


def test_a_package_that_is_not_installed_is_found_without_an_import():
    import importlib.util

    assert machine.look({}).mup is (importlib.util.find_spec("mup") is not None)
