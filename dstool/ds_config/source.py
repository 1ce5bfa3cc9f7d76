"""The text of a DeepSpeed JSON with the place of every key and value, read on past what is broken.

DeepSpeed's own loader is hjson, which takes comments (deepspeed 0.19.8 runtime/config.py); Transformers reads
the same file with `json`, which does not and which keeps the last of two equal keys. Here it is JSON and
nothing else: whatever is not is a `Fault`, with the edits that mend it where that cannot change the meaning.
"""

from __future__ import annotations

import copy
import json
import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Path = tuple[str | int, ...]
"""Keys and positions in lists, from the top level on."""

DEEPEST: Final = 100

_LINE_END: Final = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Edit:
    """Put `text` in place of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fault:
    """Something that is not JSON. `position` is None where it is of the whole file."""

    rule: str
    position: int | None
    words: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a value stands, and the key before it: offsets into the text, ends exclusive."""

    key: int
    key_end: int
    start: int
    end: int


@dataclass(frozen=True)
class Source:
    """A parsed text. `whole` is false where the reader had to stop, and `value` is then incomplete."""

    text: str
    value: Any
    places: Mapping[Path, Place]
    faults: tuple[Fault, ...]
    whole: bool

    def line_column(self, position: int) -> tuple[int, int]:
        """The line and column, both from 1, of an offset."""
        line = bisect_right(self._starts, position)
        return line, position - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a line, counted from 1."""
        return _LINE_END.split(self.text[self._starts[number - 1] :], maxsplit=1)[0]

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line starts."""
        return [0, *(end.end() for end in _LINE_END.finditer(self.text))]

    def moved(self, homes: Mapping[tuple[str, ...], tuple[str, ...]]) -> Source:
        """The same text, read as if each of the entries stood at its home, in an object that is there."""
        value, places = copy.deepcopy(self.value), dict(self.places)
        for path, home in homes.items():
            holder, target = _at(value, path[:-1]), _at(value, home[:-1])
            target[home[-1]] = holder.pop(path[-1])
            for old in [old for old in places if old[: len(path)] == path]:
                places[home + old[len(path) :]] = places.pop(old)
        return replace(self, value=value, places=places)

    def deletion(self, path: Path) -> Edit:
        """The edit that takes an entry of an object out, with the comma that goes with it."""
        place = self.places[path]
        holder = self.places[path[:-1]]
        after = _gap(self.text, place.end)
        if self.text[after : after + 1] == ",":
            return Edit(place.key, _gap(self.text, after + 1), "")
        before = len(self.text[: place.key].rstrip())
        if self.text[before - 1 : before] == ",":
            return Edit(before - 1, place.end, "")
        return Edit(holder.start + 1, place.end, "")

    def replacement(self, path: Path, value: Any) -> Edit:
        """The edit that puts `value` in place of the one at `path`."""
        place = self.places[path]
        return Edit(place.start, place.end, json.dumps(value, ensure_ascii=False))

    def renaming(self, path: Path, name: str) -> Edit:
        """The edit that calls the entry at `path` by another name."""
        place = self.places[path]
        return Edit(place.key, place.key_end, json.dumps(name, ensure_ascii=False))

    def addition(self, path: Path, *texts: str) -> Edit:
        """The edit that adds entries, `"key": value` as JSON text, at the end of the object at `path`."""
        place = self.places[path]
        last = len(self.text[: place.end - 1].rstrip())
        indent = "  " * (len(path) + 1)
        if self.text[last - 1] == "{":
            entries = f",\n{indent}".join(texts)
            return Edit(last, place.end - 1, f"\n{indent}{entries}\n{indent[2:]}")
        comma = f",\n{indent}" if "\n" in self.text[place.start : place.end] else ", "
        return Edit(last, last, "".join(comma + text for text in texts))


def _at(value: Any, path: Path) -> Any:
    for name in path:
        value = value[name]
    return value


