"""Files and folders that appear whole or not at all.

Each is made under a temporary name beside its target, flushed to the disk, and renamed. What a
killed process leaves behind starts with `.tmp-` and is never taken for a result; the next that makes the
same takes it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shlex
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

from dstool.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, replacing a file that is there; its rights, and a link to it, stay.

    Raises:
        ConfigError: the system does not let `path` be written.
    """
    data = text.encode("utf-8")
    path = path.resolve() if path.is_symlink() else path
    with _parents_of(path), _refusals_named(path):
        handle, name = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def text_of(path: Path, kind: str) -> str:
    """The text (UTF-8) of the `kind` of file at `path`, its byte-order mark included.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: there is no file at `path`.
        ConfigError: it may not be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise
    except PermissionError:
        raise ConfigError(f"{path}: this user may not read it", hint=_opened(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint=f"name another {kind}") from None
    except ValueError as error:  # also a name that no file can have
        where = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(f"{path}: not UTF-8 text ({where})", hint=f"save {path.name} as UTF-8") from None


def refusal(error: OSError, path: Path | None = None) -> tuple[str, str] | None:
    """What the system does not let this user see, and what to type; None where that is another matter.

    Args:
        path: what was looked for, where the error itself does not say.
    """
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    if place is None:
        return None
    if isinstance(error, PermissionError):
        return f"{place}: this user may not read it", _opened(place)
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"{str(place)[:100]}: {error.strerror}", "name another path"
    return None


def _opened(path: Path) -> str:
    """What lets this user read `path`: the first on the way to it that is closed is opened."""
    for part in (*reversed(path.absolute().parents), path):
        folder = part != path or path.is_dir()
        if not os.access(part, os.X_OK if folder else os.R_OK):
            own = part.stat().st_uid == os.geteuid()
            return f"{'chmod u' if own else 'sudo chmod a'}+{'x' if folder else 'r'} {typed(part)}"
    return f"ls -l {typed(path)} shows its rights"


def refuse_existing(*paths: Path, force: bool) -> None:
    """Raise `ConfigError` for the first of `paths` that exists and is not an empty folder."""
    for path in paths:
        if not force and occupied(path):
            raise ConfigError(f"{path} exists", hint="--force overwrites it, or choose another name")


def refuse_replacing(target: Path, ours: Collection[str], *, force: bool) -> None:
    """Raise `ConfigError` unless `target` is free, or `force` is given and it looks like what we write.

    That is a folder of files alone, each of a name that fits one of the glob patterns in `ours`. Anything
    else in it (the checkpoints of a run, somebody's notes) would be gone for good.
    """
    if target.is_dir():
        refuse_existing(target, force=force)
    if target.is_dir() and Path.cwd().is_relative_to(target.resolve()):
        raise ConfigError(
            f"{target} is the current folder, or holds it: it cannot be replaced",
            hint="name a new folder",
        )
    foreign = _foreign(target, ours) if target.is_dir() else target if occupied(target) else None
    if foreign is not None:
        raise ConfigError(
            f"{foreign} is nothing that dstool wrote with a model, and --force would remove it",
            hint="choose another name, or remove it yourself",
        )


def _foreign(folder: Path, ours: Collection[str]) -> Path | None:
    """The first entry of `folder` that is none of `ours`."""
    for entry in sorted(folder.iterdir()):
        known = any(fnmatch(entry.name, pattern) for pattern in ours) and entry.is_file()
        if not known and not entry.name.startswith(".tmp-"):
            return entry
    return None


def refuse_unwritable(path: Path) -> None:
    """Raise `ConfigError` where nothing called `path` can be made, or an existing folder not be filled.

    A folder is really made, and removed again: where nothing can be (/proc, a read-only disk), the
    permissions may say otherwise.
    """
    with _refusals_named(path):
        place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        try:
            Path(tempfile.mkdtemp(prefix=".tmp-", dir=place)).rmdir()
        except PermissionError as error:
            raise ConfigError(
                f"{path} cannot be written: no permission in {place}", hint="choose another name"
            ) from error


def in_run(path: Path, run_dir: Path) -> Path:
    """`path`, or where that is not here the same name in the run's folder.

    A checkpoint that is in neither is one of the run's too: what is said then names those that are there.
    """
    below = run_dir / path
    if path.exists() or path.is_absolute():
        return path
    ours = re.fullmatch(r"checkpoint-\d+", path.parts[0]) if path.parts else None
    return below if below.exists() or (ours and run_dir.is_dir()) else path


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
        ConfigError: `target` exists, is not empty, and `force` is not given; or no folder can be made there.
    """
    if target.is_dir():
        target = target.resolve()  # what a link points at is filled or replaced, not the link
    _clear_orphans(target)
    refuse_existing(target, force=force)
    unique = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = target.with_name(f".tmp-{target.name}-{unique}")
    with _parents_of(target):
        try:
            with _refusals_named(target):
                temporary.mkdir(mode=0o700)  # here, as a signal may come at any moment
            with _locked(temporary):
                yield temporary
            _settle(temporary)
            refuse_existing(target, force=force)  # another process may have been sooner
            _replace(temporary, target)
        except BaseException:
            _remove(temporary)
            raise


def _clear_orphans(target: Path) -> None:
    """Take away what killed processes of this machine left of `target`, which may be gigabytes.

    What one of them had moved out of the way comes back, where nothing has taken its place.
    """
    prefix = f".tmp-{target.name}-{socket.gethostname()}-"
    for path in target.parent.glob(f"{glob.escape(prefix)}*"):
        number = path.name.removeprefix(prefix).partition("-")[0]
        if not number.isdecimal() or _is_alive(int(number)) or _is_locked(path):
            continue
        if path.suffix == _OLD and not target.exists():
            with contextlib.suppress(OSError):
                path.rename(target)
        else:
            _remove(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`, which the kernel lets go when this process ends, in whatever way.

    Its number alone does not tell: containers that share a host's name have numbers of their own.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def _parents_of(target: Path) -> Iterator[None]:
    """Make the folders above `target`; those that were missing go again when the block fails."""
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        with _refusals_named(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def _refusals_named(target: Path) -> Iterator[None]:
    """Turn what the system refuses in the block into a `ConfigError` about `target`."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"{target} cannot be written: {error.filename} is no folder", hint="choose another name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}", hint="choose another name"
        ) from error


_OLD = ".old"
"""Follows the temporary name, for what had the target's name."""


def _replace(source: Path, target: Path) -> None:
    """Give `source` the name of `target`, and remove what had it."""
    if target.is_dir() and not occupied(target):
        shutil.rmtree(target)
    if not occupied(target):
        source.rename(target)
    elif _exchange(source, target):
        _remove(source)
    else:
        old = source.with_name(source.name + _OLD)
        target.rename(old)
        try:
            source.rename(target)
        except OSError:
            old.rename(target)
            raise
        _remove(old)
    _sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names at one moment; False where the system (Linux, glibc 2.28) or the file system cannot."""
    import ctypes

    at_cwd, rename_exchange = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and call(at_cwd, names[0], at_cwd, names[1], rename_exchange) == 0


def _remove(path: Path) -> None:
    """Remove a folder, file or link, as far as the system lets it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def open_to_umask(*paths: Path) -> None:
    """Give the files among `paths` the permissions that the umask gives.

    safetensors (0.8) makes its own for the owner alone.
    """
    mask = _umask()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # of a checkpoint that has been rotated away meanwhile
            _chmod(path, 0o666 & ~mask)


def option(name: str, value: object = True) -> str:
    """An option as one types it: `seq_len` with 512 is `--seq-len 512`; one that is True has no value."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {typed(str(value))}"


def typed(path: Path | str) -> str:
    """`path` as one types it in a shell: in quotes where it has spaces, or letters beyond ASCII.

    A file name that looks like an option gets the folder that it is in.
    """
    like_option = isinstance(path, Path) and str(path).startswith("-")
    return shlex.quote(f"./{path}" if like_option else str(path))


def _settle(folder: Path) -> None:
    """Flush the whole of `folder` to the disk, with the permissions that the umask gives.

    `mkdtemp` and safetensors (0.8) make theirs for the owner alone.
    """
    mask = _umask()
    for directory, _, names in os.walk(folder):
        for name in names:
            _chmod(Path(directory, name), 0o666 & ~mask)
            _sync(Path(directory, name))
        _chmod(Path(directory), 0o777 & ~mask)
        _sync(Path(directory))


def _chmod(path: Path, mode: int) -> None:
    """Set the permissions, where the file system has any: some network and USB disks refuse."""
    with contextlib.suppress(PermissionError, NotImplementedError):
        path.chmod(mode)


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
