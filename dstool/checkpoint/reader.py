"""Weights on disk as a mapping from name to tensor, in which nothing is read until it is asked for.

    weights = open_checkpoint("checkpoint-100")
    weights.entries["lm_head.weight"].shape      # no data is read
    weights["lm_head.weight"]                    # a torch.Tensor
    weights.rows("lm_head.weight", 0, 8)         # the first eight rows of it

Underneath is a list for each tensor of the byte ranges that make it, which is all that `writer` needs to
put it into another file. The places are those of deepspeed/utils/zero_to_fp32.py (0.19.8); added are
partitions on NVMe, frozen parameters at stage 1, the masters of `BF16_Optimizer`, stage 0 and universal
checkpoints.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dstool.checkpoint import layout, sums, swap
from dstool.checkpoint.layout import ZeroCheckpoint, fp32_groups_key
from dstool.checkpoint.pickles import FLOATING, ITEM_SIZES, TORCH_NAMES, DType, Shape, TensorRef
from dstool.errors import CheckpointError
from dstool.files import typed

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("dstool.checkpoint")

Kind = Literal["trained", "frozen", "buffer"]

MIXED_HINT = "the files may be of several runs: save the checkpoint again, or take an earlier one"


@dataclass(frozen=True)
class Piece:
    """A range of bytes in a file."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class LowRank:
    """A product that is added to a weight: `scaling` times `up` [m, r] @ `down` [r, n], or its transpose.

    Without `down` it is `up` alone. With `magnitude` [m] each row of the sum is then given its length (DoRA).
    """

    up: Entry
    down: Entry | None
    scaling: float
    transposed: bool = False
    magnitude: Entry | None = None

    def changing(self, read: Callable[[Entry], sums.Matrix]) -> sums.OfRows:
        """What it does to some rows; `read` gives a small tensor, whole, in fp32."""
        left, right = read(self.up), None if self.down is None else read(self.down)
        if self.transposed and right is not None:
            left, right = right.T, left.T
        lengths = None if self.magnitude is None else read(self.magnitude)
        return sums.adding(left, right, self.scaling, lengths)


@dataclass(frozen=True)
class Rows:
    """Rows of a weight that are others than those that lie there: `values` [n, ...], at `indices`."""

    indices: tuple[int, ...]
    values: Entry

    def changing(self, read: Callable[[Entry], sums.Matrix]) -> sums.OfRows:
        """What it does to some rows; `read` gives a small tensor, whole, in fp32."""
        return sums.replacing(self.indices, read(self.values))


Change: TypeAlias = LowRank | Rows


@dataclass(frozen=True)
class Entry:
    """A tensor as it lies on disk: the bytes of `pieces`, one after the other, are its elements in order.

    `stride`, in elements, is there for the rare tensor whose elements lie in another order in its one piece.
    `change` makes another of it, which is computed in fp32 as it is read, and rounded once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: tuple[Piece, ...]
    kind: Kind = "trained"
    stride: tuple[int, ...] | None = None
    change: Change | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.numel * ITEM_SIZES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether a cast may change its type; integers and booleans keep theirs."""
        return self.dtype in FLOATING


