"""The files of torch.save read without torch, without data, and without running anything that they name.

A file is a zip (torch/serialization.py, 2.13): `NAME/data.pkl` with the structure, and one uncompressed
record `NAME/data/KEY` for each storage. The pickle names what it wants built; here it gets stand-ins for
the few names that a ZeRO checkpoint needs, and everything else is refused. A tensor comes back as the place
of its bytes.
"""

from __future__ import annotations

import bisect
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dstool.checkpoint import opcodes
from dstool.errors import CheckpointError

DType = str
"""As safetensors names it: F32, BF16, I64 ..."""

ITEM_SIZES: Final[Mapping[DType, int]] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "C64": 8,
    }
)
FLOATING: Final = ("F64", "F32", "F16", "BF16")
MOST_DESCRIPTOR: Final = 24
"""Bytes that may follow the data of a record in a zip."""

_STORAGES: Final = MappingProxyType(
    {
        "DoubleStorage": "F64",
        "FloatStorage": "F32",
        "HalfStorage": "F16",
        "BFloat16Storage": "BF16",
        "LongStorage": "I64",
        "IntStorage": "I32",
        "ShortStorage": "I16",
        "CharStorage": "I8",
        "ByteStorage": "U8",
        "BoolStorage": "BOOL",
        "ComplexFloatStorage": "C64",
        "UntypedStorage": "U8",
    }
)
TORCH_NAMES: Final[Mapping[DType, str]] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "C64": "complex64",
    }
)
_DTYPES: Final = MappingProxyType({name: dtype for dtype, name in TORCH_NAMES.items()})


MOST_ELEMENTS: Final = 2**63
"""More than any dimension has."""


class Shape(tuple[int, ...]):
    """Stands for torch.Size: whole numbers, none of them negative.

    Raises:
        ValueError: something else.
    """

    __slots__ = ()

    def __new__(cls, sizes: Iterable[int] = ()) -> Shape:
        """The sizes in order."""
        made = super().__new__(cls, sizes)
        if not all(type(size) is int and 0 <= size < MOST_ELEMENTS for size in made):
            raise ValueError("a shape that is none")
        return made

    def numel(self) -> int:
        """The number of elements."""
        return prod(self)


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor's bytes lie in a file. `offset` is in bytes, `stride` in elements."""

    file: Path
    offset: int
    dtype: DType
    shape: Shape
    stride: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        """Refuse: the BUILD of a pickle would move a tensor to any place of any file."""
        raise pickle.UnpicklingError("a tensor is altered after it is made")

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.numel() * ITEM_SIZES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in the order of the shape."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.numel() == 0
            expected *= size
        return True

    def __int__(self) -> int:
        """The one number that the tensor holds, such as a step."""
        return int(self.number())

    def number(self) -> float:
        """The one number that the tensor holds. Reads it from the file."""
        import struct

        formats = {
            "F64": "d",
            "F32": "f",
            "F16": "e",
            "I64": "q",
            "I32": "i",
            "I16": "h",
            "I8": "b",
            "U8": "B",
        }
        if self.numel() != 1 or self.dtype not in formats:
            raise ValueError(f"not one number: {self.dtype} {list(self.shape)}")
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            (value,) = struct.unpack(f"<{formats[self.dtype]}", stream.read(ITEM_SIZES[self.dtype]))
        return float(value) if self.dtype.startswith("F") else int(value)


class Inert:
    """Stands for an object of another class. Takes whatever a pickle does to it, and does nothing."""

    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        """Whatever the pickle calls the class with."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        """Drop it, whatever it is."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """As of a dict."""

    def append(self, item: Any) -> None:
        """As of a list."""

    def extend(self, items: Any) -> None:
        """As of a list."""

    def add(self, item: Any) -> None:
        """As of a set."""

    def __call__(self, *_: Any, **__: Any) -> Inert:
        """As of a function that another one made."""
        return self

    def __int__(self) -> int:
        """An enumeration is its number."""
        return int(self.arguments[0])


class _Mapping(dict[Any, Any]):
    """Stands for the dicts of collections. Attributes that it was saved with are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Drop it: a state dict has `_metadata`, and what is hostile would hide `get`."""


class _Call:
    """A stand-in that a pickle can call, and nothing else: BUILD could set attributes of a plain function."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        """What it stands for."""
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        """Refuse."""
        raise pickle.UnpicklingError("a function is altered")


@dataclass(frozen=True)
class _Storage:
    """A record of the file: where it starts, how long it is, and of what type it was."""

    offset: int
    size: int
    dtype: DType


def read(file: Path, *, trust: bool = False, seen: dict[bytes, Any] | None = None) -> Any:
    """The content of `file`, every tensor as a `TensorRef`. Reads the pickle and the directory alone.

    Args:
        file: what torch.save wrote.
        trust: whether objects of classes that are not on the list become inert, in place of a refusal. Their
            code does not run either way.
        seen: contents that hold no data, by their pickle. A further file with that pickle has the same
            content, and so the hundreds of model files of stage 3 are unpickled once.

    Raises:
        CheckpointError: the file names something that no ZeRO checkpoint needs.
        OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError: it cannot be read.
    """
    with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
        records = _records(archive)
        name = next((each for each in records if each.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("no data.pkl in it")
        prefix = name.removesuffix("data.pkl")
        if f"{prefix}byteorder" in records and _stored(archive, records, f"{prefix}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        # read whole, and so checked by its CRC, before the unpickler sees any of it
        program = _stored(archive, records, name)
        if seen is not None and program in seen:
            return seen[program]
        opcodes.refuse_bombs(program)
        reader = _Reader(io.BytesIO(program), file, raw.fileno(), records, prefix)
        content, problem = None, None
        try:
            content = reader.load()
        except Exception as error:
            problem = error
    if reader.foreign and not trust:
        names = ", ".join(list(reader.foreign)[:5])
        names += f" and {len(reader.foreign) - 5} more" if len(reader.foreign) > 5 else ""
        raise CheckpointError(
            f"{file} asks for {names}, which no ZeRO checkpoint needs: not read",
            hint="--trust-pickle reads it without that object; or save again without it in client_state",
        ) from problem
    if problem is not None:
        raise problem
    if seen is not None and not reader.holds_data:
        seen[program] = content
    return content


@dataclass(frozen=True)
class _Record:
    """What the directory says of a record, and the byte that the next thing in the file starts at."""

    info: zipfile.ZipInfo
    end: int


def _records(archive: zipfile.ZipFile) -> dict[str, _Record]:
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    found = {info.filename: _Record(info, end) for info, end in zip(infos, ends, strict=True)}
    if len(found) < len(infos):
        raise ValueError("two of its records have one name")
    return found


def _stored(archive: zipfile.ZipFile, records: Mapping[str, _Record], name: str) -> bytes:
    """The bytes of a small record, which must not grow when it is read."""
    info = records[name].info
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > archive.start_dir:
        raise ValueError(f"its record {name} is compressed")
    return archive.read(name)


def changed(file: Path, places: Iterable[tuple[int, str]]) -> list[str]:
    """The names among `places` (byte offset, name) in whose record the data are not those that were saved.

    Reads the records whole, and compares them with the CRC-32 of the zip directory. Files that are no zip
    (partitions on NVMe), and records without a checksum, are taken to be as they were.
    """
    if not zipfile.is_zipfile(file):
        return []
    with zipfile.ZipFile(file) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        starts = [info.header_offset for info in infos]
        found: dict[int, list[str]] = {}
        for offset, name in places:
            found.setdefault(bisect.bisect_right(starts, offset) - 1, []).append(name)
        return [
            name for index, names in found.items() if _is_changed(archive, infos[index]) for name in names
        ]


def _is_changed(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(info) as stream:
            while stream.read(2**20):
                pass
    except zipfile.BadZipFile:
        return info.CRC != 0
    return False


class _Reader(pickle.Unpickler):
    """Builds stand-ins for what is on the list, and inert objects for the rest. Calls nothing that is named.

    `foreign` are the names of the rest. `holds_data` says whether any tensor has an element, and so a place.
    """

    def __init__(
        self, stream: Any, file: Path, descriptor: int, records: Mapping[str, _Record], prefix: str
    ) -> None:
        super().__init__(stream, encoding="utf-8")
        self._file, self._descriptor, self._records, self._prefix = file, descriptor, records, prefix
        self._starts: dict[str, int] = {}
        self.foreign: dict[str, None] = {}
        self.holds_data = False

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for `module.name`."""
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = self._functions().get((module, name)) or _PLAIN.get((module, name))
        if known is not None:
            return _Call(known)
        if (module, name) not in _INERT:
            asked = f"{module}.{name}"[:80]
            self.foreign[asked if asked.isprintable() else ascii(asked)] = None
        return type("Inert", (Inert,), {})

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a `("storage", type, key, location, numel)` tuple names."""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or dtype not in ITEM_SIZES:
            raise pickle.UnpicklingError(f"no storage: {kind!r}")
        record = self._records.get(f"{self._prefix}data/{key}")
        if record is None:
            raise ValueError(f"its record data/{key} is missing")
        info = record.info
        if info.compress_type != zipfile.ZIP_STORED or info.file_size < numel * ITEM_SIZES[dtype]:
            raise ValueError(f"its record data/{key} has {info.file_size} bytes, or is compressed")
        return _Storage(self._start(record), info.file_size, dtype)

    def _start(self, record: _Record) -> int:
        """Where the data of a record begins: behind its local header, whose fields have their own lengths.

        Nothing but a data descriptor lies between its end and what follows, which a damaged length breaks.
        """
        info = record.info
        if info.filename not in self._starts:
            name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
            header = os.pread(self._descriptor, 30 + len(name), info.header_offset)
            if header[:4] != b"PK\x03\x04" or header[30:] != name:
                raise ValueError(f"its record {info.filename} has no header")
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            start = info.header_offset + 30 + lengths
            if not self._is_followed_by_descriptor(record, start + info.file_size):
                raise ValueError(f"its record {info.filename} does not lie where its header says")
            self._starts[info.filename] = start
        return self._starts[info.filename]

    def _is_followed_by_descriptor(self, record: _Record, end: int) -> bool:
        """Whether a record that ends at byte `end` is followed by its descriptor, and by nothing else."""
        if not 0 <= record.end - end <= MOST_DESCRIPTOR:
            return False
        between = os.pread(self._descriptor, record.end - end, end)
        announced = bool(record.info.flag_bits & 8)
        expected = b"PK\x07\x08" + record.info.CRC.to_bytes(4, "little")
        return between.startswith(expected) if announced else not between

    def _functions(self) -> Mapping[tuple[str, str], Callable[..., Any]]:
        return {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_of_type,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
            ("torch._tensor", "_rebuild_from_type_v2"): lambda make, _, arguments, __: make(*arguments),
        }

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any, *_: Any) -> TensorRef:
        return self._tensor_of_type(storage, offset, size, stride, None, None, storage.dtype)

    def _tensor_of_type(
        self, storage: _Storage, offset: int, size: Any, stride: Any, _: Any, __: Any, dtype: DType, *___: Any
    ) -> TensorRef:
        """A tensor of `storage`, of which no element lies outside."""
        shape, steps, item = Shape(size), Shape(stride), ITEM_SIZES[dtype]
        if type(offset) is not int or offset < 0:
            raise ValueError("a tensor that starts nowhere")
        last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if shape.numel() and (last + 1) * item > storage.size:
            raise ValueError("a tensor larger than its record")
        _refuse_overlap(shape, steps, item)
        self.holds_data |= 0 not in shape
        return TensorRef(self._file, storage.offset + offset * item, dtype, shape, steps)


MOST_EXPANDED: Final = 64 * 2**20
"""Bytes of a tensor whose elements are fewer on disk (`expand`): a mask has them, a weight does not."""


def _refuse_overlap(shape: Shape, steps: Shape, item: int) -> None:
    """Raise `ValueError` for a tensor whose elements lie over each other, other than a small expanded one."""
    expanded = prod(n for n, step in zip(shape, steps, strict=True) if step == 0)
    if expanded > 1 and shape.numel() * item > MOST_EXPANDED:
        raise ValueError(f"a tensor of shape {list(shape)} that is not as large on disk")
    reach = 0
    for step, size in sorted((step, n) for n, step in zip(shape, steps, strict=True) if n > 1 and step):
        if step <= reach:
            raise ValueError("a tensor whose elements overlap")
        reach += step * (size - 1)


_PLAIN: Final[Mapping[tuple[str, str], Any]] = MappingProxyType(
    {
        ("collections", "OrderedDict"): _Mapping,
        ("collections", "defaultdict"): lambda *_: _Mapping(),
        ("torch", "Size"): Shape,
        ("torch", "device"): lambda *words: ":".join(map(str, words)),
        ("torch.serialization", "_get_layout"): str,
        ("builtins", "set"): set,
        ("__builtin__", "set"): set,
        ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    }
)

# What DeepSpeed 0.14 to 0.19 saves with its optimizers (runtime/zero, runtime/bf16_optimizer.py).
_INERT: Final = frozenset(
    {
        ("torch", "Tensor"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ("deepspeed.utils.tensor_fragment", "tensor_fragment"),
    }
)


def tensors(node: Any) -> Iterator[TensorRef]:
    """Every tensor in a content that `read` gave."""
    if isinstance(node, TensorRef):
        yield node
    elif isinstance(node, Mapping):
        for each in node.values():
            yield from tensors(each)
    elif isinstance(node, list | tuple) and not isinstance(node, Shape):
        for each in node:
            yield from tensors(each)
