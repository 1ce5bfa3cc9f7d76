"""The exception tree: its drawing, and the way back from a name."""

import re

import pytest

from dstool import errors
from dstool.errors import DstoolError, RunFailed, by_name

LINE = re.compile(r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: +(?P<code>\d+))?(?: .*)?$")


def classes(top=DstoolError):
    return [top, *(deep for sub in top.__subclasses__() for deep in classes(sub))]


def drawn():
    """(name, parent, exit code) for each line of the drawing; a line without a code has its parent's."""
    tree, above = [], []
    for line in errors.__doc__.splitlines():
        if match := LINE.match(line):
            depth = len(match["branch"]) // 4
            del above[depth:]
            parent = above[-1] if above else (None, None)
            code = int(match["code"]) if match["code"] else parent[1]
            tree.append((match["name"], parent[0], code))
            above.append((match["name"], code))
    return tree


def test_the_drawing_shows_every_class_with_its_parent_and_exit_code():
    real = [
        (cls.__name__, None if cls is DstoolError else cls.__bases__[0].__name__, cls.exit_code)
        for cls in classes()
    ]
    assert drawn() == real


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_a_class_is_found_by_its_name(cls):
    assert by_name(cls.__name__) is cls


@pytest.mark.parametrize("name", ["", "ValueError", "dstooLError"])
def test_a_name_that_is_no_error_of_dstool_is_a_failed_run(name):
    assert by_name(name) is RunFailed


def test_an_error_carries_its_message_and_hint():
    error = errors.DataError("reviews.csv has no rows", hint="name another file")
    assert (str(error), error.message, error.hint) == (
        "reviews.csv has no rows",
        "reviews.csv has no rows",
        "name another file",
    )
    assert errors.DataError("x").hint is None
