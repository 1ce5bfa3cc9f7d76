"""The files of torch.save read without torch, without data, and without running anything that they name.

A file is a zip (torch/serialization.py, 2.13): `NAME/data.pkl` with the structure, and one uncompressed
record `NAME/data/KEY` for each storage. The pickle names what it wants built; here it gets stand-ins for
the few names that a ZeRO checkpoint needs, and everything else is refused. A tensor comes back as the place
of its bytes.
"""

from __future__ import annotations

import collections
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

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


class Shape(tuple[int, ...]):
    """Stands for torch.Size."""

    __slots__ = ()

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
    """Stands for an object of a class that is allowed, and keeps what it was made of."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> Inert:
        """Whatever the pickle calls the class with."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep it, whatever it is."""
        self.state = state

    def __int__(self) -> int:
        """An enumeration is its number."""
        return int(self.arguments[0])


@dataclass(frozen=True)
class _Storage:
    """A record of the file: where it starts, how long it is, and of what type it was."""

    offset: int
    size: int
    dtype: DType


def read(file: Path, *, trust: bool = False) -> Any:
    """The content of `file`, every tensor as a `TensorRef`. Reads the pickle and the directory alone.

    Args:
        file: what torch.save wrote.
        trust: whether objects of classes that are not on the list become inert, in place of a refusal. Their
            code does not run either way.

    Raises:
        CheckpointError: the file names something that no ZeRO checkpoint needs.
        OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError: it cannot be read.
    """
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: record for record in archive.infolist()}
        name = next((each for each in records if each.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("no data.pkl in it")
        prefix = name.removesuffix("data.pkl")
        if f"{prefix}byteorder" in records and archive.read(f"{prefix}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        with file.open("rb") as raw, archive.open(name) as stream:
            return _Reader(stream, file, raw.fileno(), records, prefix, trust=trust).load()


class _Reader(pickle.Unpickler):
    """Builds stand-ins for what is on the list, and refuses the rest before anything is called."""

    def __init__(
        self,
        stream: Any,
        file: Path,
        descriptor: int,
        records: Mapping[str, zipfile.ZipInfo],
        prefix: str,
        *,
        trust: bool,
    ) -> None:
        super().__init__(stream, encoding="utf-8")
        self._file, self._descriptor, self._records, self._prefix = file, descriptor, records, prefix
        self._trust = trust
        self._starts: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for `module.name`."""
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = self._functions().get((module, name)) or _PLAIN.get((module, name))
        if known is not None:
            return known
        if self._trust or (module, name) in _INERT:
            return type(name, (Inert,), {"__module__": module})
        raise CheckpointError(
            f"{self._file} asks for {module}.{name}, which no ZeRO checkpoint needs: not read",
            hint="--trust-pickle reads it without that object; or save again without it in client_state",
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a `("storage", type, key, location, numel)` tuple names."""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or dtype not in ITEM_SIZES:
            raise pickle.UnpicklingError(f"no storage: {kind!r}")
        record = self._records.get(f"{self._prefix}data/{key}")
        if record is None:
            raise ValueError(f"its record data/{key} is missing")
        if record.compress_type != zipfile.ZIP_STORED or record.file_size < numel * ITEM_SIZES[dtype]:
            raise ValueError(f"its record data/{key} has {record.file_size} bytes, or is compressed")
        return _Storage(self._start(record), record.file_size, dtype)

    def _start(self, record: zipfile.ZipInfo) -> int:
        """Where the data of a record begins: behind its local header, whose fields have their own lengths."""
        if record.filename not in self._starts:
            header = os.pread(self._descriptor, 30, record.header_offset)
            if len(header) < 30 or header[:4] != b"PK\x03\x04":
                raise ValueError(f"its record {record.filename} has no header")
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            self._starts[record.filename] = record.header_offset + 30 + lengths
        return self._starts[record.filename]

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
        shape, steps, item = Shape(size), tuple(stride), ITEM_SIZES[dtype]
        if offset < 0 or min((*shape, *steps), default=0) < 0:
            raise ValueError("a tensor with a negative size")
        last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if shape.numel() and (last + 1) * item > storage.size:
            raise ValueError("a tensor larger than its record")
        return TensorRef(self._file, storage.offset + offset * item, dtype, shape, steps)


_PLAIN: Final[Mapping[tuple[str, str], Any]] = MappingProxyType(
    {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): lambda *_: {},
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
