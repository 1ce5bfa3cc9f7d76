"""A DeepSpeed JSON file read strictly, and brought together with the run file before a model is loaded."""

from __future__ import annotations

import copy
import difflib
import json
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from dstool import files
from dstool.ds_config import source
from dstool.ds_config.build import AUTO, OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from dstool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# --- reading ---------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. A byte-order mark is skipped.

    Raises `ConfigError`, one line `file:line:column: what is wrong`, for anything that is not strict JSON:
    comments, trailing commas, keys given twice, NaN and Infinity, or no object at the top.
    """
    parsed = source.parse(text_of(path))
    for fault in parsed.faults:
        if fault.position is None:
            raise ConfigError(f"{path}: {fault.words}", hint=anew(str(path)))
        if fault.rule != "byte-order-mark":
            line, column = parsed.line_column(fault.position)
            raise ConfigError(
                f"{path}:{line}:{column}: {fault.words}",
                hint=f"dstool check {files.typed(path)} shows the place",
            )
    return dict(parsed.value)


def text_of(path: Path) -> str:
    """The text of the file at `path`, its byte-order mark included.

    Raises `ConfigError` where it cannot be read, or is not UTF-8.
    """
    try:
        return files.text_of(path, "JSON file")
    except (FileNotFoundError, NotADirectoryError):
        hint = anew(str(path)).removesuffix(" --force")
        raise ConfigError(f"{path}: no such file", hint=hint) from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.json"))
        hint = f"name the file in it: {files.typed(inside[0])}" if inside else "name a .json file"
        raise ConfigError(f"{path}: a folder, not a JSON file", hint=hint) from None


def anew(name: str) -> str:
    """The command that writes the JSON called `name` anew; a new one where `name` is empty."""
    if not name:
        return "dstool init-config"
    named = "" if name == "ds_config.json" else f" -o {files.typed(name)}"
    return f"dstool init-config{named} --force"


# --- bringing together -----------------------------------------------------------------------------------

# deepspeed 0.19.8 runtime/config.py `_initialize_params`, which ignores any other name without a word.
# `inference` is read by transformers and `msamp` by accelerate.
TOP_LEVEL_KEYS: Final = (
    "activation_checkpointing",
    "aio",
    "allgather_size",
    "autotuning",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "compile",
    "csv_monitor",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "expert_parallel",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "hybrid_engine",
    "inference",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "msamp",
    "optimizer",
    "pipeline",
    "prescale_gradients",
    "scheduler",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)

# runtime/config.py `_reject_removed_config_keys`: 0.19.8 refuses the file for any of these.
REMOVED_KEYS: Final = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)
REMOVED_ZERO_KEYS: Final = ("mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param")

_INSIDE_ZERO: Final = re.compile(
    r"stage$|stage3_|offload_|overlap_comm$|contiguous_gradients$|reduce_|allgather_"
)

# In this order: what holds a block comes before it.
_BLOCKS: Final = (
    "aio",
    "bf16",
    "bfloat16",
    "fp16",
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "zero_optimization",
    "zero_optimization.aio",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)

# Trainer fills only those that are there as "auto". Without the first, DeepSpeed asserts; without the last it
# clips at 1.0 from 0.19.3 on and not at all before, whatever max_grad_norm says (runtime/constants.py).
_TRAINERS_OWN: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

# runtime/zero/config.py: what true under the old name makes of the new is the device "cpu".
OLD_OFFLOADS: Final = MappingProxyType(
    {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
)

_GATHER: Final = "stage3_gather_16bit_weights_on_model_save"
_GATHER_NAMES: Final = (_GATHER, "stage3_gather_fp16_weights_on_model_save")

_Kind = Literal["count", "number", "flag"]


@dataclass(frozen=True)
class _Pair:
    """A key of the JSON and the field of TrainingArguments that Trainer compares it with."""

    key: str
    field: str
    kind: _Kind


# transformers 5.24 integrations/deepspeed.py, `trainer_config_process` and `trainer_config_finalize`.
_PAIRS: Final = (
    _Pair("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "count"),
    _Pair("gradient_accumulation_steps", "gradient_accumulation_steps", "count"),
    _Pair("gradient_clipping", "max_grad_norm", "number"),
    _Pair("optimizer.params.lr", "learning_rate", "number"),
    _Pair("optimizer.params.betas.0", "adam_beta1", "number"),
    _Pair("optimizer.params.betas.1", "adam_beta2", "number"),
    _Pair("optimizer.params.eps", "adam_epsilon", "number"),
    _Pair("optimizer.params.weight_decay", "weight_decay", "number"),
    _Pair("scheduler.params.warmup_max_lr", "learning_rate", "number"),
    _Pair("scheduler.params.warmup_num_steps", "warmup_steps", "count"),
    _Pair("fp16.enabled", "fp16", "flag"),
    _Pair("bf16.enabled", "bf16", "flag"),
)

_EXPECTED: Final[Mapping[_Kind, str]] = MappingProxyType(
    {"count": "a whole number above 0", "number": "a number", "flag": "true, false"}
)


@dataclass(frozen=True)
class Reconciled:
    """The JSON and the `train:` section after they were brought together, and what was changed for it."""

    ds: dict[str, Any]
    train: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value at a path of the JSON, in `words`; `meant` is a key's right name."""

    rule: str
    path: tuple[str, ...]
    words: str
    meant: str | None = None


