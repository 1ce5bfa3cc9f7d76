"""Everything that is wrong with a DeepSpeed JSON, each with its place, and the mends that can be made.

Nothing here reads a file or looks at the machine: the text comes as a `Source`, the rest as `Circumstances`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from dstool import files
from dstool.ds_config import keys, read, refusals, rules, run_rules, source
from dstool.ds_config.looks import Circumstances, Look, Raw, Severity
from dstool.ds_config.source import Edit, Fault, Source
from dstool.errors import ConfigError, NoDevice

ROUNDS: Final = 1000


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what to do about it.

    `line` and `column` count from 1, and are None for what is of the whole file. `consequence` is what
    happens if it is left. `edit` is empty where the mend could change the meaning: `fix` leaves those alone.
    """

    rule: str
    severity: Severity
    path: str
    line: int | None
    column: int | None
    problem: str
    consequence: str
    mend: str
    edit: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A text after its mends, and the findings that were mended."""

    text: str
    mended: tuple[Finding, ...]


def check(text: Source, around: Circumstances) -> tuple[Finding, ...]:
    """What is wrong with `text`, in its order. What a reader cannot get past is the last that is found."""
    found = [_of_fault(text, fault, around.file) for fault in text.faults]
    if text.whole and isinstance(text.value, dict):
        # What is no number has no value that the rules could speak of.
        spoilt = {each.path for each in found if each.rule == "not-a-number"}
        found += [_of_raw(text, raw) for raw in _raws(text, around) if ".".join(raw.at) not in spoilt]
        if not all(fault.edits for fault in text.faults):
            # The rest is mended in a text that is JSON, and this one does not become it by itself.
            of_json = {fault.rule for fault in text.faults}
            found = [each if each.rule in of_json else replace(each, edit=()) for each in found]
    return tuple(sorted(found, key=lambda each: (each.line or 0, each.column or 0)))


def _raws(text: Source, around: Circumstances) -> list[Raw]:
    """What the rules find, also within the blocks of a wrong name or place, read as what they mean.

    Nothing of these is mended while their name is no more than a guess.
    """
    look = Look(text.value, text, around)
    raws = [raw for rule in (*rules.RULES, *run_rules.RULES, *refusals.RULES) for raw in rule(look)]
    raws = _told_once(raws)
    homes = _homes(look, raws)
    for raw in _raws(text.moved(homes), around) if homes else ():
        for path, home in homes.items():
            if raw.at[: len(home)] == home:
                raws.append(replace(raw, at=(*path, *raw.at[len(home) :]), edits=(), meant=None))
    return raws


def _homes(look: Look, raws: Iterable[Raw]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The blocks of a wrong name or place by their paths, where only one comes near the one that is meant."""
    meant = {raw.at: raw.meant for raw in raws if raw.meant}
    return {
        path: home
        for path, home in meant.items()
        if isinstance(look.get(*path), dict)
        and (key := keys.keys().get(".".join(home))) is not None
        and "object" in key.types
        and isinstance(look.get(*home[:-1]), Mapping)
        and not look.has(*home)
        and list(meant.values()).count(home) == 1
    }


def fix(text: str, around: Circumstances) -> Fixed:
    """Make every mend that cannot change the meaning, until none is left to make."""
    mended: list[Finding] = []
    crlf = text.count("\r\n") == text.count("\n") > 0  # the edits have bare line feeds
    for _ in range(ROUNDS):
        parsed = source.parse(text)
        faults = {fault.rule for fault in parsed.faults}
        mends = [each for each in check(parsed, around) if each.edit and (not faults or each.rule in faults)]
        chosen = _apart(mends)
        if not faults and source.parse(_mended(text, chosen)).faults:
            # One that spoils the file holds up no other.
            chosen = [each for each in chosen if not source.parse(_mended(text, [each])).faults]
        changed = _mended(text, chosen)
        if changed == text or (not faults and source.parse(changed).faults):
            break
        text = changed
        mended += chosen
    if crlf:
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    return Fixed(text, tuple(mended))


def _mended(text: str, mends: Iterable[Finding]) -> str:
    return source.apply(text, [edit for each in mends for edit in each.edit])


def _apart(mends: Iterable[Finding]) -> list[Finding]:
    """Those of the mends that do not touch each other; the others wait for the next round."""
    taken: list[Edit] = []
    chosen = []
    for each in mends:
        if not any(one.start <= two.end and two.start <= one.end for one in each.edit for two in taken):
            taken += each.edit
            chosen.append(each)
    return chosen


# --- places ------------------------------------------------------------------------------------------------

# The rule about what stands in the run file alone.
_OF_RUN_FILE: Final = "run-file"

# Rules about the value of a key that is there; all others point at the key.
_OF_VALUES: Final = frozenset(
    {
        "auto-chosen",
        "auto-unfilled",
        "batch",
        "both-precisions",
        "contradiction",
        "mismatch",
        "null-block",
        "null-param",
        "nvme-path",
        "no-device",
        "offload-stage",
        "optimizer",
        "pinned",
        "precision",
        "scheduler",
        "wrong-type",
        "wrong-value",
    }
)

