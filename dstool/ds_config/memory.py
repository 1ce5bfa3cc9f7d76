"""What a run needs on each GPU, on each host and on NVMe: arithmetic, without torch.

Sources, all read in DeepSpeed 0.19.8 and weighed in two real ranks by tests/test_plan.py:

- stages 1 and 2: runtime/zero/stage_1_and_2.py. Parameters are flattened by group and padded to twice the
  ranks; each rank has an fp32 copy of its partition, in fp32 runs too; gradients are kept whole for every
  parameter that reaches into the partition (`copy_grads_in_partition`).
- stage 3: runtime/zero/stage3.py and partition_parameters.py. Each parameter is padded to the ranks by
  itself; a flat buffer holds the gradients throughout; small parameters also stay whole (`ds_persist`).
- stage 0: runtime/fp16/fused_optimizer.py in 16 bits; the optimizer on the model's own parameters in fp32.
- stage 1 with fp32 accumulation in bf16: runtime/bf16_optimizer.py, whose accumulator is not partitioned.
- NVMe: runtime/swap_tensor/optimizer_utils.py and partitioned_param_swapper.py, for the pinned buffers.
- activations: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
  table 2 and section 5, with the terms of a layer kept apart for grouped keys and gated feed-forwards.

DeepSpeed's own estimators leave out activations and buffers, count frozen parameters as trained ones, and
know neither stage 1 nor NVMe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Final, Literal

from dstool.ds_config.options import Offload, Stage
from dstool.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]

CHOICES: Final[tuple[tuple[Stage, Offload], ...]] = (
    (0, "none"),
    (1, "none"),
    (1, "cpu"),
    (2, "none"),
    (2, "cpu"),
    (3, "none"),
    (3, "cpu"),
    (3, "nvme"),
)
BY_SPEED: Final[tuple[tuple[Stage, Offload], ...]] = (
    (1, "none"),
    (2, "none"),
    (2, "cpu"),
    (3, "none"),
    (3, "cpu"),
    (3, "nvme"),
)
"""The fastest first. The more is partitioned or offloaded, the more goes over the wire in every step."""

RESERVE: Final = 2_000_000_000
"""Bytes of each GPU left to the CUDA context, the communication library and fragmentation. Assumed."""
HOST_RESERVE: Final = 2_000_000_000
"""Bytes of host memory for each rank's Python, libraries and data. Assumed."""

MORE_THAN_THE_PAPER: Final = 1.2
"""What models of transformers 5.24 keep for the backward pass, over the paper's formula: 7 to 20% more,
weighed on Llama, BERT and GPT-2 (tests/test_plan.py). Norms that go through fp32 are a part of it."""

OPTIMIZER_STATES: Final = {
    "adam": 8,
    "adamw": 8,
    "fusedadam": 8,
    "cpuadam": 8,
    "lamb": 8,
    "adagrad": 4,
    "lion": 4,
    "muon": 4,
}
"""Bytes of state for a trained parameter, beside its fp32 copy. SGD has 4 with momentum, and none without."""


# --- what is asked -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """A model as far as memory goes. A tied weight is in it once."""

    trained: tuple[tuple[int, ...], ...]
    """Elements of each trained parameter, in the optimizer's groups and the model's order."""
    frozen: tuple[int, ...]
    """Elements of each frozen parameter."""
    frozen_bytes: int | None = None
    """What the frozen ones take where they are quantised."""
    buffer_bytes: int = 0
    """Of the model's own buffers."""
    hidden_size: int = 0
    layers: int = 0
    heads: int = 1
    key_value_heads: int = 1
    intermediate_size: int = 0
    """For a token: of a mixture of experts, those that compute together."""
    gated: bool = False
    """Whether the feed-forward has a gate beside its input (Llama and its like)."""
    unfused_gelu: bool = False
    """Whether its activation is computed in steps that are each kept (`gelu_new`, GPT-2's)."""
    logits: int = 0
    """Numbers computed for each token at the end: the vocabulary of a language model."""
    attention_matrix: bool = False
    """Whether attention keeps its matrix of scores (`eager`), and not only its result."""

    @property
    def trained_parameters(self) -> int:
        """How many parameters are trained."""
        return sum(map(sum, self.trained))

    @property
    def parameters(self) -> int:
        """How many parameters there are."""
        return self.trained_parameters + sum(self.frozen)

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max((size for group in self.trained for size in group), default=0)