@dataclass
class _Work:
    """One reconciliation under way: the two copies that change, and what was found."""

    ds: dict[str, Any]
    train: dict[str, Any]
    json_name: str
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    mismatches: dict[str, str] = field(default_factory=dict)  # by the key to set to "auto"

    def wrong(self, rule: str, path: str, words: str) -> None:
        """Note a problem of the value at the dotted `path`."""
        self.problems.append(Problem(rule, tuple(path.split(".")), words))

    def get(self, path: str) -> Any:
        """The value at the dotted `path`, None where there is none."""
        node: Any = self.ds
        for name in path.split("."):
            if isinstance(node, list):
                node = node[int(name)] if int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node


def reconcile(
    ds: Mapping[str, Any],
    train: Mapping[str, Any],
    *,
    json_name: str = "ds_config.json",
    run_name: str = "dstool.yaml",
) -> Reconciled:
    """Bring the DeepSpeed JSON and the explicitly given fields of `train:` together. Neither is changed.

    What the JSON leaves out and Trainer owns becomes "auto"; a number that only the JSON gives becomes the
    field's value, so that Trainer, which compares the two after it has loaded the model, finds them equal.
    `train_batch_size` is left to `fit_batch`, which knows the world size.

    Raises one `ConfigError` that lists everything in which the two disagree or the JSON is wrong.
    """
    work = _worked(ds, train, json_name)
    if work.problems or work.mismatches:
        raise _refusal(work, run_name)
    return Reconciled(work.ds, work.train, tuple(work.notes))