def apply(text: str, edits: Iterable[Edit]) -> str:
    """`text` with `edits` made, which do not overlap."""
    for edit in sorted(edits, key=lambda each: (each.start, each.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def of_value(value: Any) -> Source:
    """The source of a mapping that was written into the run file, for those who ask for places."""
    try:
        return parse(json.dumps(value, indent=2, default=str, ensure_ascii=False))
    except (ValueError, RecursionError):
        return Source("", None, {}, (Fault("nested", None, _TOO_DEEP),), False)


def parse(text: str) -> Source:
    """Read `text`, whatever it holds; never raises."""
    reader = _Reader(text)
    whole, value = True, None
    try:
        value = reader.document()
    except _StopError:
        whole, value = False, reader.top
    return Source(text, value, reader.places, tuple(reader.faults), whole)


# --- the reader --------------------------------------------------------------------------------------------

_TOO_DEEP: Final = "nested too deeply to be a DeepSpeed configuration"
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_COMMENT: Final = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_STRING: Final = re.compile(r'"((?:\\.|[^"\\\r\n])*)"')
_QUOTED: Final = re.compile(r"'([^'\\\n\"]*)'")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NAME: Final = re.compile(r"[A-Za-z_$][\w$]*")
_NOT_FINITE: Final = re.compile(r"[-+]?(?:NaN|Infinity)\b")
_FOUND: Final = re.compile(r'"(?:\\.|[^"\\\n])*"?|[\w.+-]+|.', re.DOTALL)
_WORDS: Final[Mapping[str, Any]] = MappingProxyType({"true": True, "false": False, "null": None})
_PYTHON: Final = MappingProxyType({"True": True, "False": False, "None": None})


class _StopError(Exception):
    """What follows cannot be understood."""


def _gap(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


@dataclass
class _Reader:
    """One reading under way."""

    text: str
    at: int = 0
    top: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def document(self) -> Any:
        if self.text.startswith("\ufeff"):
            words = "the file begins with a byte-order mark, which Transformers refuses"
            self.fault("byte-order-mark", 0, words, Edit(0, 1, ""))
            self.at = 1
        self.skip()
        if self.at == len(self.text):
            self.faults.append(Fault("empty", None, "the file is empty"))
            raise _StopError
        start = self.at
        if self.text[start] not in "{[\"-0123456789tfnTFN'":
            self.stop("syntax", start, f"expected {{, found {self.found()}")
        self.top = self.value(())
        self.skip()
        if self.at < len(self.text):
            self.stop("syntax", self.at, f"nothing may follow the closing brace, found {self.found()}")
        if not isinstance(self.top, dict):
            self.stop("top-level", start, "the top level must be an object, { ... }")
        return self.top

    # what is wrong

    def fault(self, rule: str, position: int | None, words: str, *edits: Edit) -> None:
        self.faults.append(Fault(rule, position, words, edits))

    def stop(self, rule: str, position: int | None, words: str) -> NoReturn:
        self.fault(rule, position, words)
        raise _StopError

    def ended(self) -> NoReturn:
        words = "the file ends too early: a closing } or ] is missing"
        self.stop("unclosed", len(self.text.rstrip()), words)

    def found(self) -> str:
        match = _FOUND.match(self.text, self.at)
        return match[0][:40] if match else "the end"

    def skip(self) -> None:
        """Go on to what is neither blank nor comment."""
        self.at = _gap(self.text, self.at)
        while match := _COMMENT.match(self.text, self.at):
            words = 'JSON has no comments; delete it, or make it a key "_comment": "..."'
            self.fault("comment", match.start(), words, self._without(match))
            self.at = _gap(self.text, match.end())

    def _without(self, comment: re.Match[str]) -> Edit:
        """A comment goes with the blanks before it, and with its line where it has one to itself."""
        start = len(self.text[: comment.start()].rstrip(" \t"))
        end = comment.end()
        if self.text[start - 1 : start] in ("\n", "") and self.text[end : end + 1] == "\n":
            return Edit(start, end + 1, "")
        # Two words that a comment kept apart stay apart.
        return Edit(start, end, "" if self.text[end : end + 1] in ("", "\n", "\r") else " ")

    # values

    def value(self, path: Path) -> Any:
        if len(path) > DEEPEST:
            self.stop("nested", None, _TOO_DEEP)
        if self.at == len(self.text):
            self.ended()
        start = self.at
        result: Any
        first = self.text[start]
        if first == "{":
            result = self.object(path)
        elif first == "[":
            result = self.array(path)
        elif first in "\"'":
            result = self.string()
        else:
            result = self.word()
        known = self.places.get(path)
        key, key_end = (known.key, known.key_end) if known else (start, start)
        self.places[path] = Place(key, key_end, start, self.at)
        return result

    def string(self) -> str:
        start, text = self.at, self.text
        if text[start] == "'":
            return self.single_quoted(start)
        match = _STRING.match(text, start)
        if match is None:
            end = _LINE_END.search(text, start)
            if end is None:
                self.stop("unclosed", start, "the string that starts here is never closed")
            self.stop(
                "unclosed",
                end.start(),
                "a line break or tab inside a string: its closing quote may be missing",
            )
        self.at = match.end()
        try:
            return str(json.loads(match[0], strict=True))
        except json.JSONDecodeError as error:
            words = "a backslash in a string is written twice"
            if "control" in error.msg:
                words = "a line break or tab inside a string: its closing quote may be missing"
            self.fault("syntax", start + error.pos, words)
            return match[1]

    def single_quoted(self, start: int) -> str:
        match = _QUOTED.match(self.text, start)
        if match is None or not match[1].isprintable():
            self.stop("single-quotes", start, "strings are written in double quotes")
        edit = Edit(start, match.end(), f'"{match[1]}"')
        self.fault("single-quotes", start, "strings are written in double quotes", edit)
        self.at = match.end()
        return match[1]

    def word(self) -> Any:
        """A number, true, false or null; or what people take for one of these."""
        start, text = self.at, self.text
        if match := _NOT_FINITE.match(text, start):
            self.at = match.end()
            self.fault("not-a-number", start, f"{match[0]} is not a number that JSON can hold")
            return None
        if (match := _NUMBER.match(text, start)) and match[0]:
            return self.number(start, match)
        name = _NAME.match(text, start)
        if name and name[0] in _WORDS:
            self.at = name.end()
            return _WORDS[name[0]]
        if name and name[0] in _PYTHON:
            self.at, value = name.end(), _PYTHON[name[0]]
            words = f"{name[0]} is Python; JSON has true, false and null"
            self.fault("python-word", start, words, Edit(start, self.at, json.dumps(value)))
            return value
        return self.stop("syntax", start, f"expected a value, found {self.found()}")

    def number(self, start: int, match: re.Match[str]) -> Any:
        self.at = match.end()
        try:
            value = float(match[0]) if re.search(r"[.eE]", match[0]) else int(match[0])
        except ValueError:  # int() refuses more than 4300 digits
            self.stop("not-a-number", None, "a number in it has too many digits")
        if isinstance(value, float) and not math.isfinite(value):
            self.fault("not-a-number", start, f"{match[0]} is not a number that JSON can hold")
            value = 0.0
        if self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] in "._+-"):
            self.at = start
            self.stop("syntax", start, f"expected a value, found {self.found()}")
        return value

    # what holds values

    def array(self, path: Path) -> list[Any]:
        items: list[Any] = []

        def item() -> None:
            items.append(self.value((*path, len(items))))

        self.series("]", item, lambda: self.text[self.at] in "{[\"'-0123456789tfn")
        return items

    def object(self, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if not path:
            self.top = result

        def entry() -> None:
            key_start = self.at
            key = self.key()
            key_end, here = self.at, (*path, key)
            self.colon()
            first = self.places.get(here)
            if first is not None:
                self.forget(here)
            self.places[here] = Place(key_start, key_end, self.at, self.at)
            result[key] = self.value(here)
            if first is not None:
                self.duplicate(first, key_start, key_end)

        self.series("}", entry, lambda: bool(re.match(r"[\"'\w$]", self.text[self.at])))
        return result

    def series(self, close: str, one: Callable[[], None], begins: Callable[[], bool]) -> None:
        """What stands between a bracket and `close`, parted by commas."""
        self.at += 1
        self.skip()
        while True:
            if self.at == len(self.text):
                self.ended()
            if self.text[self.at] == close:
                self.at += 1
                return
            one()
            end = self.at
            self.skip()
            if self.at == len(self.text):
                self.ended()
            if self.text[self.at] == ",":
                self.comma(close)
            elif self.text[self.at] != close:
                words = f"expected a comma before {self.found()}"
                if not begins():
                    self.stop("missing-comma", self.at, words)
                self.fault("missing-comma", self.at, words, Edit(end, end, ","))

    def comma(self, close: str) -> None:
        comma = self.at
        self.at += 1
        self.skip()
        if self.text[self.at : self.at + 1] == close:
            words = f"a comma before {close} is one too many"
            self.fault("trailing-comma", comma, words, Edit(comma, comma + 1, ""))
        while close == "}" and self.text[self.at : self.at + 1] == ",":
            self.fault("trailing-comma", self.at, "a second comma", Edit(self.at, self.at + 1, ""))
            self.at += 1
            self.skip()

    def key(self) -> str:
        first = self.text[self.at]
        if first in "\"'":
            return self.string()
        words = f"expected a key in double quotes, found {self.found()}"
        name = _NAME.match(self.text, self.at)
        if name is None:
            self.stop("unquoted-key", self.at, words)
        self.fault("unquoted-key", self.at, words, Edit(self.at, name.end(), f'"{name[0]}"'))
        self.at = name.end()
        return name[0]

    def colon(self) -> None:
        end = self.at
        self.skip()
        if self.at == len(self.text):
            self.ended()
        if self.text[self.at] != ":":
            words = f"expected a colon before {self.found()}"
            if self.text[self.at] in ",}]=":
                self.stop("missing-colon", self.at, words)
            self.fault("missing-colon", self.at, words, Edit(end, end, ":"))
        else:
            self.at += 1
        self.skip()

    def forget(self, path: Path) -> None:
        """The places within the first of two equal keys are those of nothing."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]

    def duplicate(self, first: Place, start: int, end: int) -> None:
        """The last of two counts, as in Transformers, so the first is the one to delete."""
        after = _gap(self.text, first.end)
        edits: tuple[Edit, ...] = ()
        if self.text[after : after + 1] == ",":
            edits = (Edit(first.key, _gap(self.text, after + 1), ""),)
        line = len(_LINE_END.findall(self.text, 0, first.key)) + 1
        words = f"{self.text[start:end]} is given twice, first on line {line}"
        self.fault("duplicate-key", start, words, *edits)
