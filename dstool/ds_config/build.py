"""Options to a DeepSpeed configuration that Trainer can fill in and every supported DeepSpeed accepts.

What Trainer owns and no option gives is "auto" (transformers 5.24 integrations/deepspeed.py,
`trainer_config_process` and `trainer_config_finalize`). The rest are the values that DeepSpeed and
Transformers publish. Rules are those of deepspeed 0.18 to 0.19.8.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dstool.ds_config.options import Options, Precision, refuse
from dstool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO: Final = "auto"

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
# unless adam_w_mode says otherwise; Adagrad and SGD have no betas, SGD and Lion no eps. Trainer would fill
# Lion's betas with Adam's. OneBitAdam is gone from 0.19.8; its freeze_step is that of DeepSpeed's tutorial.
OPTIMIZER_PARAMS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "AdamW": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
        "Adam": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO, "adam_w_mode": False},
        "SGD": {"lr": AUTO, "momentum": 0.9, "weight_decay": AUTO},
        "Lamb": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
        "OneBitAdam": {
            "lr": AUTO,
            "betas": AUTO,
            "eps": AUTO,
            "weight_decay": AUTO,
            "freeze_step": 400,
            "cuda_aware": False,
            "comm_backend_name": "nccl",
        },
        "Lion": {"lr": AUTO, "betas": [0.9, 0.99], "weight_decay": AUTO},
        "Adagrad": {"lr": AUTO, "eps": AUTO, "weight_decay": AUTO},
        "Muon": {"lr": AUTO, "momentum": 0.95, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
    }
)

# Names that people know, and what DeepSpeed has to be given for them: its FusedAdam is AdamW.
_MEANT: Final = MappingProxyType({"FusedAdam": "AdamW"})

# runtime/zero/utils.py: ZeRO takes these only when it is told to.
UNTESTED: Final = ("SGD", "Lamb")

# runtime/lr_schedules.py: WarmupDecayLR and WarmupCosineLR must be told the total; WarmupCosineLR counts in
# ratios of the optimizer's lr and refuses warmup_min_lr and warmup_max_lr. The numbers of OneCycle and
# LRRangeTest are those of DeepSpeed's tutorials, around the learning rate.
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
        "OneCycle": {
            "cycle_min_lr": 1e-5,
            "cycle_max_lr": 1e-4,
            "cycle_first_step_size": 1000,
            "decay_step_size": 1000,
            "decay_lr_rate": 0.001,
            "cycle_momentum": False,
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": 1e-5,
            "lr_range_test_step_size": 200,
            "lr_range_test_step_rate": 5,
            "lr_range_test_staircase": False,
        },
    }
)

# Schedulers of torch, which DeepSpeed cannot build on its own optimizers: Trainer's own that has the shape,
# without a warm-up and with one (transformers 5.24 optimization.py).
TRAINERS_SCHEDULERS: Final = MappingProxyType(
    {
        "ConstantLR": ("constant", "constant_with_warmup"),
        "CosineAnnealingLR": ("cosine", "cosine"),
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
            "reduce_scatter": True,
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

_CPU: Final = MappingProxyType({"device": "cpu", "pin_memory": True})
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


def build(options: Options) -> dict[str, Any]:
    """The DeepSpeed configuration for `options`, in the order in which people are used to read one.

    Raises `ConfigError` for a value that is no choice and for options that contradict each other.
    """
    refuse(options)
    config = {
        **_precision(options.precision),
        **_optimizer(options),
        **_scheduler(options),
        "zero_optimization": {"stage": options.stage, **_offload(options), **_zero_keys(options)},
        **({"aio": dict(_AIO)} if options.nvme else {}),
        **_allowances(options),
        **_run(options),
    }
    for path, value in options.settings:
        _put(config, path, value)
    return config


def of_run_file(options: Options) -> dict[str, Any]:
    """What the JSON cannot say, as fields of the run file's `train:`, under Trainer's names."""
    said: dict[str, Any] = {}
    if options.lr is not None and options.optimizer == "none":
        said["learning_rate"] = options.lr
    if options.scheduler in TRAINERS_SCHEDULERS:
        plain, warmed = TRAINERS_SCHEDULERS[options.scheduler]
        said["lr_scheduler_type"] = warmed if options.warmup else plain
        said["warmup_steps"] = options.warmup or 0
    elif options.warmup is not None and not _warmup_in_json(options):
        said["warmup_steps"] = options.warmup
    if options.activation_checkpointing:
        said["gradient_checkpointing"] = True
    return said


def dumps(config: Mapping[str, Any]) -> str:
    """`config` as the text of a file: two-space JSON, plain JSON numbers only, a newline at its end.

    Raises `ValueError` for an infinite number, such as the steps_per_print that accelerate fills in.
    """
    return json.dumps(config, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


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


def _optimizer(options: Options) -> dict[str, Any]:
    """The optimizer's block; nothing for "none", then Trainer makes its own.

    Any optimizer goes with any scheduler, whichever of the two is Trainer's own (transformers 5.24
    integrations/deepspeed.py `deepspeed_optim_sched`).
    """
    if options.optimizer == "none":
        return {}
    name = _MEANT.get(options.optimizer, options.optimizer)
    given = {} if options.lr is None else {"lr": options.lr}
    return {"optimizer": {"type": name, "params": {**OPTIMIZER_PARAMS[name], **given}}}


def _scheduler(options: Options) -> dict[str, Any]:
    """The scheduler's block; nothing for those that are Trainer's own."""
    name, lr = options.scheduler, options.lr
    if name not in SCHEDULER_PARAMS:
        return {}
    params = dict(SCHEDULER_PARAMS[name])
    if _warmup_in_json(options):
        params["warmup_num_steps"] = int(options.warmup or 0)
    if name == "OneCycle" and lr is not None:
        params |= {"cycle_min_lr": lr / 10, "cycle_max_lr": lr}
    if name == "LRRangeTest" and lr is not None:
        params["lr_range_test_min_lr"] = lr
    return {"scheduler": {"type": name, "params": params}}


def _warmup_in_json(options: Options) -> bool:
    """The JSON counts warm-up in steps, and refuses none at all; a share of the run only Trainer knows."""
    takes = "warmup_num_steps" in SCHEDULER_PARAMS.get(options.scheduler, {})
    return takes and options.warmup is not None and options.warmup >= 1


def _offload(options: Options) -> dict[str, Any]:
    """What moves off the device: the optimizer from stage 1 on, the parameters at stage 3 only."""
    blocks: dict[str, Any] = {}
    for name, device, extra in (
        ("offload_optimizer", options.optimizer_device, _NVME_OPTIMIZER),
        ("offload_param", options.param_device, _NVME_PARAM),
    ):
        if device == "cpu":
            blocks[name] = dict(_CPU)
        elif device == "nvme":
            blocks[name] = {"device": "nvme", "nvme_path": options.nvme_path, **extra}
    return blocks


def _zero_keys(options: Options) -> dict[str, Any]:
    keys = dict(_ZERO_KEYS[options.stage])
    if options.stage == 3 and options.optimizer == "Muon":
        keys["reduce_scatter"] = False  # Muon needs whole gradients (zero/stage3.py refuses the pair)
    if options.stage == 2 and options.optimizer_device == "cpu":
        # Ranks copy their gradients to the host in turn instead of all at once (zero/config.py).
        keys["round_robin_gradients"] = True
    return keys


def _allowances(options: Options) -> dict[str, Any]:
    """What ZeRO has to be told for an optimizer that is not of its own.

    With offload accelerate would put DeepSpeed's Adam in the place of SGD without a word (accelerator.py).
    """
    allowed: dict[str, Any] = {}
    if options.optimizer in UNTESTED and options.stage:
        allowed["zero_allow_untested_optimizer"] = True
        if options.optimizer_device != "none":
            allowed["zero_force_ds_cpu_optimizer"] = False
    return allowed


def _run(options: Options) -> dict[str, Any]:
    def given(value: float | None) -> Any:
        return AUTO if value is None else value

    dtype = options.communication_data_type
    return {
        **({"communication_data_type": dtype} if dtype else {}),
        "gradient_accumulation_steps": given(options.accumulation),
        "gradient_clipping": given(options.clip),
        "steps_per_print": 2000,
        "train_batch_size": given(options.global_batch),
        "train_micro_batch_size_per_gpu": given(options.micro_batch),
        "wall_clock_breakdown": False,
    }


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
        if not isinstance(config, dict):
            raise ConfigError(
                f"--set {path}: {block} is a value, not a block", hint=f"dstool explain {block}"
            )
    config[name] = value
