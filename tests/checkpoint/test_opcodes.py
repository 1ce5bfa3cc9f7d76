"""The look over a pickle: what pickletools would say of it, sooner."""

from __future__ import annotations

import pickle
import pickletools
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
def test_what_pickletools_reads_passes_and_the_rest_is_refused_or_harmless(program: bytes) -> None:
    """Refused is only what `genops` refuses too, a memo, or DUP; it looks into arguments, which we leave."""
    try:
        whole = list(pickletools.genops(program))
    except Exception:
        whole = []
    try:
        refuse_bombs(program)
    except ValueError as error:
        large = [arg for opcode, arg, _ in whole if "PUT" in opcode.name and (arg or 0) > len(program)]
        doubles = [opcode for opcode, _, _ in whole if opcode.name == "DUP"]
        assert not whole or (large and "memo" in str(error)) or (doubles and "doubles" in str(error)), error


@pytest.mark.parametrize("number", [LARGE_MEMO + 1, 2**31, 2**32 - 1])
def test_a_memo_larger_than_the_pickle_is_refused(number: int) -> None:
    for put in (b"r" + number.to_bytes(4, "little"), b"p%d\n" % number):
        with pytest.raises(ValueError, match="memo"):
            refuse_bombs(b"\x80\x02N" + put + b".")


def test_a_run_of_more_operations_than_one_match_takes() -> None:
    refuse_bombs(b"N0" * 100_000 + b"N.")


def test_tuples_that_take_forever_or_a_deep_stack_to_hash_are_refused() -> None:
    for nested in (b"2\x86" * 40, b"\x85" * 1_000_000):
        with pytest.raises(ValueError, match=r"its pickle (doubles|builds tuples)"):
            refuse_bombs(b"\x80\x02})" + nested + b"Ns.")
