"""What each rank runs to make real ZeRO checkpoints, each with the live weights beside it.

    deepspeed --num_gpus 2 make_checkpoint.py FOLDER JOB...

writes FOLDER/JOB/checkpoint-2 (and -4) with `engine.save_checkpoint`, as the Trainer does, and
FOLDER/JOB/live-2.pt: every name of the module's state dict with the fp32 master gathered through
`safe_get_full_fp32_param`, the frozen weight, or the buffer. Two ranks, AdamW, random data.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

VOCABULARY = 97


class Odd(nn.Module):
    """Odd sizes, a tied head, a frozen layer (16-bit in bf16), and buffers of four kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7)
        self.up = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(3))
        self.down = nn.Linear(5, 7)
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running", torch.zeros(5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("offsets", torch.tensor([2**40 + 1, -3]))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(torch.relu(self.up(self.embed(ids)))))
        self.running.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        logits = self.head(self.down(hidden)) * self.scale.sum()
        return nn.functional.cross_entropy(logits.float(), ids)


class Wide(nn.Module):
    """Three weights large enough (1 MiB a rank) for NVMe, two of them of one size; the rest stays behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 768)
        self.first = nn.Linear(768, 769)
        self.second = nn.Linear(769, 768)
        self.third = nn.Linear(768, 768)
        self.head = nn.Linear(768, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.third(self.second(self.first(self.embed(ids))))
        return nn.functional.cross_entropy(self.head(hidden).float(), ids)


class Llama(nn.Module):
    """transformers' Llama, tied, under its own parameter names."""

    def __new__(cls) -> nn.Module:  # type: ignore[misc]
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=24,
                intermediate_size=36,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=1,
                tie_word_embeddings=True,
            )
        )


@dataclass(frozen=True)
class Job:
    """One run: the model, the ZeRO stage and precision, and the steps after which it saves."""

    model: type[nn.Module]
    stage: int
    bf16: bool = True
    freeze: bool = False
    saves: tuple[int, ...] = (2,)
    nvme: bool = False
    cpu: bool = False
    """Whether the optimizer, and at stage 3 the parameters, are offloaded to the CPU."""
    fp32_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    exclude_frozen: bool = False


JOBS = {
    "z0_fp32": Job(Odd, 0, bf16=False),
    "z0_bf16": Job(Odd, 0),
    "z1_bf16_frozen": Job(Odd, 1, freeze=True),
    "z1_bf16_optimizer": Job(Odd, 1, fp32_gradients=True),
    "z2_bf16": Job(Llama, 2, saves=(2, 4)),
    "z2_bf16_frozen": Job(Odd, 2, freeze=True),
    "z2_fp32": Job(Odd, 2, bf16=False),
    "z2_cpu": Job(Odd, 2, freeze=True, cpu=True),
    "z2_adapter": Job(Odd, 2, freeze=True, exclude_frozen=True),
    "z3_bf16": Job(Llama, 3, saves=(2, 4)),
    "z3_bf16_frozen": Job(Odd, 3, freeze=True),
    "z3_fp32": Job(Odd, 3, bf16=False),
    "z3_groups": Job(Odd, 3, sub_group_size=50),
    "z3_cpu": Job(Odd, 3, freeze=True, cpu=True, sub_group_size=50),
    "z3_nvme": Job(Wide, 3, nvme=True, sub_group_size=1),
}


def ds_config(job: Job, folder: Path) -> dict[str, Any]:
    """The DeepSpeed JSON of a job."""
    zero: dict[str, Any] = {"stage": job.stage}
    if job.stage == 3:
        zero |= {"sub_group_size": job.sub_group_size, "stage3_param_persistence_threshold": 20}
    if job.nvme:
        swap = {"device": "nvme", "nvme_path": str(folder / "swap"), "pin_memory": False}
        zero |= {"offload_optimizer": swap, "offload_param": swap | {"buffer_size": 2_000_000}}
    if job.cpu:
        zero |= {"offload_optimizer": {"device": "cpu"}}
        zero |= {"offload_param": {"device": "cpu"}} if job.stage == 3 else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": job.bf16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if job.fp32_gradients:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, as the Trainer makes them."""
    trained = [param for param in model.parameters() if param.requires_grad]
    sizes = [getattr(param, "ds_shape", param.shape) for param in trained]
    decay = [param for param, size in zip(trained, sizes, strict=True) if len(size) > 1]
    plain = [param for param, size in zip(trained, sizes, strict=True) if len(size) <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def build(job: Job, config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(11)
    within = deepspeed.zero.Init(config_dict_or_path=config) if job.nvme else contextlib.nullcontext()
    with within:
        model = job.model()
    if job.freeze:
        model.get_submodule("frozen").requires_grad_(False)
    return model


def optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    groups = param_groups(model)
    if job.nvme:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2)


def batches(rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randint(VOCABULARY, (4, 6), generator=generator)


def loss_of(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(engine.module, (Odd, Wide)):
        return engine(ids.flatten())
    return engine(input_ids=ids, labels=ids).loss


def live(engine: Any) -> dict[str, torch.Tensor]:
    """Every persistent name with its full value, gathered on all ranks. Floating tensors in fp32."""
    values: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        master = safe_get_full_fp32_param(param) if param.requires_grad else None
        if master is None:
            gathered = [param] if hasattr(param, "ds_id") else []
            with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
                master = param.detach().float().clone()
        values[name] = master.detach().float().clone().view(getattr(param, "ds_shape", param.shape))
    for name, buffer in engine.module.named_buffers():
        if name in engine.module.state_dict():
            values[name] = buffer.float() if buffer.is_floating_point() else buffer.clone()
    return values


def run(name: str, folder: Path) -> None:
    job = JOBS[name]
    home = folder / name
    config = ds_config(job, home)
    model = build(job, config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(job, model), config=config)
    stream = batches(dist.get_rank())
    for step in range(1, max(job.saves) + 1):
        engine.backward(loss_of(engine, next(stream)))
        engine.step()
        if step in job.saves:
            engine.save_checkpoint(
                str(home / f"checkpoint-{step}"), exclude_frozen_parameters=job.exclude_frozen
            )
            values = live(engine)
            if dist.get_rank() == 0:
                torch.save(values, home / f"live-{step}.pt")
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="+", choices=sorted(JOBS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    for name in arguments.jobs:
        run(name, arguments.folder)
        dist.barrier()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
