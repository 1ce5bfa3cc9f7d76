"""Real ZeRO checkpoints, made once per session by two ranks, and copies of them to break."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from altered import JOBS

from dstool.launch import free_port

WORKER = Path(__file__).with_name("make_checkpoint.py")


def run_ranks(folder: Path, jobs: tuple[str, ...], timeout: float | None, *, ranks: int = 2) -> None:
    """Run the worker in so many ranks; on a timeout end its process group."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    argv = [*launcher, "--master_port", str(free_port()), str(WORKER), str(folder), *jobs]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    log = folder / "log.txt"
    with log.open("wb") as output:
        ranks = subprocess.Popen(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ranks.wait(timeout)
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGKILL)
                ranks.wait()
    made = all(any((folder / job).glob("live-*.pt")) for job in jobs)
    assert made, log.read_text(errors="replace")[-6000:]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one folder per job: checkpoint-2 (z2_bf16 and z3_bf16 also -4) and live-2.pt."""
    folder = tmp_path_factory.mktemp("zero")
    run_ranks(folder, JOBS, timeout=300)
    return folder


@pytest.fixture(scope="session")
def made_by_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`made`, by three ranks: no size of `Odd` divides by three."""
    folder = tmp_path_factory.mktemp("three")
    run_ranks(folder, ("z1_bf16_frozen", "z2_fp32", "z3_groups", "z3_bf16_frozen"), timeout=300, ranks=3)
    return folder


@pytest.fixture(scope="session")
def made_on_nvme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job `z3_nvme`. The first use compiles async_io and cpu_adam, which must not be interrupted."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("async_io cannot be built here (Debian: libaio-dev)")
    folder = tmp_path_factory.mktemp("nvme")
    run_ranks(folder, ("z3_nvme",), timeout=None)
    return folder


@pytest.fixture
def copy_of(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a job's folder, to break."""
    return lambda job: Path(shutil.copytree(made / job, tmp_path / job))
