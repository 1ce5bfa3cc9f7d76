"""How a run under the launcher ends when it does not end well: one clear message, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstool.launch import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BIN = Path(sys.executable).parent
UNSAVED = ("train.save_strategy=no", "train.save_first_step=false")
LONG = ("train.max_steps=100000", "train.logging_steps=1", *UNSAVED)


@pytest.fixture
def ready(tmp_path: Path, command: Callable[..., Any]) -> Path:
    """A folder with the sample's run file."""
    command("dstool", "init-config", cwd=tmp_path)
    return tmp_path


@contextmanager
def long_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run by two ranks that has done its first step, and is gone afterwards."""
    run = subprocess.Popen(
        [BIN / "dstool", "train", "--num-gpus", "2", *LONG],
        cwd=folder,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr
    family = []
    try:
        for line in run.stderr:
            if line.startswith("step"):
                break
        else:
            pytest.fail("the run ended before its first step")
        family = psutil.Process(run.pid).children(recursive=True)
        yield run
    finally:
        _, alive = psutil.wait_procs(family, timeout=40)
        for process in alive:
            process.kill()
        run.kill()
        run.wait()
        assert not alive, f"left running: {alive}"


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that train, in the order of their ranks."""
    family = psutil.Process(run.pid).children(recursive=True)
    found = [each for each in family if any("--local_rank" in word for word in each.cmdline())]
    return sorted(found, key=lambda each: each.cmdline()[-1])


def test_a_rank_that_the_kernel_kills_is_explained(ready: Path) -> None:
    with long_run(ready) as run:
        ranks_of(run)[1].kill()
        out, err = run.communicate(timeout=60)
    assert run.returncode == 5
    assert out == ""
    assert err.splitlines()[-2:] == [
        "error: a rank was killed (SIGKILL), which on Linux is most often the kernel out of memory",
        "try: dmesg | grep -i 'killed process'; then a smaller train.per_device_train_batch_size, "
        "or dstool init-config --stage 3 --offload cpu --force",
    ]
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_rank(number: signal.Signals, code: int, ready: Path) -> None:
    with long_run(ready) as run:
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (code, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        ("dstool", "train", "--num-gpus", "2"),
        ("deepspeed", "--num_gpus", "2", "--no_python", "dstool", "train"),
    ],
)
def test_what_every_rank_finds_is_said_once(
    argv: tuple[str, ...], ready: Path, command: Callable[..., Any]
) -> None:
    rows = [f"text {row},{'ab'[row % 2]}" for row in range(20)]
    (ready / "reviews.csv").write_text("\n".join(["text,label", *rows, ",a"]))
    done = command(*argv, "data.train=reviews.csv", cwd=ready, code=3)
    assert done.err.count("reviews.csv:22 has no text") == 1
    assert done.err.count("error: ") == 1
    assert not (ready / "out").exists()


def test_what_every_rank_lacks_is_said_once(ready: Path, command: Callable[..., Any]) -> None:
    launcher = ("deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--no_python")
    done = command(*launcher, "dstool", "train", "train.fp16=true", cwd=ready, code=4)
    assert done.err.count("error: ") == 1
    assert "fp16 needs a GPU" in done.err


def test_L07_a_port_that_is_taken(ready: Path, command: Callable[..., Any]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = command(
            *("deepspeed", "--num_gpus", "2", "--master_port", port, "--no_python", "dstool", "train"),
            cwd=ready,
            code=5,
        )
        assert f"error: port {port} is taken" in done.err
        command("dstool", "train", "train.max_steps=1", *UNSAVED, cwd=ready)


def test_L14_a_lock_that_a_killed_build_left(ready: Path, command: Callable[..., Any]) -> None:
    lock = ready / "extensions/py311_cpu/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    hour_ago = time.time() - 3600
    os.utime(lock, (hour_ago, hour_ago))
    environment = {"TORCH_EXTENSIONS_DIR": str(ready / "extensions")}
    done = command("dstool", "train", cwd=ready, code=4, env=environment)
    assert f"error: {lock} was left by a build that was killed" in done.err
    assert f"try: rm {lock}" in done.err


def test_a_machine_without_a_compiler(ready: Path, command: Callable[..., Any]) -> None:
    environment = {"CXX": str(ready / "none"), "TORCH_EXTENSIONS_DIR": str(ready / "extensions")}
    done = command("dstool", "train", "--num-gpus", "2", cwd=ready, code=4, env=environment)
    assert done.err.splitlines()[-2].startswith("error: DeepSpeed's deepspeed_shm_comm could not be compiled")
    assert "g++" in done.err.splitlines()[-1]
    assert not (ready / "out").exists()


def test_more_ranks_than_cores_are_warned_of_and_a_rank_too_many_for_the_data_is_no_crash(
    ready: Path, command: Callable[..., Any]
) -> None:
    rows = [f"text {row},{'ab'[row % 2]}" for row in range(6)]
    (ready / "few.csv").write_text("\n".join(["text,label", *rows]))
    ranks = (os.cpu_count() or 1) + 1
    words = ("--num-gpus", str(ranks), "data.train=few.csv", *UNSAVED)
    done = command("dstool", "train", *words, "--json", cwd=ready)
    assert f"{ranks} CPU ranks share {ranks - 1} cores" in done.err
    assert done.json()["world_size"] == ranks
