"""What a DeepSpeed run needs of this machine, found out without torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dstool import launch
from dstool.ds_config.build import AUTO
from dstool.ds_config.looks import FolderState, Machine

_DEVICES: Final = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel/accel*", "davinci[0-9]*")
AMPERE: Final = 8
_IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs")
_KERNELS: Final = ("/proc", "/sys")  # root has every right in them, and can make no file


def look(ds: Mapping[str, Any]) -> Machine:
    """This machine, with the folders that `ds` offloads to."""
    ops = ("async_io", "cpu_adam")
    folders = {folder: state(Path(folder)) for folder in _nvme_paths(ds)}
    built = frozenset(op for op in ops if launch.is_built(op))
    return Machine(
        gpu=has_gpu(),
        bf16=_asks_for_bf16(ds) is False or has_bf16(),
        compiler=has_compiler(),
        libaio=has_libaio(),
        built=built,
        folders=folders,
        deepspeed=_version("deepspeed"),
        mup=importlib.util.find_spec("mup") is not None,
    )


def _asks_for_bf16(ds: Mapping[str, Any]) -> bool:
    block = ds.get("bf16")
    return isinstance(block, dict) and block.get("enabled") in (True, AUTO)


def _version(package: str) -> str:
    """The version that is installed, found without an import; empty where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def has_gpu() -> bool:
    """Whether there is a device that torch may train on; a device file says so."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    return any(True for pattern in _DEVICES for _ in Path("/dev").glob(pattern))


def has_bf16() -> bool:
    """Whether no GPU here is one of those that compute bf16 by emulation: NVIDIA's before Ampere (8.0).

    The driver's own tool says it, in the time in which torch would not even be imported.
    """
    if shutil.which("nvidia-smi") is None:
        return True
    argv = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    versions = re.findall(r"^(\d+)\.\d+$", done.stdout, re.MULTILINE)
    return all(int(major) >= AMPERE for major in versions)


def gpu_memories() -> list[int]:
    """Bytes of memory of each GPU here. Imports torch where there is a device to ask."""
    if not has_gpu():
        return []
    import torch

    return [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]


def host_memory() -> int:
    """Bytes of memory that this machine has, or its container may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole


def has_compiler() -> bool:
    """Whether the C++ compiler is there that torch builds DeepSpeed's ops with."""
    return shutil.which(os.environ.get("CXX") or "c++") is not None


def has_libaio() -> bool:
    """Whether libaio's header lies where a compiler looks."""
    given = [os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH")]
    named = [folder for each in given for folder in each.split(os.pathsep) if folder]
    usual = ["/usr/include", "/usr/local/include", f"{sys.prefix}/include"]
    return any(Path(folder, "libaio.h").is_file() for folder in (*named, *usual))


def state(folder: Path) -> FolderState:
    """Whether `folder` can be written to, or made, and is not in memory."""
    try:
        path = folder.expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            return "no folder"
        of_kernel = any(there.resolve().is_relative_to(each) for each in _KERNELS)
        if of_kernel or not os.access(there, os.W_OK | os.X_OK):
            return "unwritable"
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        return "in memory" if _type_of(there.resolve(), mounts) in _IN_MEMORY else "fine"
    except PermissionError:  # a folder above it that may not be searched
        return "unwritable"
    except (OSError, ValueError, RuntimeError):  # no /proc; a name that no folder can have
        return "fine" if "\0" not in str(folder) else "no folder"


def _type_of(path: Path, mounts: Iterable[str]) -> str:
    """The file system of `path`: that of the longest mount point above it."""
    found, depth = "", -1
    for line in mounts:
        _, point, kind, *_ = line.split(" ")
        mount = Path(point.replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= depth:
            found, depth = kind, len(mount.parts)
    return found


def _nvme_paths(ds: Mapping[str, Any]) -> set[str]:
    zero = ds.get("zero_optimization")
    blocks = (
        [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    )
    paths = [block.get("nvme_path") for block in blocks if isinstance(block, dict)]
    return {path for path in paths if isinstance(path, str)}