class Weights(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint or model folder by name, in the model's order, and where they lie.

    `entries` are the tensors that are stored, `tied` the further names of some of them. The mapping has both.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        tied: Mapping[str, str] | None = None,
        checkpoint: ZeroCheckpoint | None = None,
    ) -> None:
        self.entries = dict(entries)
        self.tied = dict(tied or {})
        self.checkpoint = checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, read now. In the type that it is stored in; a changed one in fp32."""
        import torch

        entry = self.entry(name)
        value = self._read(entry, entry.shape, entry.pieces)
        if entry.change is None:
            return value
        change = entry.change.changing(lambda part: self._read(part, part.shape, part.pieces).float().numpy())
        rows = value.float().reshape(entry.shape[0], -1)
        return torch.from_numpy(change(rows.numpy(), 0)).reshape(entry.shape)

    def __repr__(self) -> str:
        """How many there are, and of what. Reads nothing."""
        elements = sum(entry.numel for entry in self.entries.values())
        place = f" of {self.checkpoint.folder}" if self.checkpoint else ""
        return f"<{len(self.entries)} tensors, {elements:,} elements, {len(self.tied)} tied{place}>"

    def __iter__(self) -> Iterator[str]:
        """Every name, those of tied tensors at the end."""
        yield from self.entries
        yield from self.tied

    def __len__(self) -> int:
        """The number of names."""
        return len(self.entries) + len(self.tied)

    def __contains__(self, name: object) -> bool:
        """Whether there is such a name. That of Mapping would read the tensor to know."""
        return name in self.entries or name in self.tied

    def entry(self, name: str) -> Entry:
        """Where the tensor lies; `KeyError` for a name that is none."""
        return self.entries[self.tied.get(name, name)]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The rows from `start` to `stop` of the first dimension, read now. Shape [stop - start, ...]."""
        entry = self.entry(name)
        if not entry.shape:
            raise IndexError(f"{name} has no rows")
        start, stop, _ = slice(start, stop).indices(entry.shape[0])
        shape = (max(0, stop - start), *entry.shape[1:])
        if entry.stride is not None or entry.change is not None:
            return self[name][start:stop]
        row = prod(entry.shape[1:]) * ITEM_SIZES[entry.dtype]
        return self._read(entry, shape, tuple(cut(entry.pieces, start * row, shape[0] * row)))

    def _read(self, entry: Entry, shape: Sequence[int], pieces: Sequence[Piece]) -> torch.Tensor:
        import torch

        buffer = bytearray(sum(piece.length for piece in pieces))
        view, at = memoryview(buffer), 0
        for piece in pieces:
            _fill(view[at : at + piece.length], piece)
            at += piece.length
        dtype = getattr(torch, TORCH_NAMES[entry.dtype])
        flat = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
        return flat.as_strided(entry.shape, entry.stride) if entry.stride else flat.view(tuple(shape))


def _fill(view: memoryview, piece: Piece) -> None:
    """Read a piece into memory of its length."""
    try:
        with piece.file.open("rb") as stream:
            stream.seek(piece.offset)
            found = stream.readinto(view)
    except OSError as error:
        raise unreadable(piece.file, error) from error
    if found != piece.length:
        raise ends_early(piece.file)


def ends_early(file: Path) -> CheckpointError:
    """The error for a file that has become shorter than it was when its tensors were looked up."""
    return CheckpointError(f"{file} ends before its tensors do", hint="copy the file again, or take another")


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """The error for a file that the system does not let be read, such as on a bad disk."""
    return CheckpointError(
        f"{file} cannot be read: {error.strerror or error}",
        hint=f"cat {typed(file)} > /dev/null shows whether the disk can; or take an earlier checkpoint",
    )


def cut(pieces: Sequence[Piece], start: int, length: int) -> Iterator[Piece]:
    """The part of `pieces` that is `length` bytes from byte `start` on, counted over all of them."""
    for piece in pieces:
        if length <= 0:
            return
        if start >= piece.length:
            start -= piece.length
            continue
        taken = min(piece.length - start, length)
        yield Piece(piece.file, piece.offset + start, taken)
        start, length = 0, length - taken


def load_into(model: torch.nn.Module, path: Path | str) -> None:
    """Copy the weights of the checkpoint at `path` into `model`, one tensor at a time, in the model's types.

    Raises:
        CheckpointError: no such checkpoint, or one whose names or shapes are not those of the model, which
            is then left as it was.
    """
    import torch

    weights = open_checkpoint(path)
    state = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    _check_fits(weights, state, path)
    with torch.no_grad():
        for name, target in state.items():
            target.copy_(weights[name])


def _check_fits(weights: Weights, state: Mapping[str, torch.Tensor], path: Path | str) -> None:
    """Raise `CheckpointError` unless the tensors of a model can take the weights."""
    hint = "make the model from the config that was trained"
    missing, surplus = sorted(state.keys() - set(weights)), sorted(set(weights) - state.keys())
    if missing or surplus:
        raise CheckpointError(
            f"{path} does not fit the model: it lacks {missing[:3]} and has {surplus[:3]} besides", hint=hint
        )
    for name, target in state.items():
        if target.shape != weights.entry(name).shape:
            raise CheckpointError(
                f"{path}: {name} is {list(weights.entry(name).shape)}, the model's {list(target.shape)}",
                hint=hint,
            )
        if target.is_meta:
            raise CheckpointError(
                f"{name} of the model is on the meta device, which holds no data",
                hint="make the model without torch.device('meta')",
            )


