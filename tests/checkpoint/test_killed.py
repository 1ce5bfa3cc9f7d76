"""A consolidate or merge that is ended at any moment leaves nothing half-written under the final name."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import hand_made
from by_hand import Model, save
from safetensors.torch import load_file

import dstool
from dstool.consolidate import consolidate
from dstool.errors import EnvironmentUnfit
from dstool.merge import merge

ROOT = Path(dstool.__file__).parents[1]
COMMAND = [sys.executable, "-m", "dstool", "consolidate"]


def start(checkpoint: Path, target: Path, *more: str) -> subprocess.Popen[Any]:
    """The command in a process of its own, and in a session of its own."""
    argv = [*COMMAND, str(checkpoint), "-o", str(target), *more]
    return subprocess.Popen(
        argv, cwd=target.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def mount(folder: Path, size: str) -> None:
    """A disk in memory of that size."""
    argv = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(argv, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint of 120 MB of fp32, by three ranks, and its weight."""
    weight = torch.randn(30_000_000, generator=torch.Generator().manual_seed(3)).view(-1, 1000)
    folder = tmp_path_factory.mktemp("large") / "체크 포인트-7"
    return hand_made(folder, weight, ranks=3), weight


def test_it_is_whole_or_not_there_after_kill_9_at_any_moment(
    large: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    checkpoint, weight = large
    moments, finished = random.Random(11), 0
    for _ in range(12):
        target = tmp_path / "out"
        process = start(checkpoint, target, "--force", "--dtype", "bf16")
        time.sleep(moments.uniform(0.1, 0.9))
        process.kill()
        process.communicate()
        if target.exists():
            finished += 1
            assert torch.equal(load_file(target / "model.safetensors")["w"], weight.bfloat16())
    process = start(checkpoint, tmp_path / "out", "--force")
    assert process.wait() == 0, process.communicate()[1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "what the killed ones left is gone"
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], weight)


