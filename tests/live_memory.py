"""What each rank runs to weigh the live tensors of real runs: live_memory.py MODEL CASES OUT.

CASES is a JSON list of flags for the run file; each is trained for two steps, one after another in the same
ranks, and just before the second update the bytes of every kind are taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dstool import log
from dstool.config import load
from dstool.train import train


class Weigh(TrainerCallback):
    """Takes the bytes as the second update begins, when all gradients and optimizer states are there.

    `waiting` is the most that the parameters' own gradients took before they were reduced.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.earlier = set(storages(everything()))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the scales in front of the second update."""
        if state.global_step == 1:
            model, optimizer = kwargs["model"], kwargs["optimizer"].optimizer
            step, reduce = optimizer.step, getattr(optimizer, "reduce_ipg_grads", None)
            waiting: list[int] = [0]

            def reduced(*arguments: Any, **options: Any) -> Any:
                waiting.append(size([p.grad for p in model.parameters()], set()))
                return reduce(*arguments, **options)  # type: ignore[misc]

            def weighed(*arguments: Any, **options: Any) -> Any:
                self.found = {**weigh(model, optimizer, self.earlier), "waiting": max(waiting)}
                return step(*arguments, **options)

            optimizer.step = weighed
            if reduce is not None:
                optimizer.reduce_ipg_grads = reduced


def weigh(model: Any, optimizer: Any, earlier: set[int]) -> dict[str, int]:
    """Bytes of the live tensors by kind, and of all others that are not from `earlier`; no storage twice."""
    seen: set[int] = set()
    base = getattr(optimizer, "optimizer", optimizer)
    masters = [
        *getattr(optimizer, "single_partition_of_fp32_groups", ()),
        *getattr(optimizer, "fp32_partitioned_groups_flat", ()),
        *getattr(optimizer, "fp32_groups_flat", ()),
        *getattr(optimizer, "fp32_groups_flat_partition", ()),
    ]
    parameters = list(model.parameters())
    shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    gradients = [
        [p.grad for p in (*parameters, *masters)],
        [getattr(p, "grad_accum", None) for p in parameters],
        list(getattr(optimizer, "averaged_gradients", {}).values()),
        getattr(optimizer, "grad_partitions_flat_buffer", None),
        getattr(optimizer, "fp32_groups_gradients_flat", None),
    ]
    states = [list(values.values()) for values in base.state.values()]
    return {
        "weights": size([parameters, shards, list(model.buffers())], seen),
        "gradients": size(gradients, seen),
        "optimizer": size([masters, states], seen),
        "others": size(everything(), seen | earlier),
    }


def everything() -> list[torch.Tensor]:
    """Every tensor that Python knows of."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in {torch.Tensor, torch.nn.Parameter}]


def size(tensors: Any, seen: set[int]) -> int:
    """The bytes of the storages behind `tensors`, however deep, that are not in `seen` yet."""
    found = {place: count for place, count in storages(tensors).items() if place not in seen}
    seen.update(found)
    return sum(found.values())


def storages(tensors: Any) -> dict[int, int]:
    """The address and bytes of every storage behind `tensors`."""
    found = [tensor.untyped_storage() for tensor in flat(tensors) if tensor.device.type != "meta"]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def flat(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from flat(item)


def main() -> None:
    """Train each case for two steps and write what was weighed, one file for each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    for name in ("model", "cases", "out"):
        parser.add_argument(name)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    found = []
    for number, case in enumerate(json.loads(Path(given.cases).read_text())):
        flags = {
            "model.name": given.model,
            "model.task": "causal-lm",
            "data.train": "sample:reviews_en",
            "data.block_size": 32,
            "train.output_dir": f"out-{number}",
            "train.max_steps": 2,
            "train.per_device_train_batch_size": 2,
            "train.save_strategy": "no",
            **case,
        }
        scales = Weigh()
        train(load(flags=flags, required=False).config, callbacks=[scales])
        found.append(scales.found)
    Path(f"{given.out}.{log.rank()}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