def problems(ds: Mapping[str, Any], train: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Everything for which `reconcile` refuses the two; a value that differs has the rule "mismatch"."""
    work = _worked(ds, train, "the JSON")
    differ = [Problem("mismatch", tuple(key.split(".")), words) for key, words in work.mismatches.items()]
    return (*work.problems, *differ)


def other_words(ds: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields of `train` that `reconcile` refuses beside `ds` would have to be; None is left out."""
    work = _Work(dict(ds), dict(train), "the JSON")
    said: dict[str, Any] = {}
    for pair in _PAIRS:
        literal, given = work.get(pair.key), train.get(pair.field)
        if given is not None and _is(pair.kind, literal) and not _agree(pair, literal, given):
            said[pair.field] = literal
    for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
        if work.get(f"{name}.enabled") is True and train.get(other):
            said[other] = False
    if "scheduler" in ds and train.get("lr_scheduler_type") is not None:
        said["lr_scheduler_type"] = None
    return said


def _worked(ds: Mapping[str, Any], train: Mapping[str, Any], json_name: str) -> _Work:
    work = _Work(copy.deepcopy(dict(ds)), copy.deepcopy(dict(train)), json_name)
    for step in (
        _check_shapes,
        _check_names,
        _settle_zero,
        _check_offload,
        _fill_missing,
        _check_types,
        _match_pairs,
        _check_precision,
        _check_silent_winners,
    ):
        step(work)
    return work


def fit_batch(ds: Mapping[str, Any], world_size: int, train: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `train` with the batch that makes a pinned `train_batch_size` on `world_size` ranks.

    Of micro batch and accumulation, what neither file gives is chosen: so the same files train with the same
    batch on any number of ranks that divides it. The rule is deepspeed 0.19.8 runtime/config.py
    `_batch_assertion`. Raises `ConfigError` with the numbers, and with three that fit.
    """
    total = ds.get("train_batch_size")
    if total in (None, AUTO):
        return dict(train)
    micro = _literal(ds, "train_micro_batch_size_per_gpu", train.get("per_device_train_batch_size"))
    steps = _literal(ds, "gradient_accumulation_steps", train.get("gradient_accumulation_steps"))
    rank = total // world_size
    if micro is None:
        micro = max(1, rank // steps) if steps else _divisor(rank, 8)
    if steps is None:
        steps = max(1, rank // micro)
    if total == micro * steps * world_size:
        return {**train, "per_device_train_batch_size": micro, "gradient_accumulation_steps": steps}
    product = micro * steps * world_size
    fit = _fitting(total, micro, steps, world_size)
    words = (
        f"but train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {steps} * "
        f"world size {world_size} is {product}"
    )
    if total % world_size:
        words = f"which {world_size} ranks cannot share"
    raise ConfigError(
        f"train_batch_size is {total}, {words}; {fit[0]} = {fit[1]} * {fit[2]} * {world_size} would do",
        hint=f'set train_batch_size to "auto" (or to {product}) in the DeepSpeed JSON',
    )


def _fitting(total: int, micro: int, steps: int, world_size: int) -> tuple[int, int, int]:
    """A valid train batch, micro batch and accumulation: the total kept where the world size divides it."""
    rank, rest = divmod(total, world_size)
    if rest or rank < 1:
        return micro * steps * world_size, micro, steps
    fit = _divisor(rank, micro)
    return total, fit, rank // fit


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`; 1 where there is none."""
    return max((n for n in range(1, min(number, most) + 1) if number % n == 0), default=1)


def _literal(ds: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = ds.get(key)
    return otherwise if value in (None, AUTO) else value


def _refusal(work: _Work, run_name: str) -> ConfigError:
    parts = [f"{work.json_name}: {'; '.join(each.words for each in work.problems)}"] if work.problems else []
    hint = "dstool check shows each with its place and mend"
    if work.mismatches:
        parts.append(f"{work.json_name} and {run_name} disagree: {'; '.join(work.mismatches.values())}")
    if work.mismatches and not work.problems:
        hint = f'in {work.json_name} set to "auto": {", ".join(work.mismatches)}'
    return ConfigError("; ".join(parts), hint=hint)


def misnames_stage(ds: Mapping[str, Any]) -> bool:
    """Whether the ZeRO stage is there, but where nobody reads it: at the top level, or misspelt."""
    zero = ds.get("zero_optimization")
    inside = zero if isinstance(zero, dict) else {}
    if "stage" in inside:
        return False
    meant = ["stage"] if "zero_optimization" in ds else ["stage", "zero_optimization"]
    names = [name.lower() for name in (*ds, *inside) if name not in TOP_LEVEL_KEYS]
    names = [name for name in names if not name.startswith(("_", "//"))]
    return any(difflib.get_close_matches(name, meant, 1, cutoff=0.66) for name in names)


# Where the letters mislead: bfp16 is as near to fp16, and the others mean another key, or the opposite.
_MEANT: Final[Mapping[str, str | None]] = MappingProxyType(
    {"bfp16": "bf16", "gradient_accumulation_dtype": None, "postscale_gradients": None}
)


def meant_by(key: str) -> str | None:
    """The key of the top level that an unknown one is taken to mean; None where none comes near."""
    if key in _MEANT:
        return _MEANT[key]
    close = difflib.get_close_matches(key.lower(), TOP_LEVEL_KEYS, 1, cutoff=0.7)
    return close[0] if close else None


def show(value: Any) -> str:
    """`value` as JSON has it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_shapes(work: _Work) -> None:
    """Every block is an object. One that is null counts as left out; `check` refuses the others."""
    for path in _BLOCKS:
        parent, _, name = path.rpartition(".")
        holder = work.get(parent) if parent else work.ds
        if not isinstance(holder, dict) or name not in holder or isinstance(holder[name], dict):
            continue
        value = holder.pop(name)
        if value is not None:
            work.wrong("wrong-type", path, f"{path} is {show(value)}, an object {{ ... }} is expected")


def _check_names(work: _Work) -> None:
    """Unknown names at the top level, which DeepSpeed ignores, and removed ones, which it refuses."""
    for key in [key for key in work.ds if not key.startswith(("_", "//"))]:
        if key in REMOVED_KEYS:
            work.problems.append(Problem("removed-key", (key,), f"{key} is gone from DeepSpeed, delete it"))
        elif key in TOP_LEVEL_KEYS:
            continue
        elif _INSIDE_ZERO.match(key):
            work.problems.append(Problem("wrong-block", (key,), f"{key} belongs inside zero_optimization"))
        else:
            meant = meant_by(key)
            words = f"{key} is no DeepSpeed key{f', did you mean {meant}?' if meant else ''}"
            work.problems.append(Problem("unknown-key", (key,), words, meant))
    for key in REMOVED_ZERO_KEYS:
        if key in work.ds.get("zero_optimization", {}):
            path = f"zero_optimization.{key}"
            work.wrong("removed-key", path, f"{path} is gone from DeepSpeed, delete it")
    if "bfloat16" in work.ds:
        # accelerate adds a bf16 block that is off, and then DeepSpeed never looks at the old name.
        work.ds.setdefault("bf16", work.ds.pop("bfloat16"))
        work.notes.append(f"bfloat16 in {work.json_name} is read as bf16, its name today")


def _settle_zero(work: _Work) -> None:
    """One ZeRO block with a stage, no `aio` in it, and at stage 3 a model that can be saved."""
    zero = work.ds.setdefault("zero_optimization", {})
    stage = zero.get("stage")
    if misnames_stage(work.ds):
        zero["stage"] = 3  # the stage that allows everything, as the name is refused
    elif stage is None:
        zero["stage"] = 0  # DeepSpeed's default; accelerate refuses a file without the block
        work.notes.append(f"{work.json_name} names no ZeRO stage: trained at stage 0, nothing partitioned")
    elif stage == AUTO:
        zero["stage"] = 2  # what accelerate puts there (utils/dataclasses.py, DeepSpeedPlugin)
        work.notes.append('zero_optimization.stage "auto" means stage 2')
    elif isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        zero["stage"] = 3  # again, so that one mistake is one problem
        words = f"zero_optimization.stage is {show(stage)}, it must be 0, 1, 2 or 3"
        work.wrong("wrong-value", "zero_optimization.stage", words)
    if "aio" in zero:
        work.ds["aio"] = {**zero.pop("aio"), **work.ds.get("aio", {})}
        work.notes.append("aio was moved out of zero_optimization to the top level, where DeepSpeed reads it")
    if zero["stage"] == 3 and all(zero.get(name) in (None, AUTO) for name in _GATHER_NAMES):
        zero[_GATHER] = True  # left out it is false (zero/config.py), and Trainer saves no weights
        work.notes.append(f"zero_optimization.{_GATHER} is set to true, else no weights would be saved")


def _check_offload(work: _Work) -> None:
    """Offloading that DeepSpeed accepts and does not do, or that lacks its folder."""
    stage, zero = work.get("zero_optimization.stage"), work.ds["zero_optimization"]
    for name, old in OLD_OFFLOADS.items():
        where = f"zero_optimization.{name}"
        if zero.get(old) is True and name not in zero:
            # DeepSpeed still knows the old name, and accelerate leaves the optimizer on the device for it.
            del zero[old]
            zero[name] = {"device": "cpu"}
            work.notes.append(f"zero_optimization.{old} is read as {name} on the CPU, its name today")
            if stage < (lowest := 3 if name == "offload_param" else 1):
                words = f"zero_optimization.{old} needs stage {lowest}, the stage is {stage}"
                work.wrong("offload-stage", f"zero_optimization.{old}", words)
            continue
        device = work.get(f"{where}.device")
        if device in (None, AUTO, "none"):
            continue
        lowest = 3 if name == "offload_param" or device == "nvme" else 1
        if stage < lowest:
            words = f"{where}.device {device} needs stage {lowest}, the stage is {stage}"
            work.wrong("offload-stage", f"{where}.device", words)
        if device == "nvme" and work.get(f"{where}.nvme_path") in (None, AUTO, ""):
            words = f"{where}.device nvme needs {where}.nvme_path, a folder"
            work.wrong("nvme-without-path", f"{where}.device", words)


def _fill_missing(work: _Work) -> None:
    """Put "auto" where a key is left out and DeepSpeed's default would silently overrule the run file."""
    blocks: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [("", work.ds, _TRAINERS_OWN)]
    for name, own in filled_params(work.ds).items():
        blocks.append((f"{name}.params.", work.ds[name].setdefault("params", {}), own))
    if isinstance(work.ds.get("scheduler"), dict):
        work.ds["scheduler"].setdefault("params", {})  # which runtime/engine.py unpacks unseen
    filled = []
    for prefix, block, keys in blocks:
        missing = [key for key in keys if block.get(key) is None]
        block.update(dict.fromkeys(missing, AUTO))
        filled += [prefix + key for key in missing]
    if filled:
        work.notes.append(f"left out of {work.json_name} and taken from the run: {', '.join(filled)}")


def filled_params(ds: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """By its block, the optimizer's and scheduler's parameters that become "auto" where they are left out."""
    blocks = {name: ds.get(name) for name in ("optimizer", "scheduler")}
    types = {name: str(block.get("type")) for name, block in blocks.items() if isinstance(block, dict)}
    folded = {name.lower(): params for name, params in OPTIMIZER_PARAMS.items()}  # DeepSpeed folds case here,
    params = {
        "optimizer": folded.get(types.get("optimizer", "").lower(), {}),
        "scheduler": SCHEDULER_PARAMS.get(types.get("scheduler", ""), {}),  # but not here (runtime/config.py)
    }
    return {
        block: tuple(name for name, value in taken.items() if value == AUTO)
        for block, taken in params.items()
        if taken
    }


def _check_types(work: _Work) -> None:
    """Literals of the wrong kind, such as "true" in quotes or a warm-up of 0 steps, which 0.19.6 refuses."""
    betas = work.get("optimizer.params.betas")
    pair = isinstance(betas, list) and len(betas) == 2 and None not in betas and AUTO not in betas
    if betas not in (None, AUTO) and not pair:
        words = f'optimizer.params.betas is {show(betas)}, two numbers or "auto" are expected'
        work.wrong("wrong-type", "optimizer.params.betas", words)
        del work.ds["optimizer"]["params"]["betas"]
    kinds: dict[str, _Kind] = {"train_batch_size": "count", **{pair.key: pair.kind for pair in _PAIRS}}
    for key, kind in kinds.items():
        value = work.get(key)
        if value not in (None, AUTO) and not _is(kind, value):
            words = f'{key} is {show(value)}, {_EXPECTED[kind]} or "auto" is expected'
            work.wrong("wrong-type", key, words)


def _is(kind: _Kind, value: Any) -> bool:
    if kind == "flag" or isinstance(value, bool):
        return kind == "flag" and isinstance(value, bool)
    return isinstance(value, int) and value > 0 if kind == "count" else isinstance(value, int | float)


def _match_pairs(work: _Work) -> None:
    """Give the run file each literal that only the JSON has, and report the ones in which they differ."""
    source: dict[str, str] = {}
    for pair in _PAIRS:
        literal = work.get(pair.key)
        if literal in (None, AUTO) or not _is(pair.kind, literal):
            continue
        given = _given(work.train, pair.field)
        if given is None:
            work.train[pair.field] = literal
            source[pair.field] = pair.key
            work.notes.append(f"train.{pair.field} is {show(literal)}, from {pair.key} in {work.json_name}")
        elif not _agree(pair, literal, given):
            key = pair.key.removesuffix(".0").removesuffix(".1")
            other = f"train.{pair.field} {show(given)} in the run file"
            if pair.field in source:
                other = f"{source[pair.field]}, which means the same, {show(given)}"
            found = f"{pair.key} is {show(literal)} in the JSON and {other}"
            work.mismatches[key] = f"{work.mismatches[key]}; {found}" if key in work.mismatches else found
    _match_total_steps(work)


def _given(train: Mapping[str, Any], name: str) -> Any:
    """What Trainer compares the JSON with; None when the run file does not say.

    fp16 counts as on when fp16_full_eval is, and likewise bf16.
    """
    return True if train.get(f"{name}_full_eval") else train.get(name)


def _agree(pair: _Pair, literal: Any, given: Any) -> bool:
    """Trainer passes no warm-up on as one step, and compares that."""
    return bool(literal == (1 if pair.field == "warmup_steps" and given == 0 else given))


def _match_total_steps(work: _Work) -> None:
    """A pinned total can be compared only where the run file pins its steps; it must equal the real count."""
    key = "scheduler.params.total_num_steps"
    total, steps = work.get(key), work.train.get("max_steps")
    if total in (None, AUTO):
        return
    if not isinstance(steps, int) or steps <= 0:
        work.notes.append(f'{key} is {show(total)} and must equal the steps of the run; "auto" always does')
    elif total != steps:
        work.mismatches[key] = (
            f"{key} is {show(total)} in the JSON and train.max_steps {steps} in the run file"
        )


def _check_precision(work: _Work) -> None:
    """At most one 16-bit type is on (runtime/config.py asserts it), whichever file turns it on."""
    on = [name for name in ("fp16", "bf16") if work.get(f"{name}.enabled") is True]
    if len(on) == 2:
        work.wrong("both-precisions", "bf16.enabled", "fp16.enabled and bf16.enabled are both true, keep one")
    elif on:
        other = "bf16" if on == ["fp16"] else "fp16"
        enabled = work.get(f"{other}.enabled")
        asked = _given(work.train, other) if enabled == AUTO else work.train.get(other)
        if enabled in (None, AUTO) and asked:
            work.mismatches[f"{on[0]}.enabled"] = (
                f"{on[0]}.enabled is true in the JSON and train.{other} true in the run file"
            )


def _check_silent_winners(work: _Work) -> None:
    """Blocks of the JSON that would silently replace what the run file asks for.

    transformers 5.24 integrations/deepspeed.py `deepspeed_optim_sched`.
    """
    train = work.train
    if "scheduler" in work.ds and train.get("lr_scheduler_type") is not None:
        work.wrong(
            "silent-winner",
            "scheduler",
            f"the scheduler block ({work.get('scheduler.type')}) would silently replace "
            f"train.lr_scheduler_type {train['lr_scheduler_type']}, delete one of the two",
        )
    name, optim = work.get("optimizer.type"), train.get("optim")
    if "optimizer" in work.ds and optim is not None and not str(optim).startswith(str(name).lower()):
        words = (
            f"the optimizer block ({name}) would silently replace train.optim {optim}, delete one of the two"
        )
        work.wrong("silent-winner", "optimizer", words)