def ends_clean(process: subprocess.Popen[bytes], number: int, code: int, folder: Path) -> None:
    """Send the signal once `process` writes into `folder`: it ends with `code`, and nothing is left there."""
    deadline = time.monotonic() + 60
    while not list(folder.glob(".tmp-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    if process.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert process.returncode == code, errors
    assert b"Traceback" not in errors
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_nothing_behind(
    number: int, code: int, large: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    process = start(large[0], tmp_path / "out", "--dtype", "fp16")
    ends_clean(process, number, code, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.parametrize("size", ["60m", "110m"])
def test_a_full_disk_is_one_line_and_nothing_is_left(
    size: str, large: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mount(disk, size)
    try:
        process = start(large[0], disk / "out")
        _, errors = process.communicate()
        assert process.returncode == EnvironmentUnfit.exit_code, errors
        said = [line for line in errors.decode().splitlines() if line.startswith("error: ")]
        assert len(said) == 1
        assert "MB free" in said[0]
        assert "Traceback" not in errors.decode()
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_another_file_system_gets_the_same(large: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    disk = tmp_path / "other"
    disk.mkdir()
    mount(disk, "300m")
    try:
        assert start(large[0], disk / "out", "--verify").wait() == 0
        assert torch.equal(load_file(disk / "out/model.safetensors")["w"], large[1])
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_memory_does_not_grow_with_the_model(large: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """120 MB of weights, of which a process that held them would show at least as much."""
    for dtype in ("fp32", "bf16"):
        process, peak = start(large[0], tmp_path / dtype, "--dtype", dtype), 0
        while process.poll() is None:
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)
        assert process.returncode == 0
        assert 10e6 < peak < 100e6


def test_a_copy_that_fails_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """The bar has been shown when the last number turns out to be too large for fp16."""
    weight = torch.zeros(8_000_000)
    weight[-1] = 1e30
    root = save(tmp_path / "checkpoint-7", Model([{"small": torch.ones(3), "w": weight}]), 2, 1)
    mine, its = os.openpty()
    argv = [*COMMAND, str(root), "-o", str(tmp_path / "out"), "--dtype", "fp16"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=its, stderr=its) as process:
        os.close(its)
        shown = b""
        with contextlib.suppress(OSError):  # as Linux says that nobody writes any more
            while part := os.read(mine, 4096):
                shown += part
    os.close(mine)
    assert process.returncode == 3
    assert b"w holds 1e+30, which float16 cannot" in shown
    hidden, back = shown.rfind(b"\x1b[?25l"), shown.rfind(b"\x1b[?25h")
    assert 0 <= hidden < back < shown.index(b"error: "), "the cursor is there again before the error"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    disk = tmp_path / "작은 disk"
    disk.mkdir()
    mount(disk, "1m")
    yield disk
    subprocess.run(["umount", str(disk)], check=False)


def leave(disk: Path, pages: int) -> None:
    """Fill the disk until so many pages of 4 kB are left."""
    with (disk / "other").open("ab") as file:
        left = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - pages * 4096
        file.write(bytes(max(0, left)))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("more", ["config", "index", "manifest"])
def test_a_disk_that_is_full_after_the_weights(
    more: str, form: Any, small_disk: Path, tmp_path: Path
) -> None:
    """Room for the numbers, and for less and less of what comes besides."""
    model = Model([{f"w{n}": torch.ones(25, 1024) for n in range(4)}])
    root = save(tmp_path / "checkpoint-7", model, stage=2, ranks=1)
    if more == "config":
        (root / "config.json").write_text("{}")
        (root / "tokenizer.json").write_text('"' + "x" * 9000 + '"')
    options: dict[str, Any] = {"verify": more == "manifest", "file_format": form}
    options["max_shard_size"] = "210KB" if more == "index" else "5GB"
    ends = []
    for spare in range(12, -1, -1):
        leave(small_disk, 100 + spare)
        try:
            consolidate(root, small_disk / "a/out", **options)
            shutil.rmtree(small_disk / "a")
            ends.append("done")
        except EnvironmentUnfit as error:
            assert error.hint == f"df -h '{small_disk}' shows the space there"
            ends.append("full")
        assert [each.name for each in small_disk.iterdir()] == ["other"]
    assert ends == sorted(ends)
    assert set(ends) == {"done", "full"}


def test_a_disk_that_is_full_is_one_line_with_deepspeeds_functions_too(
    small_disk: Path, tmp_path: Path
) -> None:
    root = hand_made(tmp_path / "checkpoint-7", torch.ones(200_000), ranks=2)
    with pytest.raises(EnvironmentUnfit):
        consolidate(root, small_disk / "out", engine="deepspeed")
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_nothing_of_a_merge_behind(
    number: int, code: int, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny("llama", hidden_size=512, intermediate_size=10_000)  # 120 MB
    argv = [sys.executable, "-m", "dstool", "merge", "--input-dir", str(source), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(
        argv, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    ends_clean(process, number, code, tmp_path)


def test_a_disk_that_is_full_at_any_moment_of_a_merge(tiny: Callable[..., Path], small_disk: Path) -> None:
    """Room for all, for what comes before the weights, and for less and less of that."""
    source = tiny("llama")
    needed = sum(file.stat().st_size for file in source.iterdir()) // 4096
    ends = []
    for pages in (needed + 8, needed, *range(12, -1, -3)):
        leave(small_disk, pages)
        try:
            merge(source, small_disk / "a/out")
            shutil.rmtree(small_disk / "a")
            ends.append("done")
        except EnvironmentUnfit as error:
            ends.append("late" if error.hint == f"df -h '{small_disk}' shows the space there" else "early")
        assert [each.name for each in small_disk.iterdir()] == ["other"]
    assert ends == sorted(ends, key=["done", "early", "late"].index)
    assert set(ends) == {"done", "early", "late"}


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="another user is needed")
@pytest.mark.parametrize("what", ["global_step7", "global_step7/mp_rank_00_model_states.pt", "latest", "."])
def test_what_may_not_be_read_is_one_line(what: str) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are for their owner alone
        Path(place).chmod(0o755)
        root = hand_made(Path(place) / "checkpoint-7", torch.ones(6), ranks=1)
        (root / what).chmod(0)
        code = (
            "import sys; from pathlib import Path; from dstool.checkpoint.layout import find\n"
            "from dstool.errors import CheckpointError\n"
            "try: find(Path(sys.argv[1]))\n"
            "except CheckpointError as error: print(error.message, error.hint, sep='\\n')"
        )
        argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", code]
        done = subprocess.run([*argv, str(root)], capture_output=True, text=True, check=False, cwd=ROOT)
        if "dstool" in done.stderr and "PermissionError" not in done.stderr.replace(str(root), ""):
            pytest.skip("another user may not read dstool itself")
        assert done.returncode == 0, done.stderr
        assert str(root) in done.stdout
        assert len(done.stdout.splitlines()) == 2
