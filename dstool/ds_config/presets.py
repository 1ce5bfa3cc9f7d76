"""Ready sets of options for `dstool init-config --preset`: each is a decision that people often make."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dstool.ds_config.options import Options

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Preset:
    """Options under a name. `use` says when to take them."""

    use: str
    options: Options


# `nvme_path` is named, so that the file is the same on every machine.
PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "ddp": Preset("nothing is partitioned: the fastest, for small models", Options(stage=0)),
        "zero1": Preset("the optimizer is partitioned: as fast, with less memory", Options(stage=1)),
        "zero2": Preset("the gradients as well: where most fine-tuning starts", Options(stage=2)),
        "zero2-offload": Preset(
            "the optimizer on the CPU: one GPU whose memory is a little short",
            Options(stage=2, offload="cpu"),
        ),
        "zero3": Preset("the weights as well: a model that no single GPU holds", Options(stage=3)),
        "zero3-offload": Preset(
            "weights and optimizer on the CPU: few GPUs and much host memory",
            Options(stage=3, offload="cpu"),
        ),
        "zero3-nvme": Preset(
            "weights and optimizer on a local NVMe disk: the largest model, the slowest steps",
            Options(stage=3, offload="nvme", nvme_path="/local_nvme"),
        ),
        "long-context": Preset(
            "long texts: activations are computed again, and the optimizer is on the CPU",
            Options(stage=3, offload_optimizer="cpu", precision="bf16", activation_checkpointing=True),
        ),
        # At stage 1 gradients are summed over the ranks at an update alone, at stage 2 in every step
        # (runtime/engine.py `allreduce_gradients`).
        "slow-network": Preset(
            "machines on a slow network: gradients travel once in eight steps",
            Options(stage=1, precision="bf16", accumulation=8),
        ),
    }
)
