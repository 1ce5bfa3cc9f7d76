"""The DeepSpeed launcher: its argv, the ranks that it starts, and how one of them dies.

What the launcher does, from deepspeed/launcher/runner.py and launch.py, 0.19.8: it gives every rank
RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT; takes the other ranks down when
one fails; looks for no free port; leaves the ranks running when it is ended by SIGTERM; and exits 0
when its inner process was killed. So it gets a port and a session of its own here, and a run counts as
done only when rank 0 has written its result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dstool.errors import (
    ConfigError,
    DstoolError,
    EnvironmentUnfit,
    MissingDependency,
    NoDevice,
    RankFailed,
    RunFailed,
    by_name,
)
from dstool.log import debug, quiet_deepspeed, rank

logger = logging.getLogger("dstool.launch")

RESULT_VARIABLE = "DSTOOL_RESULT"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has it, and shm_open puts it
GRACE_SECONDS = 30.0
LOCK_SETTLES_SECONDS = 60.0
LOCK_STALE_SECONDS = 1800.0


# --- what a rank knows of itself -----------------------------------------------------------------


def world_size() -> int:
    """The number of ranks over all machines; 1 when nothing launched this process."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched() -> bool:
    """Whether a launcher (DeepSpeed's, torchrun's) started this process as a rank."""
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


@contextlib.contextmanager
def rank_environment() -> Iterator[None]:
    """Complete the environment of a rank: of a world of one, where nothing launched this process.

    Without it DeepSpeed looks for MPI and ends in "No module named 'mpi4py'" (comm/comm.py). LOCAL_SIZE
    is what its shared-memory all-reduce on the CPU reads; torchrun leaves it out. At the end a process
    that nothing launched has its own environment back, and what it starts then is no rank.
    """
    lone: dict[str, str] = {}
    if not launched():
        lone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        lone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ.get(name) for name in lone}
    os.environ.update(lone)
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def free_port() -> int:
    """A TCP port on this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accelerators() -> int:
    """How many GPUs (or other accelerators that torch knows) this process can see. Imports torch."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def accelerator() -> str:
    """The kind of device that a run uses here: `cuda`, `xpu`, ..., or `cpu`. Imports torch."""
    import torch

    current = torch.accelerator.current_accelerator() if accelerators() else None
    return current.type if current else "cpu"


def import_deepspeed() -> Any:
    """The deepspeed module, told beforehand when there is no GPU.

    Raises:
        MissingDependency: it cannot be imported here.
    """
    if accelerators() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except (
        Exception
    ) as error:  # a CUDA torch without a CUDA toolkit fails with an exception of DeepSpeed's own
        cuda = "CUDA_HOME" in str(error)
        raise MissingDependency(
            f"deepspeed cannot be imported: {' '.join(str(error).split())[:200]}",
            hint="set CUDA_HOME to the CUDA toolkit, or DS_ACCELERATOR=cpu"
            if cuda
            else "pip install deepspeed",
        ) from error
    quiet_deepspeed()
    return deepspeed


# --- starting the ranks --------------------------------------------------------------------------


def run(command: Sequence[str], *, num_gpus: int | None = None, include: str | None = None) -> dict[str, Any]:
    """Run `dstool COMMAND` in every rank under the DeepSpeed launcher, and return rank 0's result.

    Raises:
        ConfigError, NoDevice: the devices asked for are not there.
        DstoolError: of the class that the first failing rank reported.
        RankFailed: a rank died without a word.
    """
    gpus = accelerators()
    devices = choose_devices(gpus, num_gpus=num_gpus, include=include)
    environment = dict(os.environ) if gpus else {"DS_ACCELERATOR": "cpu", **os.environ}
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dstool-") as folder:
        report = Path(folder, "result.json")
        try:
            argv = launcher_argv(command, devices, port)
            code = _run_in_session(argv, {**environment, RESULT_VARIABLE: str(report)})
        finally:
            free_shared_memory(port)
        return _read_report(report, code)


def launcher_argv(command: Sequence[str], devices: Sequence[str], port: int) -> list[str]:
    """The launcher's argv for `dstool COMMAND`, as a module so that any current folder will do."""
    level = "info" if debug() else "critical"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", f"--log_level={level}", *devices]
    return [*launcher, "--master_port", str(port), "--module", "dstool", *command]


