"""Every optimizer and scheduler that init-config offers trains, as what its name says, with two real ranks.

By default each optimizer trains at each stage, and each scheduler too, the two taking turns. Every pair:
    DSTOOL_EVERY_PAIR=1 python -m pytest tests/test_optimizers.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_optimizers import LR, OPTIMIZERS, SCHEDULERS, STEPS, WARMUP, cases

from dstool.ds_config.options import CHOICES, Options
from dstool.launch import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = cases(every=bool(os.environ.get("DSTOOL_EVERY_PAIR")))

# deepspeed 0.19.8 runtime/engine.py `_configure_basic_optimizer`; "none" is Trainer's own, which accelerate
# replaces where it is offloaded. Without a GPU, DeepSpeed's FusedAdam is a build for the CPU.
ON_DEVICE = {
    "AdamW": "FusedAdam",
    "Adam": "FusedAdam",
    "FusedAdam": "FusedAdam",
    "SGD": "SGD",
    "Adagrad": "Adagrad",
    "Muon": "MuonWithAuxAdam",
    "none": "AdamW",
}
OFFLOADED = {
    "AdamW": "DeepSpeedCPUAdam",
    "Adam": "DeepSpeedCPUAdam",
    "FusedAdam": "DeepSpeedCPUAdam",
    "SGD": "SGD",
    "Adagrad": "DeepSpeedCPUAdagrad",
    "Muon": "MuonWithAuxAdam",
    "Lion": "DeepSpeedCPULion",
    "none": "DeepSpeedCPUAdam",
}


def log_warmup(step: int) -> float:
    """DeepSpeed's default: nothing in the first two steps, then by the logarithm."""
    return math.log(max(step, 1)) / math.log(WARMUP) if step < WARMUP else 1.0


def warmup_decay(step: int) -> float:
    """A line down to nothing, one step behind the warm-up."""
    return log_warmup(step) if step <= WARMUP else (STEPS - step + 1) / (STEPS - WARMUP)


def warmup_cosine(step: int) -> float:
    if step < WARMUP:
        return log_warmup(step)
    least = 1e-4  # cos_min_ratio
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def one_cycle(step: int) -> float:
    """Up in three steps from a tenth, and down again."""
    up = min(step, 6 - step) / 3 if step <= 6 else 0.0
    return 0.1 + 0.9 * up


SHAPES: dict[str, Callable[[int], float]] = {
    "WarmupLR": log_warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "ConstantLR": lambda step: 1.0,
    "CosineAnnealingLR": lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)),
    "OneCycle": one_cycle,
    "LRRangeTest": lambda step: 1.0 + step / 2,
    "none": lambda step: step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP),
}


@pytest.fixture(scope="session")
def ran(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, command: Any) -> dict[str, Any]:
    """What each case did, by its name."""
    folder = tmp_path_factory.mktemp("optimizers")
    worker = Path(__file__).with_name("live_optimizers.py")
    argv = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(worker)]
    # Muon's step is compiled, anew for every shape, which takes longer than all the training here.
    plain = {"TORCHDYNAMO_DISABLE": "1"}
    command(*argv, str(tiny("llama")), *CASES, cwd=folder, env=plain, timeout=1500)
    found: dict[str, Any] = json.loads((folder / "ran.json").read_text())
    return found


def test_nothing_that_can_run_here_is_left_out() -> None:
    assert set(OPTIMIZERS) == set(CHOICES["optimizer"]) - {"Lamb", "OneBitAdam"}  # a GPU, an older DeepSpeed
    assert set(SCHEDULERS) == set(CHOICES["scheduler"])
    stages = {(options.optimizer, options.stage) for options in CASES.values()}
    assert {(name, stage) for name in ON_DEVICE for stage in range(4)} <= stages
    stages = {(options.scheduler, options.stage) for options in CASES.values()}
    assert {(name, stage) for name in SCHEDULERS for stage in range(4)} <= stages
    offloaded = {options.optimizer for options in CASES.values() if options.offload == "cpu"}
    assert offloaded == set(OFFLOADED)


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", CASES)
def test_c28_c32_it_trains_as_what_its_name_says(name: str, ran: dict[str, Any]) -> None:
    options: Options = CASES[name]
    here = ran[name]
    assert here["ran"] == (OFFLOADED if options.offload == "cpu" else ON_DEVICE)[options.optimizer]
    shape = [LR * SHAPES[options.scheduler](step) for step in range(STEPS)]
    assert here["rates"] == pytest.approx(shape, rel=1e-5, abs=1e-9)
    assert math.isfinite(here["loss"])
    assert here["moved"] > 0, "no weight changed"
