"""Say before anything is loaded which ZeRO stage and offload fit a machine, and which is the fastest."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dstool import machine, models, preflight
from dstool.config import BLOCK_SIZE, LENGTH_KEYS, MAX_LENGTH, RUN_FILE, Config, Loaded, LoraSection, load
from dstool.console import human_bytes
from dstool.ds_config import memory
from dstool.ds_config.build import AUTO, OPTIMIZER_PARAMS
from dstool.ds_config.options import CHOICES, Offload, OptimizerName, Stage
from dstool.errors import ConfigError, ModelError
from dstool.files import option, typed

logger = logging.getLogger("dstool.plan")

ASSUMED_GPU = 80_000_000_000
BATCH = 8
GIVEN_BY_TRAINER = {
    "adafactor": 0,
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "sgd": 0,
    "adagrad": 4,
    "rmsprop": 4,
    "lion_32bit": 4,
}
"""Bytes of state for a parameter in some optimizers of `train.optim`; the others are taken for Adam's 8."""


@dataclass(frozen=True)
class Options:
    """What the command line says; None is for the run file or the machine to say."""

    gpus: int | None = None
    nodes: int = 1
    gpu_memory: str | None = None
    cpu_memory: str | None = None
    nvme_space: str | None = None
    micro_batch: int | None = None
    seq_len: int | None = None
    precision: memory.Precision | None = None
    optimizer: OptimizerName | None = None
    gradient_checkpointing: bool | None = None


@dataclass(frozen=True)
class Choice:
    """One stage and offload: what it needs, and by how much it does not fit."""

    stage: Stage
    offload: Offload
    fits: bool
    gpu: memory.Kinds
    """Bytes for each GPU."""
    gpu_bytes: int
    """Their sum, with what is kept for the CUDA context."""
    host: memory.Kinds
    """Bytes for each host."""
    host_bytes: int
    """Their sum or what loading takes, with what each rank's Python takes."""
    nvme_bytes: int
    """For each host."""
    lacks: Mapping[str, int]
    """Bytes by which it does not fit, by place: gpu, host, nvme."""


@dataclass(frozen=True)
class PlanResult:
    """What each stage and offload needs, and the fastest that fits."""

    model: str
    parameters: int
    trained: int
    setup: memory.Setup
    limits: memory.Limits
    choices: tuple[Choice, ...]
    stage: Stage | None
    """Of the fastest that fits; None where nothing does."""
    offload: Offload | None
    later: memory.Later
    assumed: tuple[str, ...]
    """What was neither given nor found, and how it was taken."""
    help: tuple[str, ...]
    """What would make it fit, where nothing does."""


_BY = "--model "  # as plan and init-config --auto take it


def plan(config: Config, options: Options | None = None) -> PlanResult:
    """Work out what the model of `config` needs at each stage and offload. No weights are loaded.

    Raises:
        ConfigError: a size or number that makes no sense, or a DeepSpeed JSON that cannot be used.
        ModelError: no such model, or one that cannot be trained as asked.
    """
    options = options or Options()
    _check(options)
    preflight.check_model(config, by=_BY)
    assumed: list[str] = []
    setup = _setup(config, options, assumed)
    limits = _limits(config, options, assumed)
    if config.lora is not None and "r" not in config.lora.model_fields_set:
        assumed.append(f"LoRA of rank {config.lora.r} (lora.r=16 for another)")
    _check_task(config)
    _check_positions(config, options)
    ds, _ = _settled(config)
    own_optimizer = bool(ds) and "optimizer" not in ds
    shape = models.shape_of(config.model, config.lora, own_optimizer=own_optimizer)
    choices = tuple(_choice(each, limits, setup) for each in memory.estimates(shape, setup))
    best = memory.recommend(shape, setup, limits)
    return PlanResult(
        model=config.model.name or str((config.model.from_scratch or {}).get("model_type")),
        parameters=shape.parameters,
        trained=shape.trained_parameters,
        setup=setup,
        limits=limits,
        choices=choices,
        stage=best[0] if best else None,
        offload=best[1] if best else None,
        later=memory.later(shape, setup),
        assumed=tuple(assumed),
        help=() if best else _help(shape, setup, choices, lora=config.lora is not None),
    )


def _choice(each: memory.Estimate, limits: memory.Limits, setup: memory.Setup) -> Choice:
    lacks = each.lacks(limits, setup.gpus)
    host = each.host_bytes(setup.gpus)
    return Choice(
        each.stage, each.offload, not lacks, each.gpu, each.gpu_bytes, each.host, host, each.nvme.total, lacks
    )


