"""What a pickle would make, looked over before any of it is made (CPython, Modules/_pickle.c)."""

from __future__ import annotations

import pickletools
from typing import Any, Final

LARGE_MEMO: Final = 2**20
"""Entries of a memo, of 16 bytes each, that any pickle may ask for."""

MOST_VALUES: Final = 10_000
"""Values in a tuple and in all the tuples inside it. The state of Python's `random` has 628."""

_MARK: Final = 0
_COLLECTIONS: Final = frozenset(
    {
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_SET", "ADDITEMS", "FROZENSET"),
    }
)
"""What makes or fills a value that is not hashed by what it holds."""
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})


def refuse_bombs(program: bytes) -> None:
    """Raise `ValueError` for a pickle whose few bytes ask for much memory or time, or for a deep stack.

    The unpickler makes room for a memo, or for bytes, before it looks whether they are there. As a key, a
    tuple is hashed with all the tuples inside it, which is without an end where each holds another twice.
    """
    try:
        _follow(program)
    except (IndexError, KeyError) as error:
        raise ValueError("its pickle takes what it has not put there") from error
    except ValueError as error:
        raise ValueError(f"its pickle is damaged: {error}") from error


def _follow(program: bytes) -> None:
    """Go through the operations with the number of values, at most, that hashing each object would meet."""
    stack: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in _PUTS:
            place: int = len(memo) if argument is None else argument
            if place > max(len(program), LARGE_MEMO):
                raise ValueError("it asks for a memo that is larger than itself")
            memo[place] = stack[-1]
        elif opcode.name in _GETS:
            stack.append(memo[argument])
        elif opcode.name == "DUP":
            stack.append(stack[-1])
        elif opcode.name == "MARK":
            stack.append(_MARK)
        else:
            taken = _take(stack, opcode)
            values = 1 if opcode.name in _COLLECTIONS else 1 + sum(taken)
            if values > MOST_VALUES:
                raise ValueError(f"it builds tuples of more than {MOST_VALUES} values")
            stack += [values] * len(opcode.stack_after)


def _take(stack: list[int], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Take from the stack what the operation takes: objects, or all above a mark and what is below it."""
    above: list[int] = []
    before = opcode.stack_before
    if pickletools.markobject in before:
        while (value := stack.pop()) != _MARK:
            above.append(value)
        before = before[: before.index(pickletools.markobject)]
    return above + [stack.pop() for _ in before]
