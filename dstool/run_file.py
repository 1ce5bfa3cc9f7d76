"""Change single values of a run file, its comments, order and layout kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dstool import config, files
from dstool.errors import ConfigError

logger = logging.getLogger("dstool.run_file")


def changed(path: Path, changes: Mapping[str, Any]) -> str:
    """The text of the run file at `path` with `changes` to its `train:`; a field that is None is taken out.

    Raises:
        ConfigError: a file that is written in a way in which single lines cannot be changed (an anchor, or
            a mapping in braces).
    """
    text = path.read_bytes().decode("utf-8-sig")
    wanted = _values(text)
    train = wanted.setdefault("train", {})
    for name, value in changes.items():
        text = _with(text, name, value)
        train.pop(name, None)
        train.update({} if value is None else {name: value})
    if _values(text) != wanted:
        said = ", ".join(f"train.{name}: {shown(value)}" for name, value in changes.items())
        raise ConfigError(f"{path} cannot be changed line by line", hint=f"write into it: {said}")
    return text


def write(path: Path, text: str, changes: Mapping[str, Any]) -> None:
    """Put `text`, in which `changes` are made, in the place of the run file, and say what is new in it."""
    files.write_text(path, text)
    for name, value in changes.items():
        words = "is taken out, as the JSON says it" if value is None else f"is {shown(value)} now"
        logger.info("%s: train.%s %s", path, name, words)


def shown(value: Any) -> str:
    """`value` as YAML has it, a number as people write it."""
    if value is None:
        return "null"
    if isinstance(value, bool | str):
        return str(value).lower()
    return f"{value:g}".replace("e-0", "e-")


def _values(text: str) -> dict[str, Any]:
    return yaml.load(text, config.Loader) or {}  # noqa: S506 - a SafeLoader


def _with(text: str, name: str, value: Any) -> str:
    """`text` with train's `name` as `value`; unchanged where there is no place for it."""
    train = _entries(yaml.compose(text, config.Loader)).get("train")
    if train is None:
        return f"{text}\ntrain:\n  {name}: {shown(value)}\n"
    block, entries = train[1], _entries(train[1])
    if name in entries and value is not None:
        old = entries[name][1]
        return text[: old.start_mark.index] + shown(value) + text[old.end_mark.index :]
    if not isinstance(block, yaml.MappingNode) or block.flow_style or not entries:
        return text
    key, old = entries.get(name) or next(reversed(entries.values()))
    start = key.start_mark.index - key.start_mark.column
    end = text.find("\n", old.end_mark.index) + 1 or len(text)
    if name in entries:
        return text[:start] + text[end:]
    line = f"{' ' * key.start_mark.column}{name}: {shown(value)}\n"
    return f"{text[:end]}{'' if text[:end].endswith(chr(10)) else chr(10)}{line}{text[end:]}"


def _entries(node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The key and value nodes of a mapping, by the key."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {str(key.value): (key, value) for key, value in node.value}
