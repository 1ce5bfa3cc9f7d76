"""Bytes from checkpoint files into new ones: planned first, then copied in one pass.

Where the type stays, the kernel copies (copy_file_range), and no byte comes into this process. Where it
changes, chunks are read, cast and written. Both run in a few threads, and memory does not grow with the
model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dstool.checkpoint.cast import NUMPY_TYPES, cast, not_finite
from dstool.checkpoint.pickles import ITEM_SIZES, DType
from dstool.checkpoint.reader import Entry, Piece, cut, ends_early, unreadable
from dstool.errors import CheckpointError

SEGMENT = 64 * 2**20
"""Bytes that one task copies."""
CHUNK = 2**20
"""Bytes that are cast at a time: what the cache of a core holds."""
MOST_THREADS = 8
FLUSH_SECONDS = 0.05

Progress = Callable[[int, int], object]
"""Told the bytes that are done, and all of them."""


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: the file, the byte it starts at, and its type there."""

    entry: Entry
    file: Path
    offset: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in its new type."""
        return self.entry.numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class _Task:
    """A range of one tensor, or of several that lie end to end on both sides, for one thread."""

    pieces: tuple[Piece, ...]
    file: Path
    offset: int
    target: Target | None
    """Where the type or the values change: the tensor."""
    nbytes: int
    rows: tuple[int, int] | None = None
    """Those of the tensor, where an adapter changes them."""


def copy(targets: Sequence[Target], progress: Progress | None = None) -> None:
    """Write every tensor to its place, in files that exist.

    Raises:
        CheckpointError: a source ends early, or a finite value is too large for its new type.
        OSError: the system refuses, such as on a full disk.
    """
    tasks = list(_tasks(targets))
    done, whole = 0, sum(task.nbytes for task in tasks)
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with _Files() as files, _flushing(targets, whole), ThreadPoolExecutor(threads) as pool:
        waiting = {pool.submit(_run, task, files): task for task in tasks}
        try:
            while waiting:
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    done += waiting.pop(future).nbytes
                    if progress is not None:
                        progress(done, whole)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _flushing(targets: Sequence[Target], whole: int) -> Iterator[None]:
    """Let the disk write while the copying goes on, so that little is left to flush at its end."""
    done = threading.Event()
    paths = list(dict.fromkeys(target.file for target in targets))

    def flush() -> None:
        while not done.wait(FLUSH_SECONDS):
            for path in paths:
                # what it cannot write here is told to the writer
                with suppress(OSError), path.open("rb") as stream:
                    os.fdatasync(stream.fileno())

    thread = threading.Thread(target=flush, daemon=True)
    if whole > SEGMENT:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


class _Files:
    """Open files by path; threads share their descriptors, as reads and writes name their own place."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._write: dict[Path, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: Any) -> None:
        for descriptor in (*self._read.values(), *self._write.values()):
            os.close(descriptor)

    def source(self, path: Path) -> int:
        try:
            return _opened(self._read, path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error

    def target(self, path: Path) -> int:
        return _opened(self._write, path, os.O_WRONLY)


def _opened(known: dict[Path, int], path: Path, flags: int) -> int:
    if path not in known:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        if known.setdefault(path, descriptor) != descriptor:  # another thread was first
            os.close(descriptor)
    return known[path]


def _tasks(targets: Sequence[Target]) -> Iterator[_Task]:
    """What there is to do, in the order of the sources' bytes as far as the targets follow it."""
    for target in targets:
        entry = target.entry
        if entry.change is not None:
            yield from _changes(target)
        elif target.dtype == entry.dtype and entry.stride is None:
            for start in range(0, entry.nbytes, SEGMENT):
                size = min(SEGMENT, entry.nbytes - start)
                pieces = tuple(cut(entry.pieces, start, size))
                yield _Task(pieces, target.file, target.offset + start, None, size)
        elif entry.stride is not None:
            yield _Task(entry.pieces, target.file, target.offset, target, target.nbytes)
        else:
            yield from _casts(target)


def _casts(target: Target) -> Iterator[_Task]:
    entry = target.entry
    item, wide = ITEM_SIZES[entry.dtype], ITEM_SIZES[target.dtype]
    for start in range(0, entry.numel, SEGMENT // item):
        count = min(SEGMENT // item, entry.numel - start)
        pieces = tuple(cut(entry.pieces, start * item, count * item))
        yield _Task(pieces, target.file, target.offset + start * wide, target, count * wide)


def _changes(target: Target) -> Iterator[_Task]:
    rows, columns = target.entry.shape[0], prod(target.entry.shape[1:])
    item, wide = ITEM_SIZES[target.entry.dtype] * columns, ITEM_SIZES[target.dtype] * columns
    step = max(1, SEGMENT // (4 * columns))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        pieces = tuple(cut(target.entry.pieces, start * item, (stop - start) * item))
        at, size = target.offset + start * wide, (stop - start) * wide
        yield _Task(pieces, target.file, at, target, size, (start, stop))


def _run(task: _Task, files: _Files) -> None:
    descriptor = files.target(task.file)
    if task.rows is not None:
        _change_rows(task, files, descriptor)
    elif task.target is None:
        at = task.offset
        for piece in task.pieces:
            _copy_range(files.source(piece.file), descriptor, piece, at)
            at += piece.length
    elif task.target.entry.stride is not None:
        _write(descriptor, _gathered(task.target, files), task.offset)
    else:
        _cast_range(task, files, descriptor)


def _copy_range(source: int, target: int, piece: Piece, at: int) -> None:
    """Copy within the kernel; through this process where it refuses.

    There may be no such copy between the two file systems; or one of them fails, and it takes a read and a
    write to know which.
    """
    offset, left = piece.offset, piece.length
    while left:
        try:
            copied = os.copy_file_range(source, target, left, offset, at)
        except OSError:
            copied = _write(target, _read(source, offset, min(left, CHUNK), piece.file), at)
        if copied == 0:
            raise ends_early(piece.file)
        offset, at, left = offset + copied, at + copied, left - copied


def _cast_range(task: _Task, files: _Files, descriptor: int) -> None:
    target = task.target
    assert target is not None  # noqa: S101 - only such tasks come here
    source, at = target.entry.dtype, task.offset
    for chunk in _chunks(task.pieces, files):
        made = cast(chunk, source, target.dtype)
        infinite = not_finite(made, target.dtype) if target.dtype != "F32" else 0
        if infinite and infinite > not_finite(chunk, source):
            raise _too_large(target, chunk, source)
        at += _write(descriptor, made.view(np.uint8).data, at)


def _change_rows(task: _Task, files: _Files, descriptor: int) -> None:
    """Some rows of a weight that an adapter changes: all in fp32, and rounded once."""
    target = task.target
    assert target is not None  # noqa: S101 - only such tasks come here
    assert task.rows is not None  # noqa: S101
    assert target.entry.change is not None  # noqa: S101
    (first, last), entry, at = task.rows, target.entry, task.offset
    changed = target.entry.change.changing(lambda part: _matrix(part, files))
    columns = prod(entry.shape[1:])
    row = ITEM_SIZES[entry.dtype] * columns
    step = max(1, CHUNK // columns)
    for start in range(first, last, step):
        stop = min(start + step, last)
        pieces = cut(task.pieces, (start - first) * row, (stop - start) * row)
        base = cast(_joined(pieces, files), entry.dtype, "F32").view(NUMPY_TYPES["F32"])
        values = changed(base.reshape(stop - start, columns), start).reshape(-1)
        made = cast(values, "F32", target.dtype)
        if not_finite(made, target.dtype) > not_finite(values, "F32"):
            raise _too_large(target, values, "F32")
        at += _write(descriptor, made.view(np.uint8).data, at)


def _matrix(entry: Entry, files: _Files) -> Any:
    """A small tensor, whole, in fp32. Shape as it has."""
    values = cast(_joined(entry.pieces, files), entry.dtype, "F32").view(NUMPY_TYPES["F32"])
    return values.reshape(entry.shape)


def _joined(pieces: Iterable[Piece], files: _Files) -> Any:
    parts = [_read(files.source(piece.file), piece.offset, piece.length, piece.file) for piece in pieces]
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts])


def _chunks(pieces: Iterable[Piece], files: _Files) -> Iterator[Any]:
    """The bytes of `pieces` as arrays of bytes, each of which is good until the next is asked for."""
    buffer = np.empty(CHUNK, np.uint8)
    for piece in pieces:
        for start in range(0, piece.length, CHUNK):
            part = buffer[: min(CHUNK, piece.length - start)]
            _read_into(files.source(piece.file), part.data, piece.offset + start, piece.file)
            yield part


def _gathered(target: Target, files: _Files) -> Any:
    """The bytes of a tensor whose elements lie in another order."""
    (piece,) = target.entry.pieces
    raw = np.frombuffer(_read(files.source(piece.file), piece.offset, piece.length, piece.file), np.uint8)
    item = ITEM_SIZES[target.entry.dtype]
    steps = [step * item for step in target.entry.stride or ()] + [1]
    ordered = np.lib.stride_tricks.as_strided(raw, (*target.entry.shape, item), steps)
    flat = np.ascontiguousarray(ordered).reshape(-1)
    if target.dtype == target.entry.dtype:
        return flat.data
    return cast(flat, target.entry.dtype, target.dtype).view(np.uint8).data


def _read(descriptor: int, offset: int, size: int, file: Path) -> Any:
    buffer = np.empty(size, np.uint8)
    _read_into(descriptor, buffer.data, offset, file)
    return buffer.data


def _read_into(descriptor: int, view: memoryview, offset: int, file: Path) -> None:
    at = 0
    while at < len(view):
        try:
            got = os.preadv(descriptor, [view[at:]], offset + at)
        except OSError as error:
            raise unreadable(file, error) from error
        if got == 0:
            raise ends_early(file)
        at += got


def _write(descriptor: int, data: Any, offset: int) -> int:
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(descriptor, view[at:], offset + at)
    return at


def _too_large(target: Target, chunk: Any, source: DType) -> CheckpointError:
    values = cast(chunk, source, "F32").view(NUMPY_TYPES["F32"])
    largest = float(np.abs(values[np.isfinite(values)]).max())
    return CheckpointError(
        f"{target.entry.name} holds {largest:g}, which {_SAID[target.dtype]} cannot",
        hint="--dtype bf16 or --dtype fp32",
    )


_SAID = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