def free_shared_memory(port: int) -> None:
    """Free what the ranks that met at `port` of this machine have left in shared memory.

    DeepSpeed's all-reduce on the CPU takes 69 MB for each rank, under a name with the port, and never
    gives it back (ops/csrc/cpu/comm/shm.cpp, 0.19.8).
    """
    for buffer in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        with contextlib.suppress(OSError):
            buffer.unlink()


def choose_devices(gpus: int, *, num_gpus: int | None, include: str | None) -> list[str]:
    """The launcher's filter for `--num-gpus` or `--include`, given the number of visible GPUs.

    A filter makes the launcher forget CUDA_VISIBLE_DEVICES, so the devices named there are named again.
    """
    if num_gpus is not None and include is not None:
        raise ConfigError("--num-gpus and --include exclude each other", hint="give one of them")
    if num_gpus is not None and num_gpus < 1:
        raise ConfigError(f"--num-gpus {num_gpus} starts nothing", hint="give 1 or more")
    if gpus == 0:
        return _cpu_ranks(num_gpus or 1, include)
    if num_gpus is not None and num_gpus > gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = f"CUDA_VISIBLE_DEVICES={visible} shows {gpus}" if visible else f"this machine has {gpus}"
        raise NoDevice(f"--num-gpus {num_gpus}: {where}", hint=f"--num-gpus {gpus}")
    if include is not None:
        return ["--include", include]
    named = _visible_indices(gpus)[: num_gpus or gpus]
    return ["--include", f"localhost:{','.join(named)}"]


def _cpu_ranks(ranks: int, include: str | None) -> list[str]:
    if include is not None:
        raise NoDevice(f"--include {include}: no GPU is visible here", hint="--num-gpus N starts N CPU ranks")
    cores = os.cpu_count() or 1
    if ranks > cores:
        logger.warning("--num-gpus %d: there is no GPU, and %d CPU ranks share %d cores", ranks, ranks, cores)
    return ["--num_gpus", str(ranks)]


def _visible_indices(gpus: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [part.strip() for part in visible.split(",") if part.strip()] or [str(i) for i in range(gpus)]
    if not all(part.isdecimal() for part in named):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible}: the DeepSpeed launcher takes indices only, no UUIDs",
            hint="nvidia-smi -L shows the index of each; for example CUDA_VISIBLE_DEVICES=0,1",
        )
    return named


