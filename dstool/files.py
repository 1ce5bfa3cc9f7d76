"""Files and folders that appear whole or not at all.

Each is made under a temporary name beside its target, flushed to the disk, and renamed. What a
killed process leaves behind starts with `.tmp-` and is never taken for a result.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dstool.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, replacing a file that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def refuse_existing(*paths: Path, force: bool) -> None:
    """Raise `ConfigError` for the first of `paths` that exists and is not an empty folder."""
    for path in paths:
        if not force and occupied(path):
            raise ConfigError(f"{path} exists", hint="--force overwrites it, or choose another name")


def occupied(path: Path) -> bool:
    """Whether `path` is a file, or a folder with something in it."""
    if path.is_dir():
        return any(not entry.name.startswith(".tmp-") for entry in path.iterdir())
    return path.exists() or path.is_symlink()


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the name `target` when the block ends without an error.

    With `force` an existing `target` is replaced, and only at the end.

    Raises:
        ConfigError: `target` exists, is not empty, and `force` is not given.
    """
    refuse_existing(target, force=force)
    missing = _missing_parents(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{target.name}-", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        _sync_tree(temporary)
        _replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _missing_parents(target: Path) -> list[Path]:
    """The parents of `target` that do not exist yet, innermost first."""
    return [parent for parent in target.parents if not parent.exists()]


def _replace(source: Path, target: Path) -> None:
    if not occupied(target):
        if target.is_dir():
            shutil.rmtree(target)
        source.rename(target)
    else:
        old = Path(tempfile.mkdtemp(prefix=f".tmp-old-{target.name}-", dir=target.parent))
        target.rename(old / target.name)
        try:
            source.rename(target)
        except OSError:
            (old / target.name).rename(target)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def _sync_tree(folder: Path) -> None:
    for directory, _, names in os.walk(folder):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
