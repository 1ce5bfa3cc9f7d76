"""What `dstool init-config` asks, and which answers contradict each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from dstool.errors import ConfigError

Stage = Literal[0, 1, 2, 3]
Offload = Literal["none", "cpu", "nvme"]
Precision = Literal["auto", "fp32", "fp16", "bf16"]
OptimizerName = Literal[
    "AdamW", "Adam", "FusedAdam", "SGD", "Lamb", "OneBitAdam", "Lion", "Adagrad", "Muon", "none"
]
SchedulerName = Literal[
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    "ConstantLR",
    "CosineAnnealingLR",
    "OneCycle",
    "LRRangeTest",
    "none",
]
CommunicationType = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class Options:
    """What `dstool init-config` asks; the defaults fit one machine whose GPUs hold the model.

    None leaves a number to the run file. `offload` is for the optimizer and, at stage 3, the parameters;
    `offload_optimizer` and `offload_param` say it for one of the two. `warmup` counts steps; below 1
    it is a share of all steps. `settings` are further keys of the JSON with their values, by dotted path.
    """

    stage: Stage = 2
    offload: Offload = "none"
    nvme_path: str | None = None
    precision: Precision = "auto"
    optimizer: OptimizerName = "AdamW"
    scheduler: SchedulerName = "WarmupLR"
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    lr: float | None = None
    warmup: float | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    clip: float | None = None
    communication_data_type: CommunicationType | None = None
    activation_checkpointing: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def optimizer_device(self) -> Offload:
        """Where the optimizer goes."""
        return self.offload_optimizer or self.offload

    @property
    def param_device(self) -> Offload:
        """Where the parameters go; below stage 3 they are not partitioned, and stay."""
        return self.offload_param or (self.offload if self.stage == 3 else "none")

    @property
    def nvme(self) -> bool:
        """Whether anything goes to NVMe."""
        return "nvme" in (self.optimizer_device, self.param_device)


CHOICES: Final = MappingProxyType(
    {
        "stage": get_args(Stage),
        "offload": get_args(Offload),
        "offload_optimizer": get_args(Offload),
        "offload_param": get_args(Offload),
        "precision": get_args(Precision),
        "optimizer": get_args(OptimizerName),
        "scheduler": get_args(SchedulerName),
        "communication_data_type": get_args(CommunicationType),
    }
)

_COUNTS: Final = ("micro_batch", "global_batch", "accumulation")

# These follow their own course, and DeepSpeed gives them no warm-up (runtime/lr_schedules.py).
WITHOUT_WARMUP: Final = ("OneCycle", "LRRangeTest")


def refuse(options: Options) -> None:
    """Raise `ConfigError` for a value that is no choice, and for options that contradict each other."""
    for field in fields(options):
        value, choices = getattr(options, field.name), CHOICES.get(field.name)
        if choices is not None and value is not None and value not in choices:
            raise ConfigError(
                f"{_flag(field.name)} {value}: not one of {', '.join(map(str, choices))}",
                hint=f"dstool init-config {_flag(field.name)} {field.default or choices[0]}",
            )
    _refuse_numbers(options)
    _refuse_offload(options)
    _refuse_batch(options)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_numbers(options: Options) -> None:
    for name in _COUNTS:
        value = getattr(options, name)
        if value is not None and not (_is_number(value) and value >= 1 and value == int(value)):
            words = "must be 1 or more" if _is_number(value) and value < 1 else "must be a whole number"
            raise ConfigError(f"{_flag(name)} {value}: {words}", hint=f"dstool init-config {_flag(name)} 8")
    for name, example in (("lr", "2e-5"), ("clip", "1.0"), ("warmup", "0.1")):
        value = getattr(options, name)
        if value is not None and not (_is_number(value) and value >= 0):
            words = "must be 0 or more" if _is_number(value) else "must be a finite number"
            raise ConfigError(
                f"{_flag(name)} {value}: {words}", hint=f"dstool init-config {_flag(name)} {example}"
            )
    warmup = options.warmup or 0
    if warmup >= 1 and warmup != int(warmup):
        raise ConfigError(
            f"--warmup {warmup}: steps are whole", hint=f"--warmup {int(warmup)}, or below 1 for a share"
        )
    if warmup and options.scheduler in WITHOUT_WARMUP:
        raise ConfigError(
            f"{options.scheduler} follows its own course and has no warm-up",
            hint="leave --warmup out, or choose --scheduler WarmupLR",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_offload(options: Options) -> None:
    """What DeepSpeed itself takes without a word and then leaves undone, or dies of long after."""
    stage = options.stage
    for flag, device in (
        ("--offload-param", options.offload_param),
        ("--offload-optimizer", options.offload_optimizer),
        ("--offload", options.offload),
    ):
        if device == "nvme" and stage < 3:
            raise ConfigError(
                f"{flag} nvme needs --stage 3: at stage {stage} nothing would go to NVMe",
                hint=f"dstool init-config --stage 3 {flag} nvme",
            )
        if device == "cpu" and stage == 0:
            raise ConfigError(
                f"{flag} cpu needs --stage 1, 2 or 3: stage 0 partitions nothing, so nothing is offloaded",
                hint="dstool init-config --stage 2 --offload cpu",
            )
        if device == "cpu" and stage < 3 and flag == "--offload-param":
            raise ConfigError(
                f"{flag} cpu needs --stage 3: at stage {stage} parameters are not partitioned",
                hint=f"dstool init-config --stage 3 {flag} cpu",
            )
    if options.nvme and not options.nvme_path:
        raise ConfigError(
            "--offload nvme needs --nvme-path, a folder on a local NVMe disk",
            hint="dstool init-config --stage 3 --offload nvme --nvme-path /local_nvme",
        )
    if options.nvme_path and not options.nvme:
        raise ConfigError(
            f"--nvme-path {options.nvme_path} means nothing with --offload {options.offload}",
            hint=f"dstool init-config --stage 3 --offload nvme --nvme-path {options.nvme_path}",
        )


def _refuse_batch(options: Options) -> None:
    """A global batch is micro batch * accumulation * ranks, and one rank is the least there is."""
    total, part = options.global_batch, (options.micro_batch or 1) * (options.accumulation or 1)
    if total is not None and total % part:
        raise ConfigError(
            f"--global-batch {total} is no multiple of --micro-batch * --accumulation, which is {part}",
            hint=f"--global-batch {max(1, round(total / part)) * part}",
        )