# --- what is asked for ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the command line asks for: a run file with all that goes over it, and how that was typed."""

    config: Config
    options: Options = field(default_factory=Options)
    words: tuple[str, ...] = ()
    """KEY=VALUE words over the run file; `config` has their values."""
    model: str | None = None
    """In place of the run file's."""
    adds_lora: bool = False
    """Whether an adapter is planned for that the run file does not have."""
    run_file: Path | None = None
    """Where that is another one than dstool.yaml here."""


def ask(
    loaded: Loaded, given: Mapping[str, Any], words: Sequence[str] = (), *, task_given: bool | None = None
) -> Asked:
    """The run file with what is `given` over it, by the names of `Options`, or as `model` and `lora`.

    Args:
        given: None is not given; what has another name is passed over.
        words: those that the run file was loaded with.
        task_given: whether the task of the run file is for the `model` too. By default, where it names one.

    Raises:
        ConfigError, ModelError: the model cannot be found, or is for no task.
    """
    model, lora = given.get("model"), bool(given.get("lora"))
    config = loaded.config
    if model is not None:
        task_given = "model.task" in loaded.sources if task_given is None else task_given
        config = _with_model(config, model, task_given=task_given)
    if lora:
        config = config.model_copy(update={"lora": config.lora or LoraSection(target_modules="all-linear")})
    names = [each.name for each in fields(Options) if given.get(each.name) is not None]
    options = Options(**{name: given[name] for name in names})
    adds_lora = lora and loaded.config.lora is None
    run_file = None if loaded.path == Path(RUN_FILE) else loaded.path
    return Asked(config, options, tuple(words), model, adds_lora, run_file)


def ask_anew(given: Mapping[str, Any]) -> Asked:
    """What `init-config --auto` asks for with its options: the JSON is about to be written, so none counts.

    Raises:
        ConfigError: neither `given` nor the run file names a model.
    """
    values = {
        "model.task": given.get("task"),
        "train.gradient_accumulation_steps": given.get("accumulation"),
    }
    loaded = load(flags=values, required=False)
    model, named = given.get("model"), loaded.config.model
    if model is None and named.name is None and named.from_scratch is None:
        raise ConfigError(
            f"--auto needs to know the model, and no {RUN_FILE} here names one",
            hint="dstool init-config --auto --model Qwen/Qwen3-0.6B, or another folder or hub name",
        )
    wanted = {**given, "gradient_checkpointing": given.get("activation_checkpointing")}
    wanted["precision"] = None if given.get("precision") == "auto" else given.get("precision")
    without_json = replace(loaded, config=loaded.config.model_copy(update={"deepspeed": None}))
    asked = ask(without_json, wanted, task_given=values["model.task"] is not None)
    values["model.task"] = asked.config.model.task if model else values["model.task"]
    words = ["deepspeed=null"] if loaded.config.deepspeed else []
    words += [f"{key}={value}" for key, value in values.items() if value is not None]
    return replace(asked, words=tuple(words))


def _with_model(config: Config, name: str, *, task_given: bool) -> Config:
    """`config` for another model; its task is that of its architecture, where `config` does not say."""
    section = config.model.model_copy(update={"name": name, "from_scratch": None, "revision": None})
    changed = config.model_copy(update={"model": section})
    if not task_given:
        preflight.check_model(changed, by=_BY)
        changed = changed.model_copy(
            update={"model": section.model_copy(update={"task": models.task_of(section)})}
        )
    return changed


# --- what is given, found or assumed -------------------------------------------------------------------


def _check_task(config: Config) -> None:
    """Raise `ModelError` for a model whose architecture is for the other task."""
    task, name = config.model.task, config.model.name
    possible = models.tasks_of(config.model)
    if not possible or task in possible:
        return  # one that Transformers does not know is taken from its files
    model = f" --model {typed(name)}" if name else ""
    raise ModelError(
        f"{name or 'model.from_scratch'}: Transformers has no such model for {task}, only for {possible[0]}",
        hint=f"dstool plan{model} model.task={possible[0]} (with init-config --auto: --task {possible[0]})",
    )