# --- ZeRO checkpoints --------------------------------------------------------------------------------------


def open_checkpoint(path: Path | str, *, tag: str | None = None, trust: bool = False) -> Weights:
    """The weights of the checkpoint at `path`, of any level that `layout.find` takes: fp32 where it has
    masters.

    Args:
        tag: the folder inside, in place of the one that `latest` names.
        trust: see `pickles.read`.

    Raises:
        CheckpointError: nothing there, a file missing or damaged, or parts that do not fit together.
    """
    return of_checkpoint(layout.find(Path(path), tag=tag, trust=trust))


def of_checkpoint(checkpoint: ZeroCheckpoint) -> Weights:
    """The weights of a checkpoint that was found.

    Names of one tied parameter are one entry, under the first of them in the model. Parameters that no
    optimizer owned (frozen ones) come in the type that the model kept them in, unless the run left them out
    of the save.

    Raises:
        CheckpointError: a partition is missing or of the wrong size, or a tensor would be left out.
    """
    try:
        return _of_checkpoint(checkpoint)
    except layout.MALFORMED as error:
        raise CheckpointError(
            f"the files in {checkpoint.folder} are not of the form that DeepSpeed gives them: "
            f"{' '.join(repr(error).split())[:200]}",
            hint=MIXED_HINT,
        ) from error


def _of_checkpoint(checkpoint: ZeroCheckpoint) -> Weights:
    models = [checkpoint.content(file) for file in checkpoint.model_files]
    module = {name: value for name, value in models[0]["module"].items() if isinstance(value, TensorRef)}
    if checkpoint.stage == 0:
        entries = _of_refs(module, models[0])
        if any(entry.dtype in ("BF16", "F16") for entry in entries.values()):
            logger.warning("%s: stage 0 in 16 bits, so these are the 16-bit weights", checkpoint.folder)
    else:
        found = _trained(checkpoint, models)
        found |= _frozen(checkpoint, models)
        rest = {
            name: value
            for name, value in module.items()
            if name not in found and name not in models[0]["shared_params"] and value.numel()
        }
        entries = found | _of_refs(rest, models[0])
    _check_complete(checkpoint, models[0], module, entries)
    order = (*module, *entries)
    ordered = {name: entries[name] for name in dict.fromkeys(order) if name in entries}
    return _tied(ordered, models[0]["shared_params"] or {}, replace(checkpoint, contents={}))


def _shapes(model: Mapping[str, Any]) -> dict[str, Shape]:
    """The full shape of every parameter that the optimizer owned, in the order of its partitions."""
    return {name: Shape(shape) for group in model["param_shapes"] for name, shape in group.items()}


def _of_refs(refs: Mapping[str, TensorRef], model: Mapping[str, Any]) -> dict[str, Entry]:
    """Tensors that lie in a file whole."""
    buffers = set(model.get("buffer_names") or ())
    trained = model.get("param_shapes") is None
    return {
        name: entry_of(name, ref, "buffer" if name in buffers else "trained" if trained else "frozen")
        for name, ref in refs.items()
    }


def entry_of(name: str, ref: TensorRef, kind: Kind = "trained") -> Entry:
    """The entry of a tensor that lies in a file whole."""
    if ref.is_contiguous:
        return Entry(name, tuple(ref.shape), ref.dtype, (Piece(ref.file, ref.offset, ref.nbytes),), kind)
    last = sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True))
    piece = Piece(ref.file, ref.offset, (last + 1) * ITEM_SIZES[ref.dtype])
    return Entry(name, tuple(ref.shape), ref.dtype, (piece,), kind, ref.stride)


