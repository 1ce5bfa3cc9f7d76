"""Options to a DeepSpeed configuration that Trainer can fill in and every supported DeepSpeed accepts.

Whatever Trainer owns is "auto" (transformers 5.24 integrations/deepspeed.py, `trainer_config_process` and
`trainer_config_finalize`), so that it is said once, in the run file. The rest are the values that DeepSpeed
and Transformers publish. Rules are those of deepspeed 0.18 to 0.19.8.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from dstool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Stage = Literal[0, 1, 2, 3]
Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["auto", "fp32", "fp16", "bf16"]
OptimizerName = Literal["AdamW", "Adam", "Adagrad", "none"]
SchedulerName = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "none"]

AUTO: Final = "auto"


@dataclass(frozen=True)
class Options:
    """What `dstool init-config` asks; the defaults fit one machine whose GPUs hold the model."""

    stage: Stage = 2
    offload: Offload = "none"
    nvme_path: str | None = None
    precision: Precision = "auto"
    optimizer: OptimizerName = "AdamW"
    scheduler: SchedulerName = "WarmupLR"


_CHOICES: Final = MappingProxyType(
    {
        "stage": get_args(Stage),
        "offload": get_args(Offload),
        "precision": get_args(Precision),
        "optimizer": get_args(OptimizerName),
        "scheduler": get_args(SchedulerName),
    }
)

# deepspeed 0.19.8 runtime/precision_config.py: every key of dynamic loss scaling, at its default.
_LOSS_SCALING: Final = MappingProxyType(
    {
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
)

# What the class behind each name takes (runtime/engine.py `_configure_basic_optimizer`). "Adam" is AdamW
# unless adam_w_mode says otherwise; Adagrad has no betas.
OPTIMIZER_PARAMS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "AdamW": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
        "Adam": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO, "adam_w_mode": False},
        "Adagrad": {"lr": AUTO, "eps": AUTO, "weight_decay": AUTO},
    }
)

# runtime/lr_schedules.py: WarmupDecayLR and WarmupCosineLR must be told the total; WarmupCosineLR counts in
# ratios of the optimizer's lr and refuses warmup_min_lr and warmup_max_lr.
SCHEDULER_PARAMS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "WarmupLR": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
        "WarmupDecayLR": {
            "warmup_min_lr": AUTO,
            "warmup_max_lr": AUTO,
            "warmup_num_steps": AUTO,
            "total_num_steps": AUTO,
        },
        "WarmupCosineLR": {"warmup_num_steps": AUTO, "total_num_steps": AUTO},
    }
)

# The keys that each stage reads (runtime/engine.py `_configure_zero_optimizer`). At stage 1, overlap_comm is
# left at its default, off (zero/config.py). `allgather_partitions` is in every published stage-2 file; 0.19.8
# accepts it and no longer looks at it.
_ZERO_KEYS: Final[Mapping[int, Mapping[str, Any]]] = MappingProxyType(
    {
        0: {},
        1: {
            "allgather_bucket_size": 200_000_000,
            "reduce_scatter": True,
            "reduce_bucket_size": AUTO,
            "contiguous_gradients": True,
        },
        2: {
            "allgather_partitions": True,
            "allgather_bucket_size": 200_000_000,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": AUTO,
            "contiguous_gradients": True,
        },
        3: {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1_000_000_000,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
)

_NVME_OPTIMIZER: Final = MappingProxyType({"pin_memory": True, "buffer_count": 4, "fast_init": False})
_NVME_PARAM: Final = MappingProxyType(
    {"pin_memory": True, "buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000}
)

# Top level, never inside zero_optimization (runtime/config.py). Its `thread_count`, which people copy, is not
# a key: swap_tensor/aio_config.py drops it and reads intra_op_parallelism.
_AIO: Final = MappingProxyType(
    {
        "block_size": 262_144,
        "queue_depth": 32,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
    }
)

_RUN: Final = MappingProxyType(
    {
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "steps_per_print": 2000,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "wall_clock_breakdown": False,
    }
)


def build(options: Options) -> dict[str, Any]:
    """The DeepSpeed configuration for `options`, in the order in which people are used to read one.

    Raises `ConfigError` for a value that is no choice and for options that contradict each other.
    """
    _refuse_unknown(options)
    _refuse_contradictions(options)
    return {
        **_precision(options.precision),
        **_block("optimizer", options.optimizer, OPTIMIZER_PARAMS),
        **_block("scheduler", options.scheduler, SCHEDULER_PARAMS),
        "zero_optimization": {"stage": options.stage, **_offload(options), **_ZERO_KEYS[options.stage]},
        **({"aio": dict(_AIO)} if options.offload == "nvme" else {}),
        **_RUN,
    }


def dumps(config: Mapping[str, Any]) -> str:
    """`config` as the text of a file: two-space JSON, plain JSON numbers only, a newline at its end.

    Raises `ValueError` for an infinite number, such as the steps_per_print that accelerate fills in.
    """
    return json.dumps(config, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _refuse_unknown(options: Options) -> None:
    for field in fields(options):
        value, choices = getattr(options, field.name), _CHOICES.get(field.name)
        if choices is not None and value not in choices:
            raise ConfigError(
                f"--{field.name} {value}: not one of {', '.join(map(str, choices))}",
                hint=f"dstool init-config --{field.name} {field.default}",
            )


def _refuse_contradictions(options: Options) -> None:
    """What DeepSpeed itself takes without a word and then leaves undone, or dies of long after."""
    stage, offload = options.stage, options.offload
    if offload == "nvme" and stage < 3:
        raise ConfigError(
            f"--offload nvme needs --stage 3: at stage {stage} nothing would go to NVMe",
            hint="dstool init-config --stage 3 --offload nvme",
        )
    if offload == "cpu" and stage == 0:
        raise ConfigError(
            "--offload cpu needs --stage 1, 2 or 3: stage 0 partitions nothing, so nothing is offloaded",
            hint="dstool init-config --stage 2 --offload cpu",
        )
    if offload == "nvme" and not options.nvme_path:
        raise ConfigError(
            "--offload nvme needs --nvme-path, a folder on a local NVMe disk",
            hint="dstool init-config --stage 3 --offload nvme --nvme-path /local_nvme",
        )
    if offload != "nvme" and options.nvme_path:
        raise ConfigError(
            f"--nvme-path {options.nvme_path} means nothing with --offload {offload}",
            hint=f"dstool init-config --stage 3 --offload nvme --nvme-path {options.nvme_path}",
        )


def _precision(precision: Precision) -> dict[str, Any]:
    """The fp16 and bf16 blocks. "auto" leaves the choice to `fp16` or `bf16` in the run file.

    A block that is absent counts as off: accelerate adds it so (utils/dataclasses.py, `set_mixed_precision`).
    """
    blocks: dict[Precision, dict[str, Any]] = {
        "auto": {"fp16": {"enabled": AUTO, **_LOSS_SCALING}, "bf16": {"enabled": AUTO}},
        "fp16": {"fp16": {"enabled": True, **_LOSS_SCALING}},
        "bf16": {"bf16": {"enabled": True}},
        "fp32": {"fp16": {"enabled": False}, "bf16": {"enabled": False}},
    }
    return blocks[precision]


def _block(key: str, name: str, params: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The block for optimizer or scheduler `name`; nothing for "none", then Trainer makes its own.

    Either goes with either: a DeepSpeed scheduler drives Trainer's optimizer and the reverse (transformers
    5.24 integrations/deepspeed.py `deepspeed_optim_sched`; run on the CPU at stages 0 to 3).
    """
    return {} if name == "none" else {key: {"type": name, "params": dict(params[name])}}


def _offload(options: Options) -> dict[str, Any]:
    """What moves off the device: the optimizer from stage 1 on, the parameters at stage 3 only.

    Below stage 3 parameters are not partitioned, and an `offload_param` block does nothing.
    """
    if options.offload == "none":
        return {}
    if options.offload == "nvme":
        where = {"device": "nvme", "nvme_path": options.nvme_path}
        return {"offload_optimizer": {**where, **_NVME_OPTIMIZER}, "offload_param": {**where, **_NVME_PARAM}}
    cpu = {"device": "cpu", "pin_memory": True}
    if options.stage == 3:
        return {"offload_optimizer": dict(cpu), "offload_param": dict(cpu)}
    # Ranks copy their gradients to the host in turn instead of all at once (zero/config.py).
    return {"offload_optimizer": cpu, **({"round_robin_gradients": True} if options.stage == 2 else {})}