_FAULTS: Final = MappingProxyType(
    {
        "byte-order-mark": ("Transformers cannot read the file", "delete it, or save as UTF-8 without it"),
        "comment": ("Transformers cannot read the file", "delete the comment"),
        "duplicate-key": (
            "Transformers takes the last of the two without a word, DeepSpeed refuses the file",
            "delete the first, as the last is the one that counts",
        ),
        "empty": ("nothing can be trained with it", "{anew} writes one"),
        "missing-colon": ("the file cannot be read", "put a colon after the key"),
        "missing-comma": ("the file cannot be read", "put a comma after the value before it"),
        "nested": ("the file cannot be read", "{anew} writes a new one"),
        "not-a-number": ("no other program can read the file", "write a number"),
        "python-word": ("the file cannot be read", "write true, false or null"),
        "single-quotes": ("the file cannot be read", "write double quotes"),
        "top-level": ("the file cannot be used", "{anew} writes a new one"),
        "trailing-comma": ("the file cannot be read", "delete the comma"),
        "unclosed": ("the file cannot be read", "close it"),
        "unquoted-key": ("the file cannot be read", "put the key in double quotes"),
    }
)


def _of_fault(text: Source, fault: Fault, file: str) -> Finding:
    consequence, mend = _FAULTS.get(fault.rule, ("the file cannot be read", "correct the line"))
    mend = mend.format(anew=read.anew(file))
    line = column = None
    if fault.position is not None:
        line, column = text.line_column(fault.position)
    path = _printable(".".join(map(str, _around(text, fault.position))))
    words = _printable(fault.words)
    return Finding(fault.rule, "error", path, line, column, words, consequence, mend, fault.edits)


def _around(text: Source, position: int | None) -> source.Path:
    """The innermost path that a position lies in."""
    if position is None:
        return ()
    inside = [path for path, place in text.places.items() if place.key <= position < place.end]
    return max(inside, key=len, default=())


def _of_raw(text: Source, raw: Raw) -> Finding:
    path: source.Path = tuple(raw.at)
    while path and path not in text.places:
        counted = tuple(int(part) if str(part).isdecimal() else part for part in path)
        path = counted if counted in text.places else path[:-1]
    place = text.places[path]
    of_value = raw.rule in _OF_VALUES and len(path) == len(raw.at)
    line = column = None
    if raw.rule != _OF_RUN_FILE:
        line, column = text.line_column(place.start if of_value else place.key)
    dotted, words, mend = map(_printable, (".".join(raw.at), raw.problem, raw.mend))
    return Finding(raw.rule, raw.severity, dotted, line, column, words, raw.consequence, mend, raw.edits)


def _printable(text: str) -> str:
    """`text` on one line, and without what no terminal takes, such as half a surrogate pair."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


_NAMELESS: Final = frozenset(
    {"unknown-key", "wrong-block", "removed-key", "aio-in-zero", "optimizer-param", "scheduler-param"}
)


def _told_once(raws: Iterable[Raw]) -> list[Raw]:
    """The findings without those that only follow from another."""
    raws = list(raws)
    nameless = {raw.at for raw in raws if raw.rule in _NAMELESS or raw.at == ("bfloat16",)}
    wrong = {raw.at for raw in raws if raw.rule in ("wrong-type", "wrong-value")}
    refused = {raw.at for raw in raws if raw.severity == "error" and raw.rule != "old-name"}
    seen: set[tuple[str, ...]] = set()
    kept = []
    for raw in raws:
        if raw.rule in ("wrong-type", "wrong-value"):
            if raw.at in seen:
                continue
            seen.add(raw.at)
        if raw.at in wrong and raw.rule in ("auto-unfilled", "contradiction", "null-block"):
            continue
        if raw.at in refused and raw.rule == "unread-key":
            continue
        above = {raw.at[:length] for length in range(1, len(raw.at) + 1)}
        if raw.rule in ("auto-unfilled", "null-param", "unread-key") and above & nameless:
            continue
        if raw.rule == "old-name" and raw.at in refused:
            continue
        kept.append(raw)
    return kept


# --- before a run ------------------------------------------------------------------------------------------

# What `read` and `read.reconcile` set right by themselves, with a note.
_SETTLED: Final = frozenset({"aio-in-zero", "byte-order-mark", "old-name"})


def refusal(
    findings: Iterable[Finding], *, json_name: str, run_name: str, places: bool
) -> ConfigError | NoDevice | None:
    """The one error that names all the errors among `findings` that stop a run; None without any.

    It is `NoDevice` where another machine is all that is needed.

    Args:
        findings: of `check`.
        json_name: what the JSON is called.
        run_name: what the run file is called.
        places: whether lines and columns mean something.
    """
    errors = [each for each in findings if each.severity == "error" and not _is_settled(each)]
    if not errors:
        return None
    differ = [each for each in errors if each.rule == "mismatch"]
    wrong = [each for each in errors if each.rule != "mismatch"]
    parts = [
        f"{run_name if each.rule == _OF_RUN_FILE else _place(each, json_name, places=places)}: {each.problem}"
        for each in wrong
    ]
    command = f"dstool check {files.typed(json_name)}" if places else "dstool check"
    hint = f"{command} shows each with its place and mend"
    if any(each.edit for each in errors) and places:
        hint += f", {command} --fix mends what is certain"
    if differ:
        both = "; ".join(each.problem for each in differ)
        parts.append(f"{json_name} and {run_name} disagree: {both}")
    if differ and not wrong:
        hint = f'in {json_name} set to "auto": {", ".join(each.path for each in differ)}'
    return error_of(errors)("; ".join(parts), hint=hint)


def error_of(errors: Iterable[Finding]) -> type[ConfigError | NoDevice]:
    """What to raise for `errors`: `NoDevice` where another machine is all that is needed."""
    return NoDevice if all(each.rule == "no-device" for each in errors) else ConfigError


def _is_settled(finding: Finding) -> bool:
    filled = finding.rule in ("scheduler-needs", "null-param") and bool(finding.edit)
    return finding.rule in _SETTLED or filled


def _place(finding: Finding, name: str, *, places: bool) -> str:
    return f"{name}:{finding.line}:{finding.column}" if places and finding.line else name
