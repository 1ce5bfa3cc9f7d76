"""Single values of a run file are changed; everything else in it stays, byte for byte."""

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dstool.config import Loader
from dstool.errors import ConfigError
from dstool.run_file import changed


def after(text, **changes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dstool.yaml")
        path.write_bytes(text.encode())
        return changed(path, changes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train:\n  seed: 1 # why\n", "train:\n  seed: 7 # why\n"),
        ("train:\n  'seed': 1\n", "train:\n  'seed': 7\n"),
        ("train: {seed: 1, warmup_steps: 3}\n", "train: {seed: 7, warmup_steps: 3}\n"),
        ("train:\n    output_dir: o\n", "train:\n    output_dir: o\n    seed: 7\n"),
        ("train:\n  output_dir: o", "train:\n  output_dir: o\n  seed: 7\n"),
        ("train:\r\n  output_dir: o # 한글\r\n", "train:\r\n  output_dir: o # 한글\r\n  seed: 7\r\n"),
        (
            "train:\n  report_to:\n    - none\ndata: {}\n",
            "train:\n  report_to:\n    - none\n  seed: 7\ndata: {}\n",
        ),
        ("train:\n# end\n", "train:\n  seed: 7\n# end\n"),
        ("train: # mine\n", "train:\n  seed: 7 # mine\n"),
        ("train: null\n", "train:\n  seed: 7\n"),
        ("train: {}\n", "train: {seed: 7}\n"),
        ("train: {fp16: true} # mine\n", "train: {fp16: true, seed: 7} # mine\n"),
        ("train:\n  seed:\n  fp16: true\n", "train:\n  seed: 7\n  fp16: true\n"),
        ("data: {}\n", "data: {}\n\ntrain:\n  seed: 7\n"),
        (
            "# 한글\ntrain:\n  output_dir: '가'\n\n# end\n",
            "# 한글\ntrain:\n  output_dir: '가'\n  seed: 7\n\n# end\n",
        ),
        ("\ufefftrain:\n  seed: 1\n", "\ufefftrain:\n  seed: 7\n"),
        ("train:\n  output_dir: o\n...\n", "train:\n  output_dir: o\n  seed: 7\n...\n"),
        ("---\ndata: {}\n... # end\n", "---\ndata: {}\n\ntrain:\n  seed: 7\n... # end\n"),
        ("data: {}\n...", "data: {}\n\ntrain:\n  seed: 7\n...\n"),
        (
            "train:\n  report_to:\n  - none\n\n# where the rows are\ndata: {}\n",
            "train:\n  report_to:\n  - none\n  seed: 7\n\n# where the rows are\ndata: {}\n",
        ),
        (
            "train:\n  lr_scheduler_kwargs:\n    a: [1,\n      2]\n  # last\n# data\ndata: {}\n",
            "train:\n  lr_scheduler_kwargs:\n    a: [1,\n      2]\n  seed: 7\n  # last\n# data\ndata: {}\n",
        ),
    ],
)
def test_a_value_is_changed_or_added_in_its_place(text, told):
    assert after(text, seed=7) == told


def test_a_value_is_taken_out_with_its_line():
    text = "train:\n  seed: 1 # why\n  # of the rest\n  output_dir: o\n"
    assert after(text, seed=None) == "train:\n  # of the rest\n  output_dir: o\n"


def test_a_value_over_several_lines_is_taken_out_without_the_comment_that_follows():
    text = "train:\n  fp16: true\n  seed:\n    - 1\n# of the data\ndata: {}\n"
    assert after(text, seed=None) == "train:\n  fp16: true\n# of the data\ndata: {}\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train: {seed: 1, output_dir: o}\n", None),
        ("train:\n  seed: &a 1\n  data_seed: *a\n", 7),
        ("train:\n  data_seed: &a 1\n  seed: *a\n", 7),
        ("train:\n  seed: 1\n", None),
    ],
)
def test_what_would_change_more_is_refused(text, value):
    with pytest.raises(ConfigError) as caught:
        after(text, seed=value)
    assert ("delete seed" if value is None else "write seed: 7") in caught.value.hint


_FIELDS = st.sampled_from(["seed", "learning_rate", "warmup_steps", "fp16", "output_dir"])
_VALUES = st.one_of(st.booleans(), st.integers(0, 10**9), st.floats(1e-9, 1e9), st.just("linear"))


@given(st.dictionaries(_FIELDS, _VALUES, min_size=2), st.dictionaries(_FIELDS, _VALUES, max_size=3))
def test_only_what_is_asked_for_changes(train, changes):
    before = {"model": {"name": "m"}, "train": train, "data": {"train": "d.csv"}}
    text = yaml.safe_dump(before, sort_keys=False)
    now = yaml.load(after(text, **changes), Loader)
    assert now["train"].keys() == train.keys() | changes.keys()
    assert all(now["train"][name] == before["train"][name] for name in train.keys() - changes.keys())
    assert (now["model"], now["data"]) == (before["model"], before["data"])
