"""What the log says on stderr, by rank and level."""

import os
import subprocess
import sys

import pytest

SAY = """
import logging
from dstool import log
log.set_up()
logger = logging.getLogger("dstool.some.module")
for level in ("debug", "info", "warning", "error"):
    getattr(logger, level)("%s here", level)
"""


def run(script, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "DSTOOL_DEBUG")}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({}, ["info here", "warning: warning here", "error: error here"]),
        ({"RANK": "0"}, ["info here", "warning: warning here", "error: error here"]),
        ({"RANK": "3"}, ["[rank 3] warning: warning here", "[rank 3] error: error here"]),
        (
            {"DSTOOL_DEBUG": "1"},
            ["debug here", "info here", "warning: warning here", "error: error here"],
        ),
        ({"DSTOOL_DEBUG": "0"}, ["info here", "warning: warning here", "error: error here"]),
        (
            {"RANK": "1", "DSTOOL_DEBUG": "1"},
            ["[rank 1] warning: warning here", "[rank 1] error: error here"],
        ),
    ],
    ids=str,
)
def test_below_warning_only_rank_0_speaks_and_the_others_with_their_number(variables, lines):
    done = run(SAY, **variables)
    assert done.stderr.splitlines() == lines
    assert done.stdout == ""


def test_the_rank_is_the_one_over_all_machines():
    done = run(SAY, RANK="5", LOCAL_RANK="0")
    assert done.stderr.startswith("[rank 5] warning: ")


def test_setting_up_twice_says_everything_once():
    assert run(SAY.replace("log.set_up()", "log.set_up(); log.set_up()")).stderr.count("info here") == 1


def test_other_loggers_are_left_alone():
    script = SAY + "logging.getLogger('elsewhere').info('not mine')\nprint(logging.getLogger().handlers)"
    done = run(script)
    assert done.stdout == "[]\n"
    assert "not mine" not in done.stderr


WARN = "import warnings; from dstool import log; log.set_up(); warnings.warn('from a library')"


@pytest.mark.parametrize(("debug", "said"), [("", False), ("1", True)])
def test_warnings_of_the_libraries_are_shown_for_debugging_only(debug, said):
    assert ("from a library" in run(WARN, DSTOOL_DEBUG=debug).stderr) is said