def _run_in_session(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the launcher in a session of its own, ended as a whole when this process is told to end."""
    with (
        ends_with_clean_up(),
        subprocess.Popen(
            argv, env=environment, stdout=2, stdin=subprocess.DEVNULL, start_new_session=True
        ) as launcher,
    ):
        try:
            return launcher.wait()
        finally:
            _end_session(launcher)


def _end_session(launcher: subprocess.Popen[bytes]) -> None:
    """Ask whatever is left of the launcher's process group to end, then make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, number)
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline:
                launcher.poll()
                os.killpg(launcher.pid, 0)
                time.sleep(0.1)


@contextlib.contextmanager
def ends_with_clean_up() -> Iterator[None]:
    """Turn SIGTERM, and the SIGHUP of a lost terminal, into an exit that runs the clean-up.

    In a thread other than the main one, which alone may handle signals, nothing changes.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # nohup ignores SIGHUP, and that stays so.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --- what a rank reports -------------------------------------------------------------------------


def reports_to_parent() -> bool:
    """Whether the process that started this rank waits for a result file."""
    return RESULT_VARIABLE in os.environ


def report_result(result: Mapping[str, Any]) -> None:
    """Hand rank 0's result to the process that launched it."""
    if rank() == 0:
        _report({"result": dict(result)})


def report_error(error: DstoolError) -> None:
    """Hand a rank's failure to the process that launched it. The first to report is believed."""
    _report({"error": type(error).__name__, "message": error.message, "hint": error.hint})


def _report(payload: Mapping[str, Any]) -> None:
    path = Path(os.environ[RESULT_VARIABLE])
    draft = path.with_name(f"{path.name}.{rank()}")
    draft.write_text(json.dumps(payload, default=str), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        draft.rename(path) if rank() == 0 and "result" in payload else os.link(draft, path)


def _read_report(path: Path, code: int) -> dict[str, Any]:
    """Rank 0's result, or the failure that was reported, or what the exit code tells."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "error" in report:
        raise by_name(report["error"])(report["message"], hint=report["hint"])
    if "result" in report:
        if code:
            # Seen about once in a dozen runs on the CPU: everything is written, then the interpreter aborts.
            logger.warning("a rank ended with exit code %d after the run was complete", code)
        return dict(report["result"])
    raise _death(code)


def _death(code: int) -> RunFailed:
    killed = {256 - signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGKILL}
    if code in killed:
        return RankFailed(
            "a rank was killed (SIGKILL), which on Linux is most often the kernel out of memory",
            hint="dmesg | grep -i 'killed process'; then a smaller train.per_device_train_batch_size, "
            "or dstool init-config --stage 3 --offload cpu --force",
        )
    if code == 0:
        return RankFailed("the launcher ended without a result", hint="DSTOOL_DEBUG=1 shows what it says")
    return RankFailed(f"a rank ended with exit code {code}{_signal_named(code)}", hint="see above")


def _signal_named(code: int) -> str:
    """Which signal the exit code stands for: -N from Popen, 256-N from `sys.exit(-N)`, 128+N from a shell."""
    number = -code if code < 0 else 256 - code if code > 192 else code - 128
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def lost_peers(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone; what ended that rank is the thing to show."""
    text = str(error)
    return type(error).__name__ == "DistBackendError" or any(
        sign in text
        for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    )


# --- the folder in which torch compiles DeepSpeed's ops --------------------------------------------


def check_build_locks() -> None:
    """Refuse to start where a killed build has left its lock, on which every later run would wait.

    torch builds an op under an empty file called `lock` (torch/utils/cpp_extension.py, FileBaton) and
    never removes one that is not its own.

    Raises:
        EnvironmentUnfit: a lock that no running build holds; names the file.
    """
    folder = _extensions_folder()
    stale = [lock for lock in (*folder.glob("*/lock"), *folder.glob("*/*/lock")) if _is_stale(lock)]
    if stale:
        raise EnvironmentUnfit(
            f"{stale[0]} was left by a build that was killed, and DeepSpeed would wait for it for ever",
            hint=shlex.join(["rm", *map(str, stale)]),
        )


@contextlib.contextmanager
def explained_builds() -> Iterator[None]:
    """Turn what torch raises where an op cannot be compiled into one line with the compiler's own reason.

    Raises:
        MissingDependency: for the rank that compiled, and for those that waited for its result.
    """
    hint = "apt-get install g++ python3-dev (Debian, Ubuntu), or set CXX to a C++ compiler"
    try:
        yield
    except RuntimeError as error:
        failed = re.match(r"Error building extension '(\w+)'", str(error))
        if not failed:
            raise
        reasons = re.findall(r".*(?:error:|not found|No such).*", str(error))
        reason = reasons[0].strip() if reasons else "DSTOOL_DEBUG=1 shows why"
        raise MissingDependency(
            f"DeepSpeed's {failed[1]} could not be compiled: {reason}", hint=hint
        ) from error
    except ImportError as error:
        if str(_extensions_folder()) not in str(error):
            raise
        raise MissingDependency(
            f"another rank could not compile DeepSpeed's {error.name}", hint=hint
        ) from error


def is_built(op: str) -> bool:
    """Whether DeepSpeed's op of that name has been compiled here before, as far as this user may look."""
    try:
        return any(_extensions_folder().rglob(f"{op}.so"))
    except OSError:
        return False


def _extensions_folder() -> Path:
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()


def _is_stale(lock: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        age = time.time() - lock.stat().st_mtime
        if age < LOCK_SETTLES_SECONDS:
            return False
        return age > LOCK_STALE_SECONDS if not Path("/proc/self/cwd").exists() else not _builds(lock.parent)
    return False


def _builds(folder: Path) -> bool:
    """Whether some process works in `folder`, as ninja does while it builds an op there."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.samefile(folder):
                return True
    return False
