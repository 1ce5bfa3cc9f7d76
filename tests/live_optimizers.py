"""What each rank runs to train with all that `init-config` offers: live_optimizers.py MODEL CASE ...

One run after the other in the same ranks, since ranks are slow to start. Rank 0 leaves ran.json: for each
case the class of the optimizer that stepped, and the learning rate that each step was made with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from dstool.config import load
from dstool.ds_config.build import build, of_run_file
from dstool.ds_config.options import Options
from dstool.train import train

LR, STEPS, WARMUP = 1e-2, 8, 3
# Those that run without a GPU. Lion does so off the device alone.
OPTIMIZERS = ("AdamW", "Adam", "FusedAdam", "SGD", "Adagrad", "Muon", "Lion", "none")
SCHEDULERS = (
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "ConstantLR",
    "CosineAnnealingLR",
    "OneCycle",
    "LRRangeTest",
    "none",
)
# So short that a few steps see the whole of the shape.
SHORT = {
    "OneCycle": (
        ("scheduler.params.cycle_first_step_size", 3),
        ("scheduler.params.decay_step_size", 0),
        ("scheduler.params.decay_lr_rate", 0.0),
    ),
    "LRRangeTest": (
        ("scheduler.params.lr_range_test_step_size", 2),
        ("scheduler.params.lr_range_test_step_rate", 1.0),
    ),
}


def cases(*, every: bool) -> dict[str, Options]:
    """Each optimizer and each scheduler at each stage, and each optimizer off the device at one of them.

    `every` pairs each optimizer with each scheduler.
    """
    found = []
    for stage, (j, scheduler) in itertools.product(range(4), enumerate(SCHEDULERS)):
        turn = OPTIMIZERS[(j - 2 * stage) % 8]
        for optimizer in OPTIMIZERS if every else (turn if runs(turn, scheduler, stage) else "AdamW",):
            if runs(optimizer, scheduler, stage):
                found.append(case(optimizer, scheduler, stage, "none"))
    for i, optimizer in enumerate(OPTIMIZERS):
        for stage in (1, 2, 3):
            if every or optimizer == "Lion" or stage == 1 + i % 3:
                found.append(case(optimizer, SCHEDULERS[(i + stage) % 8], stage, "cpu"))
    return dict(found)


def runs(optimizer: str, scheduler: str, stage: int) -> bool:
    """Whether the two train here without offload: the others are refused, as test_findings.py shows."""
    trainers_own = scheduler in ("none", "CosineAnnealingLR")
    return optimizer != "Lion" and not (optimizer == "Adagrad" and stage and trainers_own)


def case(optimizer: Any, scheduler: Any, stage: Any, offload: Any) -> tuple[str, Options]:
    """A name and the options of one run."""
    warmup = None if scheduler in ("OneCycle", "LRRangeTest", "ConstantLR", "CosineAnnealingLR") else WARMUP
    options = Options(
        stage,
        offload,
        optimizer=optimizer,
        scheduler=scheduler,
        lr=LR,
        warmup=warmup,
        settings=SHORT.get(scheduler, ()),
    )
    return f"{optimizer}-{scheduler}-{stage}-{offload}", options


class Watch(TrainerCallback):
    """The class of the optimizer, and the learning rate before each step."""

    def __init__(self) -> None:
        self.ran = ""
        self.rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        """`optimizer` is accelerate's, around DeepSpeed's, around the one that steps."""
        self.rates.append(optimizer.param_groups[0]["lr"])
        while type(optimizer).__name__.startswith(("DeepSpeedOptimizerWrapper", "DeepSpeedZeroOptimizer")):
            optimizer = optimizer.optimizer
        self.ran = type(optimizer).__name__


def watched(model: str, options: Options) -> dict[str, Any]:
    """Train `model` by `options`: what ran, and how far it went."""
    watch = Watch()
    flags = {
        "model.name": model,
        "model.task": "causal-lm",
        "data.train": "sample:reviews_en",
        "data.block_size": 32,
        "train.output_dir": "out",
        "train.max_steps": STEPS,
        "train.per_device_train_batch_size": 1,
        "train.save_strategy": "no",
        "deepspeed": build(options),
        **{f"train.{name}": value for name, value in of_run_file(options).items()},
    }
    result = train(load(flags=flags, required=False).config, callbacks=[watch], force=True)
    found = {"ran": watch.ran, "rates": watch.rates, "loss": result.train_loss}
    if torch.distributed.get_rank() == 0:  # which wrote it, and the next run writes over it
        found["moved"] = moved(model)
    torch.distributed.barrier()
    return found


def moved(model: str) -> float:
    """How far the weights of the run are from those that it started with: the largest difference."""
    before, after = load_file(f"{model}/model.safetensors"), load_file("out/model.safetensors")
    return max(float((after[name].float() - before[name].float()).abs().max()) for name in before)


def main() -> None:
    """Train the cases that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    parser.add_argument("model")
    parser.add_argument("names", nargs="+")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    ran = {
        name: watched(given.model, options)
        for name, options in cases(every=True).items()
        if name in given.names
    }
    if torch.distributed.get_rank() == 0:
        Path("ran.json").write_text(json.dumps(ran))


if __name__ == "__main__":
    main()
