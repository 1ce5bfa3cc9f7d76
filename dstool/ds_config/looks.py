"""What the rules about a DeepSpeed JSON look at, what they find, and the edits that they propose."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dstool.ds_config import keys, read
from dstool.ds_config.build import AUTO
from dstool.ds_config.source import Edit, Source

Severity = Literal["error", "warning"]
FolderState = Literal["fine", "no folder", "unwritable", "in memory"]


@dataclass(frozen=True)
class Machine:
    """What matters of this machine. `folders` tells of each nvme_path, `deepspeed` is the version.

    `mup` tells whether the package is installed that DeepSpeed's MuAdam, MuAdamW and MuSGD come from.
    """

    gpu: bool = True
    bf16: bool = True
    compiler: bool = True
    libaio: bool = True
    built: frozenset[str] = frozenset()
    folders: Mapping[str, FolderState] = field(default_factory=dict)
    deepspeed: str = ""
    mup: bool = True


@dataclass(frozen=True)
class Circumstances:
    """What the JSON is checked against; None is not known, and what needs it is not looked at.

    `train` are the arguments that the run file gives, `model_config` is the model's config.json, and `file`
    what the JSON is called, empty for what is no regular file.
    """

    train: Mapping[str, Any] | None = None
    world_size: int | None = None
    model_config: Mapping[str, Any] | None = None
    machine: Machine | None = None
    file: str = "ds_config.json"


@dataclass(frozen=True)
class Raw:
    """A finding before it has its place: the path, what is wrong, what happens, the mend and its edits.

    `meant` is the path that the entry of a wrong name or place is taken to belong at.
    """

    rule: str
    at: tuple[str, ...]
    problem: str
    consequence: str
    mend: str
    edits: tuple[Edit, ...] = ()
    severity: Severity = "error"
    meant: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Look:
    """The JSON under check."""

    ds: Mapping[str, Any]
    source: Source
    around: Circumstances

    def get(self, *path: str) -> Any:
        """The value at `path`, None where there is none."""
        node: Any = self.ds
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def has(self, *path: str) -> bool:
        """Whether the key is there, whatever its value."""
        holder = self.get(*path[:-1]) if len(path) > 1 else self.ds
        return isinstance(holder, dict) and path[-1] in holder

    def misnamed(self, *block: str) -> frozenset[str]:
        """The keys that the unknown ones of the object at `block` are taken to mean."""
        names = [key.name for key in keys.keys().values() if key.block == ".".join(block)]
        held = self.get(*block) if block else self.ds
        unknown = [name for name in held if name not in names] if isinstance(held, dict) else []
        unknown = [name for name in unknown if not name.startswith(("_", "//"))]
        meant = [nearest(name, names) if block else read.meant_by(name) for name in unknown]
        return frozenset(name for name in meant if name)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that a Trainer would use; None where it is no stage, or misnamed."""
        if read.misnames_stage(self.ds):
            return None
        value = self.get("zero_optimization", "stage")
        if value is None or value == AUTO:
            return 0 if value is None else 2
        return int(value) if type(value) in (int, float) and value in (0, 1, 2, 3) else None

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is off the device."""
        return self.device("offload_optimizer") in ("cpu", "nvme")

    def device(self, block: str) -> Any:
        """The device of offload_optimizer or offload_param, also where the block has its old name."""
        old = read.OLD_OFFLOADS[block]
        if not self.has("zero_optimization", block) and self.get("zero_optimization", old) is True:
            return "cpu"
        return self.get("zero_optimization", block, "device")


def nearest(name: str, names: list[str]) -> str | None:
    """The one of `names` that an unknown name comes nearest to, in small or capital letters."""
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return next(iter(close or difflib.get_close_matches(name.lower(), names, 1, cutoff=0.6)), None)


Rule = Callable[[Look], Iterator[Raw]]


def renamed(look: Look, path: tuple[str, ...], meant: Mapping[str, str | None]) -> str:
    """The mend of a key by the name that it is meant to have; `meant` has all such keys of its block."""
    *block, key = path
    name = meant[key]
    others = [other for other in meant if meant[other] == name]
    if name is None:
        return "delete it"
    if look.has(*block, name):
        return f"delete it, as {name} is there too"
    if len(others) > 1:
        return f"keep one of {', '.join(others)} under the name {name}, and delete the rest"
    return f"call it {name}, or delete it"


def put(look: Look, path: tuple[str, ...], value: str) -> str:
    """The mend that gives the key at `path` a value; one that is there, such as null, is not added again."""
    return f'{"set" if look.has(*path) else "add"} "{path[-1]}": {value}'


def delete(look: Look, path: tuple[str, ...]) -> tuple[Edit, ...]:
    """The edits that take the entry at `path` out."""
    return (look.source.deletion(path),) if path in look.source.places else ()


def replace(look: Look, path: tuple[str, ...], value: Any) -> tuple[Edit, ...]:
    """The edits that put `value` at `path`."""
    return (look.source.replacement(path, value),) if path in look.source.places else ()


def add(look: Look, block: tuple[str, ...], **values: Any) -> tuple[Edit, ...]:
    """The edits that add `values` to the object at `block`; none where no object is.

    A key that is there under a name that only comes near is not added: the mend of that name gives its value.
    """
    values = {name: value for name, value in values.items() if name not in look.misnamed(*block)}
    if block and not isinstance(look.get(*block), dict):
        return ()
    texts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return (look.source.addition(block, *texts),) if texts and block in look.source.places else ()


def first(*given: Any) -> Any:
    """The first of the values that is one."""
    return next((value for value in given if value not in (None, AUTO)), None)


def count(value: Any) -> bool:
    """Whether `value` is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