@dataclass(frozen=True)
class Setup:
    """How the model is trained, and by how many. None stands for `auto`."""

    gpus: int = 1
    """On each node."""
    nodes: int = 1
    precision: Precision = "bf16"
    state_bytes: int = 8
    """The optimizer's, for a trained parameter (`OPTIMIZER_STATES`)."""
    fp32_accumulation: bool = False
    """`data_types.grad_accum_dtype: fp32` in a 16-bit run."""
    accumulates: bool = False
    """Whether more than one batch goes into a step."""
    micro_batch: int = 8
    seq_len: int = 1024
    checkpointing: bool = False
    """Gradient checkpointing: a layer keeps its input alone, and is computed anew."""
    reduce_bucket_size: int | None = None
    overlap_comm: bool = True
    """At stage 2; at stage 1 it is taken to be off, as `init-config` leaves it."""
    persistence_threshold: int | None = None
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    nvme_optimizer_buffers: int = 4
    nvme_param_buffers: int = 5
    nvme_param_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000

    @property
    def ranks(self) -> int:
        """On all nodes."""
        return self.gpus * self.nodes

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 4 if self.precision == "fp32" else 2


@dataclass(frozen=True)
class Limits:
    """What there is, in bytes; None where that is not known, and so not held against a plan."""

    gpu: int
    host: int | None = None
    nvme: int | None = None


# --- what comes out ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kinds:
    """Bytes in one place, by what they are for."""

    weights: int = 0
    gradients: int = 0
    """As the optimizer's step begins."""
    optimizer: int = 0
    """Its fp32 copy of the weights, and its states."""
    buffers: int = 0
    """Communication, gathered parameters and the step's own copies, as many as there are at once."""
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    def times(self, count: int) -> Kinds:
        """The same for `count` ranks."""
        return Kinds(*(getattr(self, field.name) * count for field in fields(self)))


@dataclass(frozen=True)
class Estimate:
    """What one stage and offload needs."""

    stage: Stage
    offload: Offload
    gpu: Kinds
    """For each GPU: the rank that has most."""
    host: Kinds
    """For each host, its ranks together."""
    nvme: Kinds
    """For each host."""
    loading: int
    """Bytes of host memory for a moment, as the model is loaded."""

    @property
    def gpu_bytes(self) -> int:
        """What each GPU must have."""
        return self.gpu.total + RESERVE

    def host_bytes(self, gpus: int) -> int:
        """What each host must have."""
        return max(self.host.total, self.loading) + gpus * HOST_RESERVE

    def lacks(self, limits: Limits, gpus: int) -> dict[str, int]:
        """By how many bytes it does not fit, by place; empty where it fits."""
        wanted = (
            ("gpu", self.gpu_bytes, limits.gpu),
            ("host", self.host_bytes(gpus), limits.host),
            ("nvme", self.nvme.total, limits.nvme),
        )
        return {place: need - have for place, need, have in wanted if have is not None and need > have}


def estimates(model: ModelShape, setup: Setup) -> tuple[Estimate, ...]:
    """Every stage and offload of `CHOICES`, in that order."""
    return tuple(estimate(model, setup, stage, offload) for stage, offload in CHOICES)


def recommend(model: ModelShape, setup: Setup, limits: Limits) -> tuple[Stage, Offload] | None:
    """The fastest stage and offload that fits, by the order of `BY_SPEED`; None where nothing does."""
    for stage, offload in BY_SPEED:
        if not estimate(model, setup, stage, offload).lacks(limits, setup.gpus):
            return stage, offload
    return None


def estimate(model: ModelShape, setup: Setup, stage: Stage, offload: Offload) -> Estimate:
    """What `stage` with `offload` needs."""
    active = activations(model, setup)
    if stage == 3:
        gpu, host, nvme = _stage_3(model, setup, offload)
    elif stage == 0:
        gpu, host, nvme = _stage_0(model, setup), Kinds(), Kinds()
    else:
        gpu, host, nvme = *_stages_1_and_2(model, setup, stage, offload), Kinds()
    # transformers 5.24 loads the whole model in every rank, but at stage 3 in the first alone.
    copies = 1 if stage == 3 else setup.gpus
    loading = copies * (_frozen_bytes(model, setup) + setup.width * model.trained_parameters)
    return Estimate(
        stage, offload, _at_once(gpu, active), host.times(setup.gpus), nvme.times(setup.gpus), loading
    )


@dataclass(frozen=True)
class _Rank:
    """One GPU's bytes. The two kinds of buffers are not there at the same time."""

    weights: int
    gradients: int
    optimizer: int
    backward: int
    """Buffers beside the activations."""
    step: int
    """Buffers once the activations are gone."""


def _at_once(rank: _Rank, active: int) -> Kinds:
    buffers = max(rank.backward, rank.step - active)
    return Kinds(rank.weights, rank.gradients, rank.optimizer, buffers, active)


