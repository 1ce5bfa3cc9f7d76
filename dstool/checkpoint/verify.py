"""Proof that the weights which were written are those of the checkpoint, and a manifest of the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstool import __version__
from dstool.checkpoint import layout, pickles, reader
from dstool.checkpoint.cast import cast, not_finite
from dstool.checkpoint.layout import ZeroCheckpoint
from dstool.checkpoint.pickles import ITEM_SIZES, DType, TensorRef
from dstool.checkpoint.reader import Entry, Weights, cut
from dstool.checkpoint.writer import Written, stored_dtype
from dstool.errors import CheckpointError

MANIFEST = "manifest.json"
CHUNK = 2**20
"""Elements that are compared at a time."""
HINT = "do not use these weights: look at the disk, then write them again"


@dataclass(frozen=True)
class Verified:
    """What was compared."""

    tensors: int
    """Written ones whose every element is that of the checkpoint, in the type that was asked for."""
    rounded: int
    """Of those: how many, rounded, are equal to the weights that the run itself kept beside the masters."""
    not_finite: tuple[str, ...]
    """Those with infinite or NaN elements, which the checkpoint has as well."""


def verify(
    weights: Weights, written: Written, dtype: DType | None, *, masters: Weights | None = None
) -> Verified:
    """Read everything back and compare it with the checkpoint; write the manifest beside it.

    Args:
        masters: the same by the names that the run gave them, where those of `weights` are others.

    Raises:
        CheckpointError: a tensor is missing, left over, of another shape, type or value; it lies in a file
            that has changed since the save; or the masters, rounded, are not the weights that the run kept,
            or it kept none where the step counts disagree. Names the tensors.
    """
    found = _written(written)
    _same_names(weights, found, written.folder, dtype)
    kept = refuse_mixed(masters or weights)
    _refuse_changed(weights)
    if not kept and weights.checkpoint is not None and weights.checkpoint.doubtful:
        raise CheckpointError(
            f"{weights.checkpoint.folder}: the step counts of its files disagree, and the run kept no "
            "weights that could show whether they are of one save",
            hint="take another checkpoint of the run",
        )
    unequal, odd = [], []
    for name, entry in weights.entries.items():
        wanted = stored_dtype(entry, dtype)
        if not _equal(entry, found[name], wanted):
            unequal.append(name)
        if entry.is_floating and any(not_finite(chunk, entry.dtype) for chunk in _chunks(entry)):
            odd.append(name)
    _refuse(unequal, "is not what the checkpoint holds", written.folder)
    _write_manifest(weights, written)
    return Verified(len(weights.entries), len(kept), tuple(odd))


def weights_of(checkpoint: ZeroCheckpoint) -> Weights:
    """Where each tensor of `checkpoint` lies.

    Raises:
        CheckpointError: as for `reader.of_checkpoint`; or its step counts disagree, and its weights too.
    """
    weights = reader.of_checkpoint(checkpoint)
    if checkpoint.doubtful:
        refuse_mixed(weights)
    return weights


def refuse_mixed(weights: Weights) -> dict[str, Entry]:
    """Compare the masters, rounded, with the weights that the run kept beside them; gives these, by name.

    Raises:
        CheckpointError: they are not equal: the files are of two saves, or damaged. Names the tensors.
    """
    kept = _kept_by_the_run(weights)
    parted = [
        name
        for name, entry in weights.entries.items()
        if name in kept and not _equal(entry, kept[name], kept[name].dtype, any_nan=True)
    ]
    if parted and weights.checkpoint is not None:
        where = f"{len(parted)} of the tensors in {weights.checkpoint.folder}: {_shown(parted)}"
        raise CheckpointError(
            f"{where}: rounded is not the weight that the run kept beside its masters: files of two saves "
            "are mixed, or one is damaged",
            hint="take another checkpoint of the run",
        )
    return kept


def _refuse_changed(weights: Weights) -> None:
    """Raise `CheckpointError` for tensors whose bytes have another checksum than torch.save gave them."""
    pieces: dict[Path, list[tuple[int, str]]] = {}
    for name, entry in weights.entries.items():
        for piece in entry.pieces:
            pieces.setdefault(piece.file, []).append((piece.offset, name))
    for file, places in pieces.items():
        if names := pickles.changed(file, places):
            raise CheckpointError(
                f"{file} is damaged: it has other bytes than were saved, where {_shown(names)} lies",
                hint="copy the file again, or take another checkpoint of the run",
            )


def _refuse(names: Sequence[str], what: str, folder: Path) -> None:
    if names:
        raise CheckpointError(
            f"{len(names)} of the tensors in {folder.name}: {_shown(names)}: {what}", hint=HINT
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _written(written: Written) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name in written.files:
        if not name.endswith(layout.INDEX):
            entries |= reader.of_file(written.folder / name)
    return entries


def _same_names(weights: Weights, found: Mapping[str, Entry], folder: Path, dtype: DType | None) -> None:
    _refuse(sorted(weights.entries.keys() ^ found.keys()), "is missing or left over", folder)
    odd = [
        name
        for name, entry in weights.entries.items()
        if (found[name].shape, found[name].dtype) != (entry.shape, stored_dtype(entry, dtype))
    ]
    _refuse(odd, "has another shape or type", folder)


def _kept_by_the_run(weights: Weights) -> dict[str, Entry]:
    """The weights that the model itself computed with, by the names of the masters.

    Below stage 3 they are in the model file; at stage 3 in what the run gathered beside the checkpoint.
    """
    checkpoint = weights.checkpoint
    if checkpoint is None or checkpoint.stage == 0:
        return {}
    module = checkpoint.content(checkpoint.model_files[0])["module"]
    refs = {name: ref for name, ref in module.items() if isinstance(ref, TensorRef) and ref.numel()}
    found = {name: reader.entry_of(name, ref) for name, ref in refs.items()}
    if checkpoint.stage == 3:
        for file in sorted(checkpoint.root.glob("model*.safetensors")):
            found |= reader.of_file(file)
    return {
        name: kept
        for name, kept in found.items()
        if name in weights.entries
        and weights.entries[name].kind == "trained"
        and kept.shape == weights.entries[name].shape
        and kept.is_floating
    }


def _equal(entry: Entry, other: Entry, dtype: DType, *, any_nan: bool = False) -> bool:
    """Whether `entry`, cast to `dtype`, has the bits of `other`; `any_nan`: which NaN it is does not matter.

    Processors differ in the one that they round a NaN to.
    """
    pairs = zip(_chunks(entry), _chunks(other), strict=True)
    return all(
        _alike(cast(one, entry.dtype, dtype).view(np.uint8), two.view(np.uint8), dtype, any_nan=any_nan)
        for one, two in pairs
    )


def _alike(one: Any, two: Any, dtype: DType, *, any_nan: bool) -> bool:
    if np.array_equal(one, two) or not any_nan:
        return np.array_equal(one, two)
    wide, other = (cast(each, dtype, "F32").view(np.float32) for each in (one, two))
    return np.array_equal(wide, other, equal_nan=True)


def _chunks(entry: Entry) -> Iterator[Any]:
    """The bytes of a tensor, so many elements at a time, in the order of its shape."""
    if entry.stride is not None:
        array = reader.Weights({entry.name: entry})[entry.name].contiguous().flatten()
        raw = np.frombuffer(bytes(array.untyped_storage()), np.uint8)
        yield from np.split(
            raw, range(CHUNK * ITEM_SIZES[entry.dtype], len(raw), CHUNK * ITEM_SIZES[entry.dtype])
        )
        return
    step = CHUNK * ITEM_SIZES[entry.dtype]
    for start in range(0, entry.nbytes, step):
        yield np.frombuffer(reader.read_bytes(cut(entry.pieces, start, step)), np.uint8)


def _write_manifest(weights: Weights, written: Written) -> None:
    checkpoint = weights.checkpoint
    content = {
        "dstool": __version__,
        "checkpoint": checkpoint
        and {"tag": checkpoint.tag, "step": checkpoint.step, "stage": checkpoint.stage},
        "tensors": len(weights.entries),
        "files": {
            name: {"bytes": (written.folder / name).stat().st_size, "sha256": sha256(written.folder / name)}
            for name in written.files
        },
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (written.folder / MANIFEST).write_text(text, encoding="utf-8")


def sha256(file: Path) -> str:
    """The digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
