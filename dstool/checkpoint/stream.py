"""Bytes from checkpoint files into new ones: planned first, then copied in one pass.

Chunks that the cache of a core holds are read, cast where the type changes, and written, in a few threads;
memory does not grow with the model. The kernel's own copy (copy_file_range) takes half as long again on ext4
(Linux 6.18), and its pages longer to reach the disk: it goes by 64 KB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dstool.checkpoint.cast import NUMPY_TYPES, cast, not_finite
from dstool.checkpoint.pickles import ITEM_SIZES, DType
from dstool.checkpoint.reader import Change, Entry, Piece, cut, ends_early, unreadable
from dstool.errors import CheckpointError

SEGMENT = 64 * 2**20
"""Bytes that one task copies."""
CHUNK = 2**20
"""Bytes that are cast at a time: what the cache of a core holds."""
MOST_THREADS = 8

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

    @property
    def columns(self) -> int:
        """The elements of a row, whatever the number of dimensions."""
        return prod(self.entry.shape[1:])


class _Task(Protocol):
    """A range of a new file, for one thread."""

    @property
    def nbytes(self) -> int:
        """The bytes that it writes."""

    def run(self, files: _Files) -> None:
        """Write them."""


def copy(targets: Sequence[Target], progress: Progress | None = None) -> None:
    """Write every tensor to its place, in files that exist.

    Raises:
        CheckpointError: a source ends early, or a finite value is too large for its new type.
        OSError: the system refuses, such as on a full disk.
    """
    tasks = list(_tasks(targets))
    done, whole = 0, sum(task.nbytes for task in tasks)
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with _Files() as files, ThreadPoolExecutor(threads) as pool:
        waiting = {pool.submit(task.run, files): task for task in tasks}
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
    """What there is to do, in the order of the targets' bytes."""
    for target in targets:
        if target.entry.change is not None:
            yield from _changes(target, target.entry.change)
        elif target.entry.stride is not None:
            yield _Reorder(target)
        else:
            yield from _ranges(target)


# --- the values as they are, in any type -------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """A range of a tensor, in its new type."""

    target: Target
    pieces: tuple[Piece, ...]
    offset: int
    nbytes: int

    def run(self, files: _Files) -> None:
        descriptor, at = files.target(self.target.file), self.offset
        for chunk in _chunks(self.pieces, files):
            made = _checked_cast(chunk, self.target.entry.dtype, self.target)
            at += _write(descriptor, made.view(np.uint8).data, at)


def _ranges(target: Target) -> Iterator[_Range]:
    item, wide = ITEM_SIZES[target.entry.dtype], ITEM_SIZES[target.dtype]
    for start in range(0, target.entry.numel, SEGMENT // item):
        count = min(SEGMENT // item, target.entry.numel - start)
        pieces = tuple(cut(target.entry.pieces, start * item, count * item))
        yield _Range(target, pieces, target.offset + start * wide, count * wide)


def _checked_cast(values: Any, source: DType, target: Target) -> Any:
    """The elements in the type of `target`; refuses finite ones that are too large for it."""
    if source == target.dtype:
        return values
    made = cast(values, source, target.dtype)
    infinite = not_finite(made, target.dtype) if target.dtype != "F32" else 0
    if infinite and infinite > not_finite(values, source):
        raise _too_large(target, values, source)
    return made


@dataclass(frozen=True)
class _Reorder:
    """A tensor whose elements lie in another order; a whole one, as these are small."""

    target: Target

    @property
    def nbytes(self) -> int:
        return self.target.nbytes

    def run(self, files: _Files) -> None:
        made = _checked_cast(_in_order(self.target.entry, files), self.target.entry.dtype, self.target)
        _write(files.target(self.target.file), made.view(np.uint8).data, self.target.offset)


def _in_order(entry: Entry, files: _Files) -> Any:
    """The bytes of a tensor that has strides, in the order of its elements."""
    raw, item = _joined(entry.pieces, files), ITEM_SIZES[entry.dtype]
    steps = [step * item for step in entry.stride or ()] + [1]
    ordered = np.lib.stride_tricks.as_strided(raw, (*entry.shape, item), steps)
    return np.ascontiguousarray(ordered).reshape(-1)


# --- other values ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ChangedRows:
    """Some rows of a weight that an adapter changes: all in fp32, and rounded once."""

    target: Target
    change: Change
    rows: range

    @property
    def nbytes(self) -> int:
        return len(self.rows) * self.target.columns * ITEM_SIZES[self.target.dtype]

    def run(self, files: _Files) -> None:
        target, descriptor = self.target, files.target(self.target.file)
        changed = self.change.changing(lambda part: _matrix(part, files))
        at = target.offset + self.rows.start * target.columns * ITEM_SIZES[target.dtype]
        for start in self.rows[:: _rows_of(target, CHUNK)]:
            stop = min(start + _rows_of(target, CHUNK), self.rows.stop)
            base = _rows(target.entry, start, stop, files)
            made = _checked_cast(changed(base, start).reshape(-1), "F32", target)
            at += _write(descriptor, made.view(np.uint8).data, at)


def _changes(target: Target, change: Change) -> Iterator[_ChangedRows]:
    rows, step = target.entry.shape[0], _rows_of(target, SEGMENT // ITEM_SIZES["F32"])
    for start in range(0, rows, step):
        yield _ChangedRows(target, change, range(start, min(start + step, rows)))


def _rows_of(target: Target, elements: int) -> int:
    """How many rows have about so many elements; all, where they do not lie in order."""
    return max(1, elements // target.columns) if target.entry.stride is None else target.entry.shape[0]


def _rows(entry: Entry, start: int, stop: int, files: _Files) -> Any:
    """Some rows in fp32. Shape [stop - start, columns]."""
    row = entry.nbytes // entry.shape[0]
    if entry.stride is None:
        raw = _joined(cut(entry.pieces, start * row, (stop - start) * row), files)
    else:
        raw = _in_order(entry, files)[start * row : stop * row]
    return cast(raw, entry.dtype, "F32").view(NUMPY_TYPES["F32"]).reshape(stop - start, -1)


def _matrix(entry: Entry, files: _Files) -> Any:
    """A small tensor, whole, in fp32. Shape as it has."""
    raw = _joined(entry.pieces, files) if entry.stride is None else _in_order(entry, files)
    return cast(raw, entry.dtype, "F32").view(NUMPY_TYPES["F32"]).reshape(entry.shape)


# --- reading and writing -----------------------------------------------------------------------------------


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
