"""The operations of a pickle, looked over before any of them is carried out.

`pickletools.genops` gives them one by one, which for the files of a hundred ranks takes many seconds. Here
a regular expression made from its table passes over whole runs of them.
"""

from __future__ import annotations

import pickletools
import re
from types import MappingProxyType
from typing import Final

LARGE_MEMO: Final = 2**20
"""Entries of a memo, of 16 bytes each, that any pickle may ask for."""

MOST_TUPLES: Final = 1000
"""Tuples each around the one before, of which any pickle may build so many at once."""

_STOP, _PUT, _LONG_BINPUT, _DUP = b".", b"p", b"r", b"2"
_LINES: Final = MappingProxyType({"stringnl_noescape_pair": 2})
_COUNTED: Final[MappingProxyType[bytes, int]] = MappingProxyType(
    {
        each.code.encode("latin-1"): int(each.arg.name[-1])
        for each in pickletools.opcodes
        if each.arg is not None and each.arg.n < pickletools.UP_TO_NEWLINE
    }
)
"""The operations that say how many bytes follow, and of how many bytes that number is."""


def _simple() -> re.Pattern[bytes]:
    """Matches a run of operations that say no length and fill no large memo."""
    simple = [rb"r..[\x00-\x0f]\x00"]
    for each in pickletools.opcodes:
        code = each.code.encode("latin-1")
        if code in (_STOP, _PUT, _LONG_BINPUT, _DUP, *_COUNTED):
            continue
        size = 0 if each.arg is None else each.arg.n
        lines = 0 if each.arg is None else _LINES.get(each.arg.name, 1)
        simple.append(re.escape(code) + (b"." * size if size >= 0 else rb"[^\n]*\n" * lines))
    # not without an end: the expression keeps a note of every one of them
    return re.compile(rb"(?:%s){0,1000}" % b"|".join(simple), re.DOTALL)


_SIMPLE: Final = _simple()
_NUMBER: Final = re.compile(rb"(\d{1,20})\n")


def refuse_bombs(program: bytes) -> None:
    """Raise `ValueError` for a pickle whose few bytes ask for much memory or time, or for a deep stack.

    The unpickler makes room for a memo, or for bytes, before it looks whether they are there. Tuples of
    tuples are hashed one inside the other, without an end where each holds the one before twice: DUP is for
    that, and no pickler writes it. Those that are tied together through the memo are not told.
    """
    if b"\x85" * MOST_TUPLES in program:
        raise ValueError("its pickle builds tuples deeper than any checkpoint has")
    at = 0
    while at < len(program):
        run = _SIMPLE.match(program, at)
        if run is not None and run.end() > at:
            at = run.end()
            continue
        code, at = program[at : at + 1], at + 1
        if code == _STOP:
            return
        if code == _DUP:
            raise ValueError("its pickle doubles a value, as no pickler does")
        if code in _COUNTED:
            data = at + _COUNTED[code]
            at = data + int.from_bytes(program[at:data], "little")
        else:
            at = _past_memo(program, code, at)
    raise ValueError("its pickle is cut short")


def _past_memo(program: bytes, code: bytes, at: int) -> int:
    """The byte after an operation that puts something into the memo at the number that follows."""
    line = _NUMBER.match(program, at) if code == _PUT else None
    if code == _LONG_BINPUT:
        end, number = at + 4, int.from_bytes(program[at : at + 4], "little")
    elif line is not None:
        end, number = line.end(), int(line[1])
    else:
        raise ValueError(f"its pickle has no operation at byte {at - 1}")
    if number > max(len(program), LARGE_MEMO):
        raise ValueError("its pickle asks for a memo that is larger than itself")
    return end
