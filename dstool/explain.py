"""Say what a key of the DeepSpeed JSON means, what it costs, and what sets it."""

from __future__ import annotations

import difflib
import json
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dstool.ds_config import glossary
from dstool.ds_config.glossary import Lang
from dstool.ds_config.keys import Key, keys, removed, versions
from dstool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WIDTH: Final = 100
PATH_WIDTH: Final = 44
MOST_CANDIDATES: Final = 12


@dataclass(frozen=True)
class KeyList:
    """Every topic and key, each with one line."""

    topics: Mapping[str, str]
    keys: Mapping[str, str]
    lang: Lang


@dataclass(frozen=True)
class TopicText:
    """One topic, as lines of text."""

    topic: str
    title: str
    lines: tuple[str, ...]
    lang: Lang


@dataclass(frozen=True)
class KeyText:
    """All that is known of one key. `inside` are the names in a block; `cost` may be empty."""

    key: str
    meaning: str
    types: tuple[str, ...]
    default: Any
    choices: tuple[Any, ...] | None
    minimum: float | None
    maximum: float | None
    above: float | None
    below: float | None
    auto: str | None
    auto_from: str | None
    stages: tuple[int, ...] | None
    deprecated: str | None
    inside: tuple[str, ...]
    cost: str
    set_by: tuple[str, ...]
    lang: Lang


def explain(name: str | None = None, lang: Lang | None = None) -> KeyList | TopicText | KeyText:
    """What `name` is, a topic or any part of a key's path that fits no other; without it, a list of all.

    `lang` is that of the locale where it is not given.

    Raises:
        ConfigError: `name` fits several keys, or none.
    """
    lang = lang or glossary.language()
    if name is None:
        return _everything(lang)
    found = find(name)
    if topic := glossary.topics(lang).get(found):
        return TopicText(found, topic.title, topic.lines, lang)
    key, entry = keys()[found], glossary.entries(lang).get(found)
    return KeyText(
        key=found,
        meaning=entry.meaning if entry else "",
        types=key.types,
        default=key.default,
        choices=key.choices,
        minimum=key.minimum,
        maximum=key.maximum,
        above=key.above,
        below=key.below,
        auto=key.auto,
        auto_from=glossary.AUTO_FROM.get(found),
        stages=key.stages,
        deprecated=key.deprecated,
        inside=tuple(other.name for other in keys().values() if other.block == found),
        cost=entry.cost if entry else "",
        set_by=glossary.set_by(found),
        lang=lang,
    )


# --- finding -------------------------------------------------------------------------------------------


def find(name: str) -> str:
    """The path or topic that `name` stands for.

    A whole path or topic comes before the end of a path, and that before any part of one.
    """
    wanted = name.strip().strip("\":'.").replace("-", "_").lower()
    known, topics = keys(), glossary.topics("en")
    if wanted in known or wanted in topics:
        return wanted
    if wanted in removed():
        raise _gone(wanted)
    ends = [path for path in known if path.endswith(f".{wanted}")]
    parts = [item for item in (*topics, *known) if wanted and wanted in item]
    found = _narrowed(ends) or _narrowed(parts)
    if len(found) == 1:
        return found[0]
    if found:
        # Those that an option or the run file sets are the likelier ones.
        found.sort(key=lambda item: item in known and not glossary.set_by(item))
        shown = ", ".join(found[:MOST_CANDIDATES])
        more = f" and {len(found) - MOST_CANDIDATES} more" if len(found) > MOST_CANDIDATES else ""
        raise ConfigError(f"{name} fits several keys: {shown}{more}", hint=f"dstool explain {found[0]}")
    gone = [path for path in removed() if path.endswith(f".{wanted}") or wanted.startswith(f"{path}.")]
    raise _gone(gone[0]) if gone and wanted else _unknown(name, wanted)


def _gone(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: DeepSpeed {versions()['deepspeed']} refuses this key: {removed()[path]}",
        hint="take it out of the JSON",
    )


def _narrowed(found: list[str]) -> list[str]:
    """`found` without what is outdated, and as one block where all the rest is inside it."""
    if len(found) == 1:
        return found
    known = keys()
    current = [path for path in found if not _outdated(path)] or found
    for block in current:
        if block in known and all(path == block or path.startswith(f"{block}.") for path in current):
            return [block]
    return current


def _outdated(path: str) -> bool:
    key = keys().get(path)
    return key is not None and bool(key.deprecated or (key.block and _outdated(key.block)))


