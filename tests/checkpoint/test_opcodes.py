"""The look over a pickle: what pickletools would say of it, sooner."""

from __future__ import annotations

import pickle
import pickletools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstool.checkpoint.opcodes import LARGE_MEMO, refuse_bombs

VALUES: list[Any] = [
    {"층": [1, 2**70, -3, 2.5, None, True, b"bytes", "x" * 300], "t": (1, (2,), ()), "s": {1, 2}},
    [object, complex(1, 2), frozenset({3}), bytearray(b"abc"), ["many"] * 3, "line\nbreak 'quoted'"],
    [{f"name {n}": n for n in range(300)}] * 2,
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", VALUES)
def test_a_whole_pickle_passes_and_no_part_of_it(value: Any, protocol: int) -> None:
    program = pickle.dumps(value, protocol)
    refuse_bombs(program)
    for end in range(0, len(program), 7):
        with pytest.raises(ValueError, match="its pickle"):
            refuse_bombs(program[:end])


@given(program=st.binary(max_size=60))
def test_what_pickletools_cannot_read_is_refused_and_the_rest_gives_one_kind_of_error(program: bytes) -> None:
    try:
        list(pickletools.genops(program))
        readable = True
    except Exception:
        readable = False
    try:
        refuse_bombs(program)
    except ValueError as error:
        assert str(error).startswith("its pickle ")
    else:
        assert readable


@pytest.mark.parametrize("number", [LARGE_MEMO + 1, 2**31, 2**32 - 1])
def test_a_memo_larger_than_the_pickle_is_refused(number: int) -> None:
    for put in (b"r" + number.to_bytes(4, "little"), b"p%d\n" % number):
        with pytest.raises(ValueError, match="memo"):
            refuse_bombs(b"\x80\x02N" + put + b".")


def through_memo(levels: int, between: bytes = b"") -> bytes:
    """A tuple of two that are one, got from the memo, and so on; `between` is pushed beside each."""
    step = b"h\x00h\x00" + between + (b"\x87" if between else b"\x86") + b"q\x000"
    return b")q\x000" + step * levels + b"h\x00"


FOREVER = {
    "doubled": b")" + b"2\x86" * 40,
    "deep": b")" + b"\x85" * 1_000_000,
    "deep, with values between": b")" + b"N\x86" * 1_000_000,
    "tied through the memo": through_memo(40),
    "tied, with values between": through_memo(40, b"K\x01"),
    "by marks": b")" + b"q\x000(h\x00h\x00t" * 40,
    "handed on by a BUILD of nothing": through_memo(12) + b"Nb" + b"q\x000h\x00h\x00\x86" * 40,
    "handed on by a parameter": b")q\x000"
    + b"ctorch._utils\n_rebuild_parameter\nh\x00h\x00\x86\x85Rq\x000" * 40
    + b"h\x00",
}


@pytest.mark.parametrize("name", FOREVER)
def test_tuples_that_take_forever_or_a_deep_stack_to_hash_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"its pickle .* tuples of more than 10000 values"):
        refuse_bombs(b"\x80\x02}" + FOREVER[name] + b"Ns.")


def test_what_checkpoints_have_passes() -> None:
    """Lists and dicts of any length, values that are used often, and the state of `random`."""
    shared = (1, (2, 3))
    content = {
        "random": random.getstate(),
        "ranks": [shared] * 50_000,
        "names": {f"n{n}": shared for n in range(9999)},
    }
    refuse_bombs(pickle.dumps(content, 2))


@pytest.mark.parametrize("program", [b".", b"0.", b"u.", b"h\x05.", b"(t", b"]Na"])
def test_a_pickle_that_takes_what_is_not_there_is_refused(program: bytes) -> None:
    with pytest.raises(ValueError, match="its pickle"):
        refuse_bombs(program)
