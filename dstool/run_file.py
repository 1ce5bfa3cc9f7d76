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
        ConfigError: a file in which that would change more, such as one with an anchor there.
    """
    text = path.read_bytes().decode("utf-8")
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(mark)
    wanted = _values(text)
    train = wanted["train"] = wanted.get("train") or {}
    try:
        for name, value in changes.items():
            text = _with(text, name, value)
            train.pop(name, None)
            train.update({} if value is None else {name: value})
        whole = _values(text) == wanted
    except yaml.YAMLError:  # an anchor has gone
        whole = False
    if not whole:
        raise ConfigError(
            f"{path} is written in a way that dstool cannot change without touching the rest of it",
            hint=f"under train: in it, {by_hand(changes)}, and give the command again",
        )
    return mark + text


def write(path: Path, text: str, changes: Mapping[str, Any]) -> None:
    """Put `text`, in which `changes` are made, in the place of the run file, and say what is new in it."""
    files.write_text(path, text)
    for name, value in changes.items():
        words = "is taken out, as the JSON says it" if value is None else f"is {shown(value)} now"
        logger.info("%s: train.%s %s", path, name, words)


def by_hand(changes: Mapping[str, Any]) -> str:
    """`changes` as something to do."""
    return ", ".join(
        f"delete {name}" if value is None else f"write {name}: {shown(value)}"
        for name, value in changes.items()
    )


def shown(value: Any) -> str:
    """`value` as YAML has it, a number as people write it."""
    if isinstance(value, bool | str):
        return str(value).lower()
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("e-0", "e-")


def _values(text: str) -> dict[str, Any]:
    return yaml.load(text, config.Loader) or {}  # noqa: S506 - a SafeLoader


def _with(text: str, name: str, value: Any) -> str:
    """`text` with train's `name` as `value`; unchanged where there is no place for it."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    if not text.endswith("\n"):
        text += line_end
    train = _entries(yaml.compose(text, config.Loader)).get("train")
    if train is None:
        end = _document_end(text)
        return f"{text[:end]}{line_end}train:{line_end}  {name}: {shown(value)}{line_end}{text[end:]}"
    block, entries = train[1], _entries(train[1])
    if name in entries and value is not None:
        return _put(text, entries[name][1], shown(value))
    if isinstance(block, yaml.ScalarNode):  # an empty one
        return _put(text, block, f"{line_end}  {name}: {shown(value)}")
    if isinstance(block, yaml.CollectionNode) and block.flow_style:
        comma = ", " if entries else ""
        at = block.end_mark.index - 1
        return f"{text[:at]}{comma}{name}: {shown(value)}{text[at:]}" if name not in entries else text
    key, old = entries.get(name) or next(reversed(entries.values()))
    indent = key.start_mark.column
    end = text.index("\n", _end(old) - 1) + 1
    if name in entries:
        return text[: key.start_mark.index - indent] + text[end:]
    return f"{text[:end]}{' ' * indent}{name}: {shown(value)}{line_end}{text[end:]}"


def _document_end(text: str) -> int:
    """Where the document ends: before the `...` that may say so."""
    for event in yaml.parse(text, config.Loader):
        if isinstance(event, yaml.DocumentEndEvent) and event.explicit and event.start_mark:
            return int(event.start_mark.index)
    return len(text)


def _end(node: yaml.Node) -> int:
    """Where `node` ends. Those over several lines have their own mark behind the comments that follow."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(node, yaml.MappingNode) else last
    return int(node.end_mark.index)


def _put(text: str, node: yaml.Node, value: str) -> str:
    """`text` with `value` in the place of a scalar, which may be empty."""
    gap = "" if value.startswith(("\r", "\n")) else " "
    return text[: node.start_mark.index].rstrip(" ") + gap + value + text[node.end_mark.index :]


def _entries(node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The key and value nodes of a mapping, by the key."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {str(key.value): (key, value) for key, value in node.value}