def _unknown(name: str, wanted: str) -> ConfigError:
    if not wanted:
        return ConfigError("no key of DeepSpeed was named", hint="dstool explain")
    last = wanted.rpartition(".")[2]
    if last != wanted and last in keys():
        return ConfigError(f"no key {name}: {last} stands at the top level", hint=f"dstool explain {last}")
    known = keys()
    last = wanted.rpartition(".")[2]
    names = {key.name: path for path, key in known.items()} | {path: path for path in known}
    names |= {topic: topic for topic in glossary.topics("en")}
    meant = [glossary.MEANT[wanted]] if wanted in glossary.MEANT else []
    near = meant or difflib.get_close_matches(wanted, names, n=1)
    near = near or difflib.get_close_matches(last, names, n=1)
    if not near:
        return ConfigError(f"{name}: no key of DeepSpeed {versions()['deepspeed']}", hint="dstool explain")
    return ConfigError(
        f"{name}: no key of DeepSpeed {versions()['deepspeed']}, did you mean {near[0]}?",
        hint=f"dstool explain {near[0]}",
    )


# --- showing -------------------------------------------------------------------------------------------


def show(result: KeyList | TopicText | KeyText) -> str:
    """`result` as text, at most 100 columns wide where it is not a table."""
    if isinstance(result, TopicText):
        return "\n".join((result.title, "", *result.lines))
    lines = _list_lines(result) if isinstance(result, KeyList) else _key_lines(result)
    return "\n".join(lines)


def _everything(lang: Lang) -> KeyList:
    words = glossary.entries(lang)
    lines = {path: words[path].summary if path in words else _kind(key) for path, key in keys().items()}
    return KeyList({name: topic.title for name, topic in glossary.topics(lang).items()}, lines, lang)


def _kind(key: Key) -> str:
    types = "/".join(key.types)
    return types if key.default is None else f"{types}, {_value(key.default)}"


def _list_lines(result: KeyList) -> Iterator[str]:
    labels = glossary.labels(result.lang)
    for label, block in (("topics", result.topics), ("keys", result.keys)):
        yield labels[label]
        yield from (f"  {name:<{PATH_WIDTH}}  {line}" for name, line in block.items())


def _key_lines(text: KeyText) -> Iterator[str]:
    labels = glossary.labels(text.lang)
    yield text.key
    yield from (f"  {line}" for line in _wrapped(text.meaning or labels["no_text"], WIDTH - 2))
    rows = [(labels[name], value) for name, value in _rows(text, labels) if value]
    width = max(_columns(label) for label, _ in rows)
    for label, value in rows:
        first, *rest = _wrapped(value, WIDTH - 4 - width)
        yield f"  {label}{' ' * (width - _columns(label))}  {first}"
        yield from (f"  {' ' * width}  {line}" for line in rest)


def _rows(text: KeyText, labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "type", labels["or"].join(text.types)
    if not text.inside:
        yield "default", labels["required"] if text.default is None else _value(text.default)
    yield "allowed", _allowed(text, labels)
    yield (
        "auto",
        {"trainer": "Trainer", "deepspeed": "DeepSpeed"}.get(text.auto or "", text.auto or "")
        + (f": {text.auto_from}" if text.auto_from else ""),
    )
    if text.stages is not None:
        yield "stages", ", ".join(map(str, text.stages)) or labels["no_stage"]
    yield "deprecated", (text.deprecated or "").removeprefix("use ").replace(" or ", labels["or"])
    yield "inside", ", ".join(text.inside)
    yield "cost", text.cost
    yield "set_by", ", ".join(map(_place, text.set_by)) or labels["file"]


def _place(name: str) -> str:
    return f"dstool init-config {name}" if name.startswith("--") else f"dstool.yaml {name}"


def _allowed(text: KeyText, labels: Mapping[str, str]) -> str:
    if text.choices:
        return ", ".join(map(_value, text.choices))
    limits = {"at_least": text.minimum, "above": text.above, "at_most": text.maximum, "below": text.below}
    return ", ".join(
        labels[name].format(_value(limit)) for name, limit in limits.items() if limit is not None
    )


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) and value else json.dumps(value)


def _wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` columns, broken at spaces; Korean letters take two columns."""
    lines: list[str] = []
    for word in text.split():
        if lines and _columns(lines[-1]) + 1 + _columns(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