def _check(options: Options) -> None:
    for name in ("gpus", "nodes", "micro_batch", "seq_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            flag = option(name)
            raise ConfigError(f"{flag} {value}: must be 1 or more", hint=f"{flag} 1")


def _setup(config: Config, options: Options, assumed: list[str]) -> memory.Setup:
    ds, train = _settled(config)
    zero = ds.get("zero_optimization") or {}
    precision = options.precision or _precision(ds, train, assumed)
    batch = _number(ds.get("train_micro_batch_size_per_gpu"), train.get("per_device_train_batch_size"))
    steps = _number(ds.get("gradient_accumulation_steps"), train.get("gradient_accumulation_steps"))
    checkpointing = options.gradient_checkpointing
    if checkpointing is None:
        names = ("gradient_checkpointing", "activation_checkpointing")
        checkpointing = any(train.get(name) for name in names)
    return memory.Setup(
        gpus=options.gpus or _gpus(assumed),
        nodes=options.nodes,
        precision=precision,
        state_bytes=_state_bytes(options.optimizer, ds, train),
        fp32_accumulation=(ds.get("data_types") or {}).get("grad_accum_dtype") == "fp32",
        accumulates=bool(steps and steps > 1),
        micro_batch=options.micro_batch or batch or BATCH,
        seq_len=options.seq_len or _seq_len(config),
        checkpointing=checkpointing,
        **_zero_settings(zero),
    )


def _settled(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The run file's DeepSpeed JSON, or none, and its `train:` section."""
    if config.deepspeed is None:
        return {}, config.train.arguments()
    settled = preflight.settle(config)
    return settled.ds, settled.train


def _number(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _zero_settings(zero: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the JSON that cost memory; without a JSON, those that `init-config` writes."""
    optimizer, parameters = (zero.get(f"offload_{name}") or {} for name in ("optimizer", "param"))
    keys = {
        "reduce_bucket_size": zero.get("reduce_bucket_size", 500_000_000 if zero else AUTO),
        "overlap_comm": zero.get("overlap_comm", True),
        "persistence_threshold": zero.get("stage3_param_persistence_threshold"),
        "max_live_parameters": zero.get("stage3_max_live_parameters"),
        "sub_group_size": zero.get("sub_group_size"),
        "nvme_optimizer_buffers": optimizer.get("buffer_count"),
        "nvme_param_buffers": parameters.get("buffer_count"),
        "nvme_param_buffer_size": parameters.get("buffer_size"),
        "max_in_cpu": parameters.get("max_in_cpu"),
    }
    return {key: int(value) for key, value in keys.items() if isinstance(value, int | float)}


def _precision(ds: Mapping[str, Any], train: Mapping[str, Any], assumed: list[str]) -> memory.Precision:
    names: tuple[memory.Precision, memory.Precision] = ("bf16", "fp16")
    for name in names:
        if (ds.get(name) or {}).get("enabled") is True or train.get(name):
            return name
    if ds and not any((ds.get(name) or {}).get("enabled") == AUTO for name in names):
        return "fp32"
    if any(train.get(name) is False for name in names):
        return "fp32"
    assumed.append("precision bf16 (--precision names another)")
    return "bf16"


def _state_bytes(given: OptimizerName | None, ds: Mapping[str, Any], train: Mapping[str, Any]) -> int:
    name = given if given not in (None, "none") else (ds.get("optimizer") or {}).get("type")
    if name is None:
        return GIVEN_BY_TRAINER.get(str(train.get("optim")), 8)
    if str(name).lower() == "sgd":
        written = OPTIMIZER_PARAMS["SGD"] if given else ds["optimizer"].get("params") or {}
        return 4 if written.get("momentum") else 0
    return memory.OPTIMIZER_STATES.get(str(name).lower(), 8)


def _check_positions(config: Config, options: Options) -> None:
    """Warn of texts that the model has no positions for."""
    limit = models.positions_of(config.model)
    if limit and options.seq_len and options.seq_len > limit:
        logger.warning("--seq-len %d: the model is made for %d tokens", options.seq_len, limit)


def _seq_len(config: Config) -> int:
    task = config.model.task
    wanted = getattr(config.data, LENGTH_KEYS[task]) or (BLOCK_SIZE if task == "causal-lm" else MAX_LENGTH)
    limit = models.positions_of(config.model)
    return min(wanted, limit) if limit else int(wanted)


def _gpus(assumed: list[str]) -> int:
    found = machine.gpu_memories()
    if not found:
        assumed.append("1 GPU, as none was found (--gpus)")
    return len(found) or 1


def _limits(config: Config, options: Options, assumed: list[str]) -> memory.Limits:
    found = machine.gpu_memories() if options.gpu_memory is None else []
    if options.gpu_memory is not None:
        gpu = memory.parse_size(options.gpu_memory, "--gpu-memory")
    elif found:
        gpu = min(found)
    else:
        gpu = ASSUMED_GPU
        assumed.append(f"{human_bytes(gpu)} on each GPU, as none was found (--gpu-memory)")
    if options.cpu_memory is not None:
        host = memory.parse_size(options.cpu_memory, "--cpu-memory")
    else:
        host = machine.host_memory()
        assumed.append(f"{human_bytes(host)} of memory on each host, as this machine has (--cpu-memory)")
    nvme = memory.parse_size(options.nvme_space, "--nvme-space") if options.nvme_space is not None else None
    return memory.Limits(gpu, host, nvme)


# --- where nothing fits --------------------------------------------------------------------------------


def _help(
    shape: memory.ModelShape, setup: memory.Setup, choices: tuple[Choice, ...], *, lora: bool
) -> tuple[str, ...]:
    """What to change, by what takes most in the choice that lacks least."""
    nearest = nearest_of(choices)
    words = []
    if "gpu" in nearest.lacks:
        if nearest.gpu.activations > nearest.lacks["gpu"] // 2 and not setup.checkpointing:
            words.append("--gradient-checkpointing (train.gradient_checkpointing=true)")
        if setup.micro_batch > 1:
            words.append(f"--micro-batch {setup.micro_batch // 2}")
        if setup.precision == "fp32":
            words.append("--precision bf16")
    if not lora:
        words.append("--lora")
    if "host" in nearest.lacks:
        words.append(f"--cpu-memory {human_bytes(nearest.host_bytes).replace(' ', '')} on each host")
    words.append(f"more GPUs: --gpus {2 * setup.gpus}, or --nodes {2 * setup.nodes}")
    return tuple(words)


def nearest_of(choices: tuple[Choice, ...]) -> Choice:
    """The choice that lacks fewest bytes, of those that are recommended at all."""
    ranked = [each for each in choices if (each.stage, each.offload) in memory.BY_SPEED]
    return min(ranked, key=lambda each: sum(each.lacks.values()))


# --- what is shown -------------------------------------------------------------------------------------

_PLACES = {"gpu": "GPU", "host": "host", "nvme": "NVMe"}
_HEAD = (
    "stage",
    "offload",
    "weights",
    "gradients",
    "optimizer",
    "buffers",
    "activations",
    "GPU",
    "host",
    "NVMe",
)


def show(result: PlanResult, asked: Asked) -> str:
    """The plan as a table with what it means, and the commands that make use of it."""
    lines = [*_heading(result), "", *_table(result), "", *_conclusion(result)]
    return "\n".join([*lines, *next_lines(result, asked)])


def log_choice(result: PlanResult, asked: Asked) -> None:
    """Say what was chosen, for what, and what was assumed.

    Raises:
        ConfigError: nothing fits.
    """
    if result.stage is None:
        raise ConfigError(f"{result.model} fits at no stage: {_nearest(result)}", hint=_command(asked))
    for words in result.assumed:
        logger.info("assumed: %s", words)
    named = _named(result.stage, result.offload or "none")
    logger.info("%s: %s is the fastest that fits", result.model, named)


def _heading(result: PlanResult) -> list[str]:
    setup, limits = result.setup, result.limits
    part = "" if result.trained == result.parameters else f", {result.trained:,} of them trained"
    host = f", {human_bytes(limits.host)} of memory on each host" if limits.host else ""
    nodes = f"{setup.nodes} nodes of " if setup.nodes > 1 else ""
    checkpointing = ", gradient checkpointing" if setup.checkpointing else ""
    lines = [
        f"{result.model}: {result.parameters:,} parameters{part}",
        f"{nodes}{setup.gpus} GPU{'s' if setup.gpus > 1 else ''} of {human_bytes(limits.gpu)}{host}",
        f"{setup.precision}, micro batch {setup.micro_batch} of {setup.seq_len} tokens{checkpointing}",
    ]
    return lines + [f"assumed: {words}" for words in result.assumed]


def _table(result: PlanResult) -> list[str]:
    rows = [_row(each, result) for each in result.choices]
    widths = [max(len(row[column]) for row in [_HEAD, *rows]) for column in range(len(_HEAD))]
    lines = []
    for row in [(*_HEAD, ""), *rows]:
        cells = [
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def _row(each: Choice, result: PlanResult) -> tuple[str, ...]:
    kinds = (each.gpu.weights, each.gpu.gradients, each.gpu.optimizer, each.gpu.buffers, each.gpu.activations)
    best = (each.stage, each.offload) == (result.stage, result.offload)
    lacking = ", ".join(
        f"{human_bytes(count)} short on the {_PLACES[place]}" for place, count in each.lacks.items()
    )
    return (
        str(each.stage),
        each.offload,
        *map(human_bytes, (*kinds, each.gpu_bytes, each.host_bytes)),
        human_bytes(each.nvme_bytes) if each.nvme_bytes else "-",
        lacking or ("fits, the fastest" if best else "fits"),
    )


def _conclusion(result: PlanResult) -> list[str]:
    kept = human_bytes(memory.RESERVE)
    lines = [
        f"GPU: each, with {kept} kept for the CUDA context; host, NVMe: each machine; 1 GB is 1000^3 bytes",
        f"a checkpoint takes {human_bytes(result.later.checkpoint_disk)} of disk",
        f"consolidate needs {human_bytes(result.later.consolidate_disk)} of disk and "
        f"{human_bytes(result.later.consolidate_memory)} of memory, merge "
        f"{human_bytes(result.later.merge_disk)} and {human_bytes(result.later.merge_memory)}",
    ]
    if result.stage is None:
        return [*lines, f"nothing fits; {_nearest(result)}", f"try: {'; '.join(result.help)}"]
    return [*lines, f"recommended: {_named(result.stage, result.offload or 'none')}"]


def _nearest(result: PlanResult) -> str:
    """Where nothing fits, what comes nearest, and the bytes that it lacks."""
    nearest = nearest_of(result.choices)
    lacks = ", ".join(
        f"{human_bytes(count)} on the {_PLACES[place]}" for place, count in nearest.lacks.items()
    )
    return f"{_named(nearest.stage, nearest.offload)} comes nearest and lacks {lacks}"


def _named(stage: Stage, offload: Offload) -> str:
    return f"stage {stage}" + ("" if offload == "none" else f" with offload to {offload}")


# --- what is typed next --------------------------------------------------------------------------------


def next_lines(result: PlanResult, asked: Asked) -> list[str]:
    """The commands that write the JSON that is recommended and train by it; none where nothing fits.

    The first has every option of `init-config` by which the run would otherwise be another one than was
    planned for: those that were given, and what the JSON says that it writes over. The second has what
    `init-config` has no option for, and is left out where that is nothing.
    """
    if result.stage is None:
        return []
    options = {"stage": result.stage, "offload": None if result.offload == "none" else result.offload}
    write = _typed("init-config", {**options, **_for_init_config(asked)})
    words, run_file = _for_train(asked), None if asked.model else asked.run_file
    train = _typed("train", {"config": run_file}, words)
    return [f"next: {write}", *([f"then: {train}"] if words or run_file else [])]


def _for_init_config(asked: Asked) -> dict[str, Any]:
    """What was planned for, as options of `init-config`."""
    options, model = asked.options, asked.model
    new = {"model": model, "task": asked.config.model.task} if model else _said_in_json(asked.config)
    names = ("precision", "micro_batch", "optimizer")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    changes_run_file = Path(RUN_FILE).exists() and (model is not None or options.gradient_checkpointing)
    return {
        **new,
        **given,
        "activation_checkpointing": options.gradient_checkpointing,
        "force": bool(changes_run_file or Path("ds_config.json").exists()),
    }


def _said_in_json(config: Config) -> dict[str, Any]:
    """What the JSON of the run file says for itself, as options of `init-config` that writes it anew."""
    ds, _ = _settled(config)
    name, rows = (ds.get("optimizer") or {}).get("type"), ds.get("train_micro_batch_size_per_gpu")
    on = (each for each in ("bf16", "fp16") if (ds.get(each) or {}).get("enabled") is True)
    return {
        "precision": next(on, None),
        "micro_batch": rows if isinstance(rows, int) else None,
        "optimizer": name if name in CHOICES["optimizer"] and name != "AdamW" else None,
    }


def _for_train(asked: Asked) -> list[str]:
    """What was planned for and `init-config` has no option for, as words over the run file.

    One that stays may name another JSON than the one that is written.
    """
    config, length = asked.config, asked.options.seq_len
    names_it = isinstance(config.deepspeed, str) and Path(config.deepspeed) == Path("ds_config.json")
    words = [word for word in asked.words if not word.startswith("deepspeed")]
    words += [] if asked.model or names_it else ["deepspeed=ds_config.json"]
    words += [] if length is None else [f"data.{LENGTH_KEYS[config.model.task]}={length}"]
    return words + (["lora.target_modules=all-linear"] if asked.adds_lora else [])


def _command(asked: Asked) -> str:
    """What one types for the whole plan of what is asked for."""
    options = {name: value for name, value in asdict(asked.options).items() if (name, value) != ("nodes", 1)}
    return _typed("plan", {"model": asked.model, "lora": asked.adds_lora, **options}, asked.words)


def _typed(command: str, options: Mapping[str, Any], words: Sequence[str] = ()) -> str:
    """A command of dstool as one types it: an option that is None or False is left out, True has no value."""
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return " ".join(["dstool", command, *map(typed, words), *map(option, given, given.values())])
