"""What each rank runs to train a model and keep its logits: live_logits.py MODEL STAGE PRECISION."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dstool.config import load
from dstool.ds_config.build import build
from dstool.ds_config.options import Options
from dstool.train import train

INPUT_IDS = torch.arange(48).reshape(2, 24) * 5 % 300


class KeepLogits(TrainerCallback):
    """After the last step: the forward pass of the model as it is, whole or in shards."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Every rank takes part, since at stage 3 each has only a part of the weights."""
        training, _ = model.training, model.eval()
        with torch.no_grad():
            logits = model(INPUT_IDS).logits
        model.train(training)
        if args.process_index == 0:
            torch.save({"input_ids": INPUT_IDS, "logits": logits}, "live.pt")


def main() -> None:
    """Train on the bundled reviews as plain text, two ranks, by a run file with the JSON written inline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    parser.add_argument("model")
    parser.add_argument("stage", type=int)
    parser.add_argument("precision")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    options = Options(stage=given.stage, precision=given.precision)
    flags = {
        "model.name": given.model,
        "model.task": "causal-lm",
        "data.train": "sample:reviews_en",
        "data.block_size": 32,
        "train.output_dir": str(Path("out")),
        "train.max_steps": 4,
        "train.learning_rate": 1e-2,
        "train.bf16": given.precision == "bf16",
        "train.save_strategy": "steps",
        "train.save_steps": 4,
        "deepspeed": build(options),
    }
    train(load(flags=flags, required=False).config, callbacks=[KeepLogits()])


if __name__ == "__main__":
    main()
