"""What the keys of the DeepSpeed JSON mean and cost, in English and Korean, and what sets them.

The words are in glossary_en.json and glossary_ko.json: for each key its meaning and its cost in memory and
speed, and the topics as lines of text. Numbers are those of deepspeed 0.19.8, bytes measured on two ranks.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Lang = Literal["en", "ko"]

_STAGE: Final = (
    "stage",
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
)
_OFFLOAD: Final = (
    "aio",
    "aio.block_size",
    "aio.intra_op_parallelism",
    "aio.overlap_events",
    "aio.queue_depth",
    "aio.single_submit",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.fast_init",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param",
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.round_robin_gradients",
)
_PRECISION: Final = (
    "bf16",
    "bf16.enabled",
    "fp16",
    "fp16.enabled",
    "fp16.hysteresis",
    "fp16.initial_scale_power",
    "fp16.loss_scale",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
)

_UNTESTED: Final = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
_SCHEDULES: Final = (
    "",
    ".type",
    ".params",
    ".params.cycle_first_step_size",
    ".params.cycle_momentum",
    ".params.decay_lr_rate",
    ".params.decay_step_size",
    ".params.lr_range_test_staircase",
    ".params.lr_range_test_step_rate",
    ".params.lr_range_test_step_size",
)

# The options of `dstool init-config` that write a key or decide its value.
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "zero_optimization": ("--stage", "--offload"),
        **{f"zero_optimization.{name}": ("--stage",) for name in _STAGE},
        **dict.fromkeys(_OFFLOAD, ("--offload",)),
        "zero_optimization.offload_optimizer": ("--offload", "--offload-optimizer"),
        "zero_optimization.offload_optimizer.device": ("--offload", "--offload-optimizer"),
        "zero_optimization.offload_optimizer.nvme_path": ("--nvme-path",),
        "zero_optimization.offload_param": ("--offload", "--offload-param"),
        "zero_optimization.offload_param.device": ("--offload", "--offload-param"),
        "zero_optimization.offload_param.nvme_path": ("--nvme-path",),
        **dict.fromkeys(_PRECISION, ("--precision",)),
        **dict.fromkeys(_UNTESTED, ("--optimizer",)),
        **{
            f"optimizer{rest}": ("--optimizer",)
            for rest in ("", ".type", ".params", ".params.adam_w_mode", ".params.momentum")
        },
        "optimizer.params.lr": ("--lr",),
        **{f"scheduler{rest}": ("--scheduler",) for rest in _SCHEDULES},
        "scheduler.params.cycle_max_lr": ("--lr",),
        "scheduler.params.cycle_min_lr": ("--lr",),
        "scheduler.params.lr_range_test_min_lr": ("--lr",),
        "scheduler.params.warmup_num_steps": ("--warmup",),
        "communication_data_type": ("--communication-data-type",),
        "gradient_accumulation_steps": ("--accumulation",),
        "gradient_clipping": ("--clip",),
        "train_batch_size": ("--global-batch",),
        "train_micro_batch_size_per_gpu": ("--micro-batch",),
    }
)

# Names that many files have, and DeepSpeed never looks at, with the key that is meant (deepspeed 0.19.8
# runtime/swap_tensor/aio_config.py).
MEANT: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("thread_count", "aio.thread_count"), "aio.intra_op_parallelism")
)

# What Trainer puts in the place of "auto" (transformers 5.24 integrations/deepspeed.py).
AUTO_FROM: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bf16.enabled": "train.bf16",
        "fp16.enabled": "train.fp16",
        "gradient_accumulation_steps": "train.gradient_accumulation_steps",
        "gradient_clipping": "train.max_grad_norm",
        "optimizer.params.betas": "train.adam_beta1, train.adam_beta2",
        "optimizer.params.eps": "train.adam_epsilon",
        "optimizer.params.lr": "train.learning_rate",
        "optimizer.params.weight_decay": "train.weight_decay",
        "scheduler.params.total_num_steps": "train.max_steps, train.num_train_epochs",
        "scheduler.params.warmup_max_lr": "train.learning_rate",
        "scheduler.params.warmup_min_lr": "0",
        "scheduler.params.warmup_num_steps": "train.warmup_steps",
        "train_batch_size": "train.per_device_train_batch_size * train.gradient_accumulation_steps * ranks",
        "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
        "zero_optimization.reduce_bucket_size": "hidden_size * hidden_size",
        "zero_optimization.stage3_param_persistence_threshold": "10 * hidden_size",
        "zero_optimization.stage3_prefetch_bucket_size": "0.9 * hidden_size * hidden_size",
    }
)

# Keys of the run file that decide what a key of the JSON does, without an "auto".
_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "activation_checkpointing": "train.gradient_checkpointing",
        "checkpoint.use_node_local_storage": "train.save_on_each_node",
        "dataloader_drop_last": "train.dataloader_drop_last",
        "optimizer": "train.optim",
        "scheduler": "train.lr_scheduler_type",
    }
)


@dataclass(frozen=True)
class Entry:
    """The words on one key. `cost` is empty where there is nothing to say."""

    meaning: str
    cost: str

    @property
    def summary(self) -> str:
        """The first sentence."""
        return self.meaning.partition(". ")[0].removesuffix(".")


@dataclass(frozen=True)
class Topic:
    """What is to be known of several keys together, line by line."""

    title: str
    lines: tuple[str, ...]


def entries(lang: Lang) -> Mapping[str, Entry]:
    """The words on the keys, by path."""
    return MappingProxyType({path: Entry(*words) for path, words in _file(lang)["keys"].items()})


def topics(lang: Lang) -> Mapping[str, Topic]:
    """The topics by name. The names are the same in every language."""
    return MappingProxyType(
        {name: Topic(title, tuple(lines)) for name, (title, lines) in _file(lang)["topics"].items()}
    )


def labels(lang: Lang) -> Mapping[str, str]:
    """The words around the entries."""
    return MappingProxyType(_file(lang)["labels"])


def set_by(path: str) -> tuple[str, ...]:
    """What sets the key at `path`: options of `dstool init-config`, then keys of the run file."""
    in_run_file = re.findall(r"train\.\w+", AUTO_FROM.get(path, _INSTEAD.get(path, "")))
    return (*OPTIONS.get(path, ()), *in_run_file)


def language(environ: Mapping[str, str] = os.environ) -> Lang:
    """The language of the locale: of LC_ALL, LC_MESSAGES and LANG the first that is set decides."""
    found = (environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return "ko" if next(filter(None, found), "").startswith("ko") else "en"


@cache
def _file(lang: Lang) -> dict[str, Any]:
    path = Path(__file__).parent / f"glossary_{lang}.json"
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded
