"""Every key that DeepSpeed reads from its JSON, from keys.json, which `scripts/make_keys.py` writes.

A key is named by its path, "zero_optimization.stage". The file is read once, when it is first asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

KEYS_FILE: Final = Path(__file__).parent / "keys.json"


@dataclass(frozen=True)
class Key:
    """One key, as the DeepSpeed of `versions` reads it.

    `types` are "bool", "int", "float" (any number), "str", "list", "object" and "null". `minimum` and
    `maximum` are allowed values, `above` and `below` are not. `stages` are the ZeRO stages that read the key:
    none of them for (), and None where the stage does not matter.
    """

    path: str
    types: tuple[str, ...]
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    any_case: bool = False
    """The choices may be written in small and in capital letters."""
    unknown: Literal["error", "ignored", "kept"] | None = None
    """Of a block: what DeepSpeed does with a key in it that it does not know; "kept" where any may stand."""
    auto: Literal["trainer", "accelerate", "deepspeed"] | None = None
    """Who replaces "auto". Under Trainer, accelerate refuses any other one, also DeepSpeed's own."""
    deprecated: str | None = None
    stages: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """The path of the object that holds the key; empty at the top level."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Parameters:
    """The `params` of one optimizer or scheduler.

    An optimizer takes `offloaded` where offload_optimizer moves it off the device, and `takes` elsewhere.
    """

    takes: frozenset[str]
    offloaded: frozenset[str]
    needs: frozenset[str] = field(default_factory=frozenset)


def keys() -> Mapping[str, Key]:
    """Every key by its path, in the order of the paths."""
    return _tables()[0]


def removed() -> Mapping[str, str]:
    """The keys that DeepSpeed refuses because what they set is gone, with what to do instead."""
    return MappingProxyType(_file()["removed"])


def versions() -> Mapping[str, str]:
    """The versions of the packages that the tables are from."""
    return MappingProxyType(_file()["versions"])


def optimizers() -> Mapping[str, Parameters]:
    """What each optimizer takes. The nine names of DeepSpeed's own are read in any case, torch's exactly."""
    return _tables()[1]


def schedulers() -> Mapping[str, Parameters]:
    """What each of DeepSpeed's schedulers takes, and what it cannot do without."""
    return _tables()[2]


@cache
def _file() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(KEYS_FILE.read_text(encoding="utf-8"))
    return loaded


@cache
def _tables() -> tuple[Mapping[str, Key], Mapping[str, Parameters], Mapping[str, Parameters]]:
    found = {path: _key(path, **entry) for path, entry in _file()["keys"].items()}
    optimizers = {
        name: Parameters(frozenset(entry["device"]), frozenset(entry["offloaded"]))
        for name, entry in _file()["optimizers"].items()
    }
    schedulers = {
        name: Parameters(frozenset(entry["takes"]), frozenset(entry["takes"]), frozenset(entry["needs"]))
        for name, entry in _file()["schedulers"].items()
    }
    return MappingProxyType(found), MappingProxyType(optimizers), MappingProxyType(schedulers)


def _key(path: str, **entry: Any) -> Key:
    kind = entry.pop("type")
    types = (kind,) if isinstance(kind, str) else tuple(kind)
    for name in ("choices", "stages"):
        if name in entry:
            entry[name] = tuple(entry[name])
    return Key(path, types, **entry)
