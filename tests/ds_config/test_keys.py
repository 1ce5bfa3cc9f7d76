"""The table of keys, and that it is the one of the installed DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from dstool.ds_config.keys import KEYS_FILE, Key, keys, optimizers, removed, schedulers, versions

SCRIPT = Path(__file__).parent.parent.parent / "scripts/make_keys.py"
TYPES = {"bool": bool, "int": int, "float": (int, float), "str": str, "list": list, "object": dict}


def test_the_table_is_that_of_the_installed_deepspeed(tmp_path: Path) -> None:
    installed = {name: version(name).partition("+")[0] for name in versions()}
    if installed != versions():
        pytest.skip(f"keys.json is of {dict(versions())}, installed are {installed}")
    subprocess.run([sys.executable, SCRIPT, tmp_path / "keys.json"], check=True, capture_output=True)
    assert (tmp_path / "keys.json").read_text() == KEYS_FILE.read_text(), "python scripts/make_keys.py"


def test_every_key_stands_in_a_block() -> None:
    for path, key in keys().items():
        assert path == key.path == f"{key.block}.{key.name}".lstrip(".")
        assert not key.block or "object" in keys()[key.block].types
        assert (key.unknown is not None) == ("object" in key.types) or key.unknown is None


def test_the_defaults_are_of_the_types_and_within_the_limits() -> None:
    for key in keys().values():
        assert set(key.types) <= {*TYPES, "null"}, key
        if key.default is None:
            continue
        assert any(isinstance(key.default, TYPES[name]) for name in key.types if name != "null"), key
        assert key.choices is None or key.default in key.choices, key
        if key.default == "auto":
            continue
        assert key.minimum is None or key.default >= key.minimum, key
        assert key.maximum is None or key.default <= key.maximum, key


def test_some_keys() -> None:
    known = keys()
    assert known["zero_optimization.stage3_max_live_parameters"] == Key(
        "zero_optimization.stage3_max_live_parameters",
        ("int",),
        default=1_000_000_000,
        minimum=0,
        stages=(3,),
    )
    assert known["zero_optimization.reduce_bucket_size"].minimum == 1  # pydantic: above 0
    assert known["zero_optimization.cpu_offload"].deprecated == "use offload_optimizer"
    assert known["zero_optimization.offload_param.device"].choices == ("none", "cpu", "nvme")
    assert known["optimizer.params.betas"].auto == "trainer"
    assert known["aio"].unknown == "ignored"
    assert known["fp16"].unknown == "error"
    assert known["scheduler.params"].unknown == "kept"
    assert known["communication_data_type"].any_case
    assert known["gradient_clipping"].default == 1.0


def test_what_is_gone_is_no_key() -> None:
    assert {"nebula", "elasticity", "zero_optimization.mics_shard_size"} <= set(removed())
    assert not set(removed()) & set(keys())
    assert "it is gone" not in removed().values(), "a new one: say in scripts/make_keys.py what to do instead"


def test_the_parameters_of_optimizers_and_schedulers_are_keys() -> None:
    for kind, tables in (("optimizer", optimizers()), ("scheduler", schedulers())):
        for one in tables.values():
            assert one.needs <= one.takes
            assert all(f"{kind}.params.{name}" in keys() for name in one.takes | one.offloaded)
    assert "betas" not in optimizers()["Adagrad"].takes
    assert "eps" not in optimizers()["Lion"].offloaded
    assert schedulers()["WarmupDecayLR"].needs == {"total_num_steps"}