def _trained(checkpoint: ZeroCheckpoint, models: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """The masters of the parameters that the optimizer owned."""
    if checkpoint.universal:
        return _trained_universal(checkpoint, models[0])
    return _trained_3(checkpoint, models) if checkpoint.stage == 3 else _trained_2(checkpoint, models[0])


def _trained_universal(checkpoint: ZeroCheckpoint, model: Mapping[str, Any]) -> dict[str, Entry]:
    """A universal checkpoint: each master whole in a file of its own, perhaps with padding at its end."""
    found = {}
    for name, shape in _shapes(model).items():
        file = checkpoint.folder / layout.UNIVERSAL / name / "fp32.pt"
        content = layout.read_any(file, trust=checkpoint.trust)
        master = content.get("param") if isinstance(content, dict) else content  # of stages 1, 2 and of 3
        if not isinstance(master, TensorRef) or not master.is_contiguous or master.numel() < shape.numel():
            raise CheckpointError(f"{file} does not hold {name}, {list(shape)}", hint=MIXED_HINT)
        pieces = joined(_Flat([master]).span(0, shape.numel()))
        found[name] = Entry(name, tuple(shape), master.dtype, pieces)
    return found


class _Flat:
    """Flat tensors of one type, end to end."""

    def __init__(self, parts: Sequence[TensorRef]) -> None:
        self.parts = [part for part in parts if part.numel()]
        self.ends = list(accumulate(part.numel() for part in self.parts))
        self.numel = self.ends[-1] if self.ends else 0
        self.dtype = parts[0].dtype if parts else "F32"

    def span(self, start: int, count: int) -> Iterator[Piece]:
        """The bytes of `count` elements from element `start` on."""
        item = ITEM_SIZES[self.dtype]
        index = bisect.bisect_right(self.ends, start)
        while count > 0:
            part = self.parts[index]
            inside = start - (self.ends[index] - part.numel())
            taken = min(part.numel() - inside, count)
            yield Piece(part.file, part.offset + inside * item, taken * item)
            start, count, index = start + taken, count - taken, index + 1


def _groups(checkpoint: ZeroCheckpoint) -> tuple[list[list[TensorRef]], Any]:
    """Every rank's flat fp32 groups, and the paddings between parameters (stages 1, 2; may be None)."""
    states = [checkpoint.content(file)["optimizer_state_dict"] for file in checkpoint.optim_files]
    key = fp32_groups_key(checkpoint.stage)
    groups: list[list[TensorRef]] = [list(state[key]) for state in states]
    _check_flat(
        [(file, part) for file, of in zip(checkpoint.optim_files, groups, strict=True) for part in of]
    )
    return groups, states[0].get("param_alignment_paddings")


def _check_flat(parts: Sequence[tuple[Path, TensorRef]]) -> None:
    """Every part is one run of numbers, and all are of one type: `_Flat` reads them as such."""
    for file, part in parts:
        if not part.is_contiguous or part.dtype not in FLOATING or part.dtype != parts[0][1].dtype:
            raise CheckpointError(
                f"{file} holds a part of type {part.dtype} and stride {list(part.stride)}, where numbers of "
                f"{parts[0][1].dtype} belong, one after the other",
                hint=MIXED_HINT,
            )


def _check_group_count(
    checkpoint: ZeroCheckpoint, model: Mapping[str, Any], groups: Sequence[Sequence[TensorRef]]
) -> None:
    expected = len(model["param_shapes"])
    for file, partitions in zip(checkpoint.optim_files, groups, strict=True):
        if len(partitions) != expected:
            raise CheckpointError(
                f"{file} holds {len(partitions)} parameter groups, the model file {expected}",
                hint=MIXED_HINT,
            )


def _trained_2(checkpoint: ZeroCheckpoint, model: Mapping[str, Any]) -> dict[str, Entry]:
    """Stages 1 and 2: the ranks' partitions of a group end to end hold its parameters end to end.

    Between them lie paddings, and at the end what aligns the whole to 2 * ranks.
    """
    groups, paddings = _groups(checkpoint)
    _check_group_count(checkpoint, model, groups)
    found = {}
    for index, shapes in enumerate(model["param_shapes"]):
        flat, offset = _Flat([partitions[index] for partitions in groups]), 0
        between = _paddings(checkpoint, paddings, index, len(shapes))
        for (name, size), padding in zip(shapes.items(), between, strict=True):
            shape = Shape(size)
            if offset + shape.numel() > flat.numel:
                break
            pieces = joined(flat.span(offset, shape.numel()))
            found[name] = Entry(name, tuple(shape), flat.dtype, pieces)
            offset += shape.numel() + int(padding)
        align = 2 * checkpoint.world_size
        if len(found.keys() & shapes.keys()) < len(shapes) or ceil(offset / align) != ceil(
            flat.numel / align
        ):
            needed = sum(Shape(size).numel() for size in shapes.values())
            raise CheckpointError(
                f"the partitions in {checkpoint.folder} do not fit the model: group {index} has {flat.numel} "
                f"elements, its parameters {needed}",
                hint=MIXED_HINT,
            )
    return found


def _paddings(checkpoint: ZeroCheckpoint, paddings: Any, group: int, count: int) -> Sequence[int]:
    """The elements after each parameter of a group."""
    if paddings is None:
        return [0] * count
    between: Sequence[int] = paddings[group] if group < len(paddings) else ()
    if len(between) != count or min(map(int, between), default=0) < 0:
        raise CheckpointError(
            f"{checkpoint.optim_files[0]} has {len(between)} paddings for the {count} parameters of "
            f"group {group}",
            hint=MIXED_HINT,
        )
    return between


def _trained_3(checkpoint: ZeroCheckpoint, models: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """Stage 3: each rank has an equal part of each parameter, the last of them filled up."""
    groups, _ = _groups(checkpoint)
    _check_group_count(checkpoint, models[0], groups)
    if checkpoint.nvme:
        groups = swap.filled(checkpoint, models[0], groups)
    _check_partition_sizes(checkpoint, models[0], groups)
    flats, offset, found = [_Flat(partitions) for partitions in groups], 0, {}
    for name, shape in _shapes(models[0]).items():
        part = ceil(shape.numel() / checkpoint.world_size)
        pieces = (
            piece
            for rank, flat in enumerate(flats)
            for piece in flat.span(offset, min(part, shape.numel() - rank * part))
        )
        found[name] = Entry(name, tuple(shape), flats[0].dtype, joined(pieces))
        offset += part
    return found


def _check_partition_sizes(
    checkpoint: ZeroCheckpoint, model: Mapping[str, Any], groups: Sequence[Sequence[TensorRef]]
) -> None:
    sizes = [layout.partition_numel(shapes, checkpoint.world_size) for shapes in model["param_shapes"]]
    for file, partitions in zip(checkpoint.optim_files, groups, strict=True):
        for index, (expected, partition) in enumerate(zip(sizes, partitions, strict=True)):
            if partition.numel() != expected:
                raise CheckpointError(
                    f"{file}: group {index} has {partition.numel()} elements, its parameters {expected}",
                    hint=MIXED_HINT,
                )


def _frozen(checkpoint: ZeroCheckpoint, models: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    """The parameters that no optimizer owns: whole below stage 3, and there a part in each rank's file."""
    shapes: Mapping[str, Any] = models[0].get("frozen_param_shapes") or {}
    ranks = checkpoint.world_size if checkpoint.stage == 3 else 1
    found = {}
    for name, size in shapes.items():
        shape = Shape(size)
        part = ceil(shape.numel() / ranks)
        sources = list(zip(checkpoint.model_files, models, strict=True))[:ranks]
        fragments = [_fragment(file, model, name, shape, part) for file, model in sources]
        if checkpoint.stage != 3:
            found[name] = entry_of(name, fragments[0], "frozen")
            continue
        _check_flat([*zip(checkpoint.model_files, fragments, strict=False)])
        flats = [_Flat([fragment]) for fragment in fragments]
        pieces = [
            piece
            for rank, flat in enumerate(flats)
            for piece in flat.span(0, min(part, shape.numel() - rank * part))
        ]
        found[name] = Entry(name, tuple(shape), fragments[0].dtype, joined(pieces), "frozen")
    return found


def _fragment(file: Path, model: Mapping[str, Any], name: str, shape: Shape, part: int) -> TensorRef:
    """What a rank's file has of the frozen parameter `name`, checked to be `part` elements."""
    fragment: TensorRef | None = (model.get("frozen_param_fragments") or {}).get(name)
    have = fragment.numel() if fragment is not None else 0
    if fragment is None or have != part:
        raise CheckpointError(
            f"{file}: frozen {name} has {have} elements, a part of {list(shape)} has {part}",
            hint="with parameters on NVMe, take the frozen weights from the base model",
        )
    return fragment


def joined(pieces: Iterator[Piece] | Sequence[Piece]) -> tuple[Piece, ...]:
    """The same bytes in as few pieces as there can be."""
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        if last and last.file == piece.file and last.offset + last.length == piece.offset:
            made[-1] = Piece(last.file, last.offset, last.length + piece.length)
        elif piece.length:
            made.append(piece)
    return tuple(made)


def _tied(entries: dict[str, Entry], shared: Mapping[str, str], checkpoint: ZeroCheckpoint | None) -> Weights:
    """One entry for each tensor: further names, and entries of the same bytes, are tied to the first."""
    tied = {alias: name for alias, name in shared.items() if name in entries}
    first: dict[Any, str] = {}
    for name, entry in list(entries.items()):
        if name in tied:
            del entries[name]
            continue
        key = (entry.pieces, entry.dtype, entry.shape, entry.stride, entry.change)
        if entry.pieces and key in first:
            tied[name] = first[key]
            del entries[name]
        else:
            first[key] = name
    # a name may be tied to one that is itself tied
    return Weights(entries, {alias: tied.get(name, name) for alias, name in tied.items()}, checkpoint)


def _check_complete(
    checkpoint: ZeroCheckpoint,
    model: Mapping[str, Any],
    module: Mapping[str, TensorRef],
    entries: Mapping[str, Entry],
) -> None:
    """Every name that the files know of is there, in its full shape.

    A run that leaves frozen parameters out of the save (PEFT) also leaves names tied to one of them.
    """
    shapes = dict(model.get("frozen_param_shapes") or {})
    shared = model["shared_params"] or {}
    if model["param_shapes"] is not None:
        shapes |= _shapes(model)
    expected = {*shapes, *(name for name in module if name not in shared)}
    if absent := sorted(expected - entries.keys()):
        raise CheckpointError(
            f"{checkpoint.folder} holds no data for {len(absent)} of {len(expected)} tensors: "
            f"{', '.join(absent[:5])}",
            hint="save the checkpoint again, or take an earlier one",
        )
    for name, entry in entries.items():
        if entry.numel == 0:
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is empty, shape {list(entry.shape)}",
                hint="it was saved while it was partitioned; take another checkpoint",
            )
        if tuple(entry.shape) != tuple(shapes.get(name, entry.shape)):
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is {list(entry.shape)}, not {list(shapes[name])}",
                hint=MIXED_HINT,
            )


# --- plain weights -----------------------------------------------------------------------------------------

MOST_HEADER = 100_000_000
"""Bytes; the limit that safetensors itself has."""


def of_file(file: Path) -> dict[str, Entry]:
    """The tensors of a weight file by name, safetensors or of torch.save.

    Raises:
        CheckpointError: it cannot be read.
    """
    if file.suffix == ".safetensors":
        return of_safetensors(file)
    content = layout.read(file)
    return {name: entry_of(name, value) for name, value in content.items() if isinstance(value, TensorRef)}


def of_safetensors(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name, from its header.

    Raises:
        CheckpointError: it is no such file, or cut short.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, MOST_HEADER):
                raise ValueError("no header")
            header = json.loads(stream.read(length))
        entries = {}
        for name, each in header.items():
            if name == "__metadata__":
                continue
            start, stop = each["data_offsets"]
            entry = Entry(
                name,
                tuple(each["shape"]),
                each["dtype"],
                (Piece(file, 8 + length + start, stop - start),) if stop > start else (),
            )
            if entry.nbytes != stop - start or not 0 <= start <= stop or 8 + length + stop > size:
                raise ValueError(f"{name} does not fit in it")
            entries[name] = entry
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is cut short, or no safetensors file: {error}", hint="copy it again, or make it again"
        ) from error
    return entries


def untied(entries: dict[str, Entry]) -> Weights:
    """Weights of which those that lie in the same bytes are one."""
    return _tied(entries, {}, None)


def same(weights: Weights, name: str, other: str) -> bool:
    """Whether two names are of the same values: the same bytes on disk, or equal ones."""
    if other not in weights:
        return False
    one, two = weights.entry(name), weights.entry(other)
    if one.change != two.change:
        return False
    if one == two or (one.pieces, one.dtype, one.shape) == (two.pieces, two.dtype, two.shape):
        return True
    if (one.dtype, one.shape, one.stride) != (two.dtype, two.shape, two.stride):
        return False
    step = 2**24
    return all(
        read_bytes(cut(one.pieces, start, step)) == read_bytes(cut(two.pieces, start, step))
        for start in range(0, one.nbytes, step)
    )


def read_bytes(pieces: Iterator[Piece]) -> bytes:
    """The bytes of `pieces`, one after the other."""
    parts = []
    for piece in pieces:
        parts.append(bytearray(piece.length))
        _fill(memoryview(parts[-1]), piece)
    return b"".join(parts)