# --- the stages ----------------------------------------------------------------------------------------


def _frozen_bytes(model: ModelShape, setup: Setup) -> int:
    return model.frozen_bytes if model.frozen_bytes is not None else setup.width * sum(model.frozen)


def _bucket(model: ModelShape, setup: Setup) -> int:
    """Elements of `reduce_bucket_size`; `auto` is the hidden size squared (transformers 5.24)."""
    return setup.reduce_bucket_size if setup.reduce_bucket_size is not None else model.hidden_size**2


def _stage_0(model: ModelShape, setup: Setup) -> _Rank:
    trained, width = model.trained_parameters, setup.width
    master = 0 if setup.precision == "fp32" else 4
    return _Rank(
        weights=width * trained + _frozen_bytes(model, setup) + model.buffer_bytes,
        gradients=width * trained,
        optimizer=(master + setup.state_bytes) * trained,
        # Gradients are flattened and reduced 500 million at a time (engine.py `buffered_allreduce_fallback`).
        backward=width * min(500_000_000, trained),
        step=(4 - width) * trained if master else 0,
    )


def _stages_1_and_2(model: ModelShape, setup: Setup, stage: Stage, offload: Offload) -> tuple[_Rank, Kinds]:
    width, ranks = setup.width, setup.ranks
    padded = [_padded(sum(group), 2 * ranks) for group in model.trained]
    part, largest_part = sum(padded) // ranks, max(padded, default=0) // ranks
    buckets = _bucket(model, setup) * (2 if setup.overlap_comm and stage == 2 else 1)
    weights = width * sum(padded) + _frozen_bytes(model, setup) + model.buffer_bytes
    backward = width * (buckets + model.largest)
    if stage == 1 and setup.accumulates:
        backward += (
            width * model.trained_parameters
        )  # whole until the last batch of a step (`process_gradients`)
    states = (4 + setup.state_bytes) * part
    if offload == "none":
        gradients = _gradients(model, setup, stage, part)
        step = (width + (0 if width == 4 else 4)) * largest_part
        if stage == 1:
            # They are whole until the backward pass is through, or the last of several (`process_gradients`).
            whole = width * model.trained_parameters
            step = max(step, width * buckets + whole)
            backward += max(0, whole - gradients) if setup.accumulates else 0
        return _Rank(weights, gradients, states, backward, step), Kinds()
    accumulated = width * part if setup.accumulates else 0
    host = Kinds(gradients=4 * part + accumulated, optimizer=states, buffers=width * (part + model.largest))
    return _Rank(weights, 0, 0, backward + width * model.largest, 0), host


def _gradients(model: ModelShape, setup: Setup, stage: Stage, part: int) -> int:
    if setup.fp32_accumulation and setup.width == 2:
        return 4 * part if stage == 2 else (4 + setup.width) * model.trained_parameters
    return setup.width * max(_reaching(model.trained, setup.ranks), default=0)


def _reaching(groups: Iterable[Sequence[int]], ranks: int) -> list[int]:
    """For each rank, the elements of all parameters that reach into its partition, counted whole."""
    found = [0] * ranks
    for group in groups:
        part = _padded(sum(group), 2 * ranks) // ranks
        for end, size in zip(accumulate(group), group, strict=True):
            if size:
                for rank in range((end - size) // part, (end - 1) // part + 1):
                    found[rank] += size
    return found


def _stage_3(model: ModelShape, setup: Setup, offload: Offload) -> tuple[_Rank, Kinds, Kinds]:
    width, ranks = setup.width, setup.ranks
    threshold = setup.persistence_threshold
    threshold = 10 * model.hidden_size if threshold is None else threshold
    sizes = [size for group in model.trained for size in group]
    persistent = width * sum(size for size in (*sizes, *model.frozen) if size <= threshold)
    part = sum(-(-size // ranks) for size in sizes)
    frozen = sum(-(-size // ranks) for size in model.frozen) * width
    if model.frozen_bytes is not None:
        frozen = -(-model.frozen_bytes // ranks)
    live = width * min(setup.max_live_parameters, model.parameters)
    backward = width * (_bucket(model, setup) + model.largest) + live
    sub_group = min(setup.sub_group_size, part)
    gradients = part * (4 if setup.fp32_accumulation else width)
    states = (4 + setup.state_bytes) * part
    kept = persistent + model.buffer_bytes
    if offload == "none":
        step = 4 * sub_group
        return _Rank(width * part + frozen + kept, gradients, states, backward, step), Kinds(), Kinds()
    gpu = _Rank(kept, 0, 0, backward, 0)
    if offload == "cpu":
        return gpu, Kinds(width * part + frozen, gradients + 4 * part, states), Kinds()
    shards = width * part + frozen
    in_cpu = width * min(
        part, setup.max_in_cpu
    )  # of the trained ones alone (`_create_param_groups_fp16_flat_cpu_memory`)
    pinned = 4 * setup.nvme_optimizer_buffers * sub_group
    pinned += width * setup.nvme_param_buffers * setup.nvme_param_buffer_size
    return gpu, Kinds(in_cpu, gradients, 0, pinned), Kinds(shards, 4 * part, states)


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to


# --- activations -----------------------------------------------------------------------------------------


def activations(model: ModelShape, setup: Setup) -> int:
    """Bytes that the backward pass needs from the forward pass, for one micro batch.

    In 16 bits and for each token, a layer keeps (Korthikanti et al., 4.1, with h the hidden size, k the width
    of keys and of values, i that of the feed-forward): 4h for the norms, 7h + 4k for attention, and 3h + 4i,
    or 2h + 8i with a gate, for the feed-forward. With k = h and i = 4h that is the paper's 34h. A matrix of
    scores adds 5as. Checkpointed, a layer keeps its input, and one layer at a time is computed whole.
    """
    h, tokens = model.hidden_size, setup.micro_batch * setup.seq_len
    keys = h * model.key_value_heads // max(1, model.heads)
    feed_forward = (
        (2 * h + 8 * model.intermediate_size) if model.gated else (3 * h + 4 * model.intermediate_size)
    )
    feed_forward += 6 * model.intermediate_size if model.unfused_gelu else 0
    layer = 4 * h + 7 * h + 4 * keys + feed_forward
    layer += 5 * model.heads * setup.seq_len if model.attention_matrix else 0
    body = model.layers * 2 * h + layer if setup.checkpointing else model.layers * layer
    # The loss is taken in fp32: the logits as they are, in fp32, and the gradient of those.
    end = (setup.width + 8) * model.logits
    return round(MORE_THAN_THE_PAPER * tokens * setup.width * (body + 4 * h) / 2) + tokens * end


# --- checkpoints ------------------------------------------------------------------------------------------


# The most resident memory of the processes, measured with models of 250 MB to 2.4 GB:
# Python and the copying for the one; for the other torch and Transformers too, which load the result back
# without data.
CONSOLIDATE_MEMORY: Final = 60_000_000
MERGE_MEMORY: Final = 450_000_000


@dataclass(frozen=True)
class Later:
    """What the commands after training need, in bytes."""

    checkpoint_disk: int
    consolidate_disk: int
    consolidate_memory: int
    merge_disk: int
    merge_memory: int


def later(model: ModelShape, setup: Setup) -> Later:
    """What a checkpoint takes, and what `consolidate` (to fp32) and `merge` need.

    A checkpoint holds the weights, the fp32 copy and the states; of an adapter's run only those of what is
    trained (transformers 5.24, trainer.py `exclude_frozen_parameters`). `consolidate` and `merge` copy the
    weights from file to file, and their memory does not grow with the model.
    """
    trained = 4 * model.trained_parameters
    return Later(
        checkpoint_disk=checkpoint_bytes(model.trained_parameters, setup.width, setup.state_bytes),
        consolidate_disk=trained,
        consolidate_memory=CONSOLIDATE_MEMORY,
        merge_disk=setup.width * model.parameters,
        merge_memory=MERGE_MEMORY,
    )


def checkpoint_bytes(trained: int, width: int, state_bytes: int = 8) -> int:
    """The bytes of a checkpoint: of each trained parameter the weight, the fp32 copy, the optimizer's states.

    Args:
        width: bytes of a weight in the precision of the run.
        state_bytes: by default those of Adam, which has the most.
    """
    return (width + 4 + state_bytes) * trained


# --- sizes -----------------------------------------------------------------------------------------------

_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(text: str, flag: str) -> int:
    """Bytes in `80GB` or `80g` (of 1000 x 1000 x 1000) or `80GiB` (of 1024 x 1024 x 1024).

    Raises:
        ConfigError: it is no size, has no unit, or is none at all; names `flag`.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{flag} {text}: no size", hint=f"{flag} 80GB, or {flag} 80GiB")
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"{flag} {text}: must be more than nothing", hint=f"{flag} 80GB")
    if not (match[2] or match[4]):
        # People leave the unit out where they mean GB; taken for bytes, nothing would ever fit.
        number = text.strip()
        raise ConfigError(
            f"{flag} {number}: of which unit?", hint=f"{flag} {number}GB; {flag} {number}B is for bytes"
        )
    return size
