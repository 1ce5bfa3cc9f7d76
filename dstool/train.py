"""Fine-tune a model with Transformers' Trainer under DeepSpeed.

The order of the steps is not free. `deepspeed.init_distributed` comes before the model, or ZeRO-3
takes the world for one rank; `TrainingArguments` come before the model too, or ZeRO-3 meets the word
`auto` in the JSON (both seen with DeepSpeed 0.19.8 and Transformers 5.24).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.metadata
import json
import logging
import math
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import transformers
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainingArguments

from dstool import __version__, files, launch, log, models, preflight
from dstool.checkpoint import layout, reader, writer
from dstool.config import (
    BLOCK_SIZE,
    MAX_LENGTH,
    RECORD,
    RUN_FILE,
    Config,
    LoraSection,
    Task,
    dump,
    resolve,
    without_secrets,
)
from dstool.console import human_bytes, plain
from dstool.data import batches
from dstool.ds_config import read
from dstool.ds_config.memory import checkpoint_bytes
from dstool.errors import (
    CheckpointError,
    ConfigError,
    MissingDependency,
    NoDevice,
    NonFiniteLoss,
    RunFailed,
)

logger = logging.getLogger("dstool.train")


class Progress(Protocol):
    """What a run tells while it goes on."""

    def __call__(self, done: int, total: int, note: str) -> None:
        """`done` of `total` steps are finished; `note` is empty, or worth a line of its own."""


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left, and how well it does."""

    output_dir: Path
    steps: int
    seconds: float = field(metadata={"unit": "seconds"})
    train_loss: float
    metrics: Mapping[str, float]
    """On the held-out rows: loss, and accuracy and f1 (macro), or perplexity."""
    world_size: int
    device: str
    precision: str
    stage: int
    checkpoints: tuple[str, ...]
    best: str | None = None
    """Where `load_best_model_at_end` found the weights that the run ends with."""


def train(
    config: Config,
    *,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Train as the run file says, in this rank; every rank calls it alike.

    Args:
        force: train in an output folder that holds an earlier run, whose checkpoints go.
        resume: go on from the newest complete checkpoint in the output folder. Of a run that is complete,
            nothing is changed, and its result is what it was.
        callbacks: further callbacks for the Trainer.

    Raises:
        DstoolError: of the class that says whose fault it was (see `dstool.errors`).
    """
    started = time.monotonic()
    settled = preflight.check(config, may_exist=force or resume)
    for note in settled.notes:
        logger.info("%s", note)
    stage = int(settled.ds["zero_optimization"]["stage"])
    earlier = _earlier_result(config)
    if resume and earlier and 0 < settled.train.get("max_steps", -1) <= earlier.steps:
        return _as_it_is(earlier)
    checkpoint = _checkpoint_to_resume(config, settled.train, stage, resume=resume)
    with launch.rank_environment(), launch.explained_builds(), _zero3_forgotten():
        device = _start_distributed(settled.ds)
        args = _training_arguments(config, settled, device)
        done = earlier.steps if resume and earlier else 0
        steps = _Steps(progress, config.train.save_first_step, done if checkpoint else None)
        trainer, rows = _build_trainer(config, args, [*callbacks, steps])
        if checkpoint is None:
            _clear_earlier_run(args)
        with _explained_failures(args):
            train_loss = _fit(trainer, checkpoint)
            if earlier and steps.nothing_left:
                return _as_it_is(earlier)
            metrics = _evaluate(trainer, config.model.task)
            _save_model(trainer)
            if config.lora is not None and args.process_index == 0:
                models.save_base_config(trainer.model, Path(args.output_dir))
            if config.train.save_fp32:
                _save_fp32(trainer, Path(args.output_dir, "fp32"), stage)
        result = TrainResult(
            output_dir=Path(args.output_dir).resolve(),
            steps=int(trainer.state.global_step),
            seconds=time.monotonic() - started,
            train_loss=train_loss,
            metrics=metrics,
            world_size=args.world_size,
            device=device,
            precision=_precision_of(args),
            stage=stage,
            checkpoints=tuple(path.name for path in layout.checkpoints(Path(args.output_dir))),
            best=_best(trainer),
        )
        if args.process_index == 0:
            _record(config, result, rows)
    return result


# --- before torch.distributed ----------------------------------------------------------------------


def _earlier_result(config: Config) -> TrainResult | None:
    """What a finished run left in the output folder, by its own record; None where there is no such run."""
    folder = Path(config.train.output_dir)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        values = {each.name: record[each.name] for each in fields(TrainResult) if each.name in record}
        there = tuple(path.name for path in layout.checkpoints(folder))
        best = values.get("best") if values.get("best") in there else None
        values |= {"output_dir": folder.resolve(), "checkpoints": there, "best": best}
        result = TrainResult(**values)
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return result if models.has_weights(folder) and isinstance(result.steps, int) else None


def _as_it_is(earlier: TrainResult) -> TrainResult:
    logger.info(
        "the run in %s is complete, all %d steps: nothing is changed (a higher train.max_steps or "
        "train.num_train_epochs trains on)",
        *(earlier.output_dir, earlier.steps),
    )
    return earlier


def _checkpoint_to_resume(
    config: Config, arguments: dict[str, Any], stage: int, *, resume: bool
) -> Path | None:
    """The checkpoint that the run file names, the newest whole one of the output folder, or none.

    Raises:
        CheckpointError: there is none to resume from, or it is of another stage or world size.
    """
    named = arguments.pop("resume_from_checkpoint", None)
    if not (resume or named):
        return None
    run_dir = Path(config.train.output_dir)
    source = files.in_run(Path(named), run_dir) if isinstance(named, str) else run_dir
    newest = next(reversed(layout.checkpoints(source)), source)
    if (weights := layout.plain_weights(newest)) and not layout.is_zero(source):
        raise CheckpointError(
            f"{newest} holds {weights} and no state of DeepSpeed's (global_step*) to go on from",
            hint=f"start from them: dstool train model.name={files.typed(newest)} train.output_dir=DIR",
        )

    if source.is_dir() and not layout.is_checkpoint(source) and layout.checkpoints(source):
        found = layout.newest_complete(source, _check_trainers_files)
    else:
        found = layout.find(source)
        _check_trainers_files(found)
    _check_resumable(found, stage)
    logger.info("resuming from %s", found.root)
    return found.root


def _check_trainers_files(found: layout.ZeroCheckpoint) -> None:
    """Raise `CheckpointError` where a file is missing or damaged that Trainer reads (trainer.py, 5.24)."""
    root = found.root
    hint = f"dstool consolidate {files.typed(root)}, then train from those weights with model.name=..."
    file = root / "trainer_state.json"
    try:
        step = json.loads(file.read_text(encoding="utf-8"))["global_step"]
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, and a run cannot go on without it", hint=hint) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {' '.join(str(error).split())}", hint=hint) from error
    if not isinstance(step, int):
        raise CheckpointError(f"{file} is damaged: global_step is {step!r}", hint=hint)
    for file in (root / "scheduler.pt", *sorted(root.glob("rng_state*.pth"))):
        if file.is_file() and not zipfile.is_zipfile(file):
            raise CheckpointError(f"{file} is damaged: cut short, or no file of torch.save", hint=hint)


def _check_resumable(found: layout.ZeroCheckpoint, stage: int) -> None:
    """DeepSpeed keeps a shard of the optimizer per rank, and does not cut it anew (engine.py, 0.19.8)."""
    root = files.typed(found.root)
    anew = f"or dstool consolidate {root}, then train on from those weights with model.name=..."
    if found.stage != stage:
        raise CheckpointError(
            f"{found.root} is of ZeRO stage {found.stage}, and this run of stage {stage}",
            hint=f"resume with the JSON it was trained with; {anew}",
        )
    if found.stage and found.world_size != launch.world_size():
        raise CheckpointError(
            f"{found.root} was written by {layout.ranks(found.world_size)}, "
            f"and this run has {launch.world_size()}",
            hint=f"--num-gpus {found.world_size}; {anew}",
        )


def _clear_earlier_run(args: TrainingArguments) -> None:
    """Take away what an earlier run left in the output folder, now that this one is about to start.

    Its record too: it says of the weights and checkpoints what will not be true of them.
    """
    run_dir = Path(args.output_dir)
    if args.process_index == 0:
        (run_dir / RECORD).unlink(missing_ok=True)
        for stale in (*layout.checkpoints(run_dir), run_dir / "consolidated", run_dir / "fp32"):
            shutil.rmtree(stale, ignore_errors=True)
        # Beside a whole model, an adapter would be loaded on top of it, and the other way round.
        whole = [each + end for each in layout.WEIGHT_FILES.values() for end in ("", layout.INDEX)]
        for name in (*whole, *layout.ADAPTER_FILES, models.ADAPTER_CONFIG):
            (run_dir / name).unlink(missing_ok=True)
    torch.distributed.barrier()


# --- the ranks, and what they run on -----------------------------------------------------------------


def _start_distributed(ds: dict[str, Any]) -> str:
    """Join the ranks; the kind of device they use."""
    launch.check_build_locks()
    deepspeed = launch.import_deepspeed()
    device = launch.accelerator()
    _check_offload(ds)
    _announce_builds(ds, device)
    if device == "cpu":
        ranks = launch.world_size()
        logger.info("no GPU found: training on the CPU over gloo, %d rank%s", ranks, "s" if ranks > 1 else "")
        _share_cores()
    try:
        deepspeed.init_distributed(dist_backend="gloo" if device == "cpu" else None, verbose=False)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            port = os.environ.get("MASTER_PORT")
            raise RunFailed(
                f"port {port} is taken, perhaps by a run that was killed",
                hint=f"dstool train, or deepspeed --master_port {launch.free_port()} dstool train",
            ) from error
        raise
    atexit.register(_end_distributed, int(os.environ["MASTER_PORT"]))
    return device


def _share_cores() -> None:
    """Give each CPU rank its part of the cores; by default each would start a thread on all of them."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


def _end_distributed(port: int) -> None:
    """Leave the group of ranks; without it the interpreter now and then aborts on its way out.

    Not before the process ends: DeepSpeed keeps the groups it made (utils/groups.py, 0.19.8), and a
    second run in the same process needs them.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    launch.free_shared_memory(port)


@contextlib.contextmanager
def _zero3_forgotten() -> Iterator[None]:
    """Afterwards, let models be loaded whole again.

    Transformers partitions each model that is made while it knows of a ZeRO-3 JSON.
    """
    try:
        yield
    finally:
        _forget_zero3()


def _forget_zero3() -> None:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _check_offload(ds: Mapping[str, Any]) -> None:
    """Find out before the model is loaded whether what offloading needs is here.

    Raises:
        ConfigError: the NVMe folder cannot be written.
        MissingDependency: no libaio.
    """
    zero = ds["zero_optimization"]
    offloads = [zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}]
    devices = {part.get("device", "none") for part in offloads}
    if "nvme" not in devices:
        return
    for folder in {Path(part["nvme_path"]) for part in offloads if part.get("device") == "nvme"}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"nvme_path {folder} cannot be made: {error.strerror}",
                hint="dstool init-config --nvme-path DIR --force",
            ) from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"nvme_path {folder} cannot be written", hint="dstool init-config --nvme-path DIR --force"
            )
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with contextlib.redirect_stdout(sys.stderr):
        fit = AsyncIOBuilder().is_compatible(verbose=False)
    if not fit:
        raise MissingDependency(
            "offloading to NVMe needs the library libaio and its headers, which were not found",
            hint="apt-get install libaio-dev (Debian, Ubuntu) or dnf install libaio-devel",
        )


def _announce_builds(ds: Mapping[str, Any], device: str) -> None:
    """Say why the first run on a machine seems to stand still: DeepSpeed compiles its optimizer then."""
    offloads = bool((ds["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none")
    op = "cpu_adam" if offloads else "fused_adam"
    if (offloads or (device == "cpu" and "optimizer" in ds)) and not launch.is_built(op):
        logger.info("DeepSpeed compiles its optimizer (%s), the first time only: a few minutes", op)


# --- the Trainer -------------------------------------------------------------------------------------


def _training_arguments(config: Config, settled: read.Reconciled, device: str) -> TrainingArguments:
    """The Trainer's arguments, with the precision settled and every rank known.

    Raises:
        ConfigError: Trainer refuses them.
        NoDevice: fp16 without a GPU.
    """
    ds = settled.ds
    arguments = _with_batch(settled)
    level = "passive" if log.debug() else "error"
    defaults = {
        "logging_steps": 10,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "log_level": level,
        "log_level_replica": level,
    }
    values = {**defaults, **_precision(arguments, ds, device), **arguments}
    if device == "cpu":
        if values.get("fp16"):
            raise NoDevice(
                "fp16 needs a GPU, and none was found",
                hint="train.fp16=false train.bf16=true, or both false for fp32",
            )
        values["use_cpu"] = True
    try:
        args = TrainingArguments(**values, deepspeed=ds)
    except (ValueError, TypeError, ImportError, AssertionError) as error:
        raise ConfigError(
            f"train: {' '.join(str(error).split())}", hint="change it in the run file"
        ) from error
    if args.world_size != launch.world_size():
        raise RunFailed(
            f"Trainer sees {layout.ranks(args.world_size)}, the launcher started {launch.world_size()}",
            hint="unset ACCELERATE_USE_CPU, and the other variables that start with ACCELERATE_",
        )
    if config.train.save_fp32 and ds["zero_optimization"]["stage"] == 0 and _precision_of(args) != "fp32":
        raise ConfigError(
            f"train.save_fp32 at ZeRO stage 0 in {_precision_of(args)}: DeepSpeed saves no fp32 weights then",
            hint="dstool init-config --stage 1 --force",
        )
    return args


def _with_batch(settled: read.Reconciled) -> dict[str, Any]:
    """The Trainer's arguments with the batch for this number of ranks, where the JSON pins the whole."""
    arguments = read.fit_batch(settled.ds, launch.world_size(), settled.train)
    if arguments != settled.train:
        logger.info(
            "a batch of %d: %d rows * %d steps that accumulate * %d ranks",
            settled.ds["train_batch_size"],
            arguments["per_device_train_batch_size"],
            arguments["gradient_accumulation_steps"],
            launch.world_size(),
        )
    return arguments


def _precision_of(args: TrainingArguments) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def _precision(arguments: Mapping[str, Any], ds: Mapping[str, Any], device: str) -> dict[str, bool]:
    """What `auto` means here, where neither the run file nor the JSON chooses: bf16 on a GPU that has it,
    fp16 on an older one, fp32 on the CPU.
    """
    chosen = {"bf16", "fp16"} & set(arguments)
    open_to_choice = [ds.get(name, {}).get("enabled") == "auto" for name in ("bf16", "fp16")]
    if chosen or not all(open_to_choice) or device == "cpu":
        return {}
    name = "bf16" if device != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    logger.info("precision: %s, which this GPU supports", name)
    return {name: True}


def _build_trainer(
    config: Config, args: TrainingArguments, callbacks: Sequence[TrainerCallback]
) -> tuple[Any, str]:
    """Data, tokenizer, model and Trainer, in that order; and what the rows are: texts, pairs or messages."""
    # Trainer sets the seed too, but only once it is given a model, whose new weights are drawn by then.
    transformers.set_seed(args.seed)
    with args.main_process_first(desc="reading the data"):
        splits = batches.load_splits(config.data, config.model.task, seed=args.seed)
    tokenizer = models.load_tokenizer(config.model, lambda: batches.text_of(splits.train))
    if config.model.task == "text-classification":
        parts = _classification(config, args, splits, tokenizer)
    else:
        parts = _language_modelling(config, args, splits, tokenizer)
    kind = type(parts["model"]).__name__
    if config.lora is not None:
        parts["model"] = _with_lora(parts["model"], config.lora, config, args)
    with _refusals_of_trainer():
        trainer = transformers.Trainer(
            args=args, processing_class=tokenizer, callbacks=list(callbacks), **parts
        )
    trainer.remove_callback(transformers.PrinterCallback)
    if not trainer.is_deepspeed_enabled:
        raise RunFailed("Trainer did not turn DeepSpeed on", hint="unset ACCELERATE_USE_CPU")
    count = sum(getattr(p, "ds_numel", p.numel()) for p in parts["model"].parameters())
    held_out = f", {len(parts['eval_dataset'])} held out" if parts["eval_dataset"] is not None else ""
    logger.info(
        "%s with %.1f M parameters, %d examples%s",
        kind,
        count / 1e6,
        len(parts["train_dataset"]),
        held_out,
    )
    _warn_of_little_room(args, parts["model"])
    some = splits.train[:100]
    return trainer, "messages" if any(some["messages"]) else "pairs" if any(some["text_pair"]) else "texts"


def _warn_of_little_room(args: TrainingArguments, model: Any) -> None:
    """Say now, and not when the first is written, that the disk has no room for the checkpoints."""
    if args.process_index or args.save_strategy == "no":
        return
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    each = checkpoint_bytes(trained, 4 if _precision_of(args) == "fp32" else 2)
    folder = next(path for path in (Path(args.output_dir), *Path(args.output_dir).parents) if path.exists())
    free = shutil.disk_usage(folder).free
    kept = (args.save_total_limit or 1) + 1  # a new one is whole before the oldest goes
    if free < kept * each:
        logger.warning(
            "a checkpoint takes about %s and %d are there at a time, and the disk of %s has %s free: "
            "train.save_total_limit=1 keeps one, train.save_strategy=no writes none",
            *(human_bytes(each), kept, args.output_dir, human_bytes(free)),
        )


def _with_lora(model: Any, lora: LoraSection, config: Config, args: TrainingArguments) -> Any:
    """`model` with an adapter, and a line that says how little of it is trained."""
    made = models.add_lora(model, lora, config.model)
    if args.gradient_checkpointing:
        # Else no gradient gets through the frozen embedding to the layers that are computed anew.
        made.enable_input_require_grads()
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in made.parameters()]
    trained, total = sum(size for size, grad in sizes if grad), sum(size for size, _ in sizes)
    logger.info(
        "LoRA: %s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total
    )
    return made


@contextlib.contextmanager
def _refusals_of_trainer() -> Iterator[None]:
    """What Trainer finds wrong with its arguments once it has the model."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"train: {' '.join(str(error).split())}", hint="change it in the run file"
        ) from error
    except RuntimeError as error:
        if "to be installed" not in str(error):
            raise
        raise MissingDependency(
            f"train.report_to: {' '.join(str(error).split())}", hint='pip install "dstool[trackers]"'
        ) from error


def _dtype(args: TrainingArguments) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _classification(
    config: Config, args: TrainingArguments, splits: batches.Splits, tokenizer: Any
) -> dict[str, Any]:
    labels = batches.label_names(splits, models.known_labels(config.model))
    model = models.load_model(config.model, tokenizer, labels=labels, dtype=_dtype(args))
    # Trainer takes a forward with **kwargs for one that divides by the whole batch's count of labels, and
    # multiplies the loss by the ranks to match (trainer.py, 5.24); a classifier's loss is a plain mean.
    model.accepts_loss_kwargs = False
    limit = models.length_limit(tokenizer, model, config.data.max_length or MAX_LENGTH)
    tokenizer.padding_side = "right"

    def encode(rows: Any) -> Any:
        with args.main_process_first(desc="encoding the texts"):
            return rows and batches.encode_texts(rows, tokenizer, labels, max_length=limit)

    return {
        "model": model,
        "train_dataset": encode(splits.train),
        "eval_dataset": encode(splits.eval),
        "data_collator": transformers.DataCollatorWithPadding(tokenizer),
        "compute_metrics": _classification_metrics,
    }


def _language_modelling(
    config: Config, args: TrainingArguments, splits: batches.Splits, tokenizer: Any
) -> dict[str, Any]:
    model = models.load_model(config.model, tokenizer, labels=None, dtype=_dtype(args))
    block_size = models.length_limit(tokenizer, model, config.data.block_size or BLOCK_SIZE)
    if config.data.block_size and block_size < config.data.block_size:
        raise ConfigError(
            f"data.block_size {config.data.block_size} is more than the model's {block_size} positions",
            hint=f"data.block_size={block_size}",
        )

    def pack(rows: Any, what: str) -> Any:
        with args.main_process_first(desc="packing the texts"):
            return rows and batches.pack_blocks(rows, tokenizer, block_size=block_size, what=what)

    return {
        "model": model,
        "train_dataset": pack(splits.train, "data.train"),
        "eval_dataset": pack(splits.eval, "the held-out data"),
        "data_collator": transformers.default_data_collator,
    }


def _classification_metrics(prediction: Any) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score

    logits = (
        prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    )
    chosen = numpy.argmax(logits, axis=-1)
    return {
        "accuracy": float(accuracy_score(prediction.label_ids, chosen)),
        "f1": float(f1_score(prediction.label_ids, chosen, average="macro")),
    }


def _fit(trainer: Any, checkpoint: Path | None) -> float:
    """Train; the mean loss. From a checkpoint of the last step there is only the end left to do."""
    try:
        return float(
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None).training_loss
        )
    except _NothingLeft:
        trainer.is_in_train = False
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
        logged = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        return logged[-1] if logged else math.nan


def _save_model(trainer: Any) -> None:
    """The final weights, config and tokenizer, readable as the umask says."""
    trainer.save_model()
    if trainer.args.process_index == 0:
        files.open_to_umask(*Path(trainer.args.output_dir).glob("*.safetensors"))


def _best(trainer: Any) -> str | None:
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    return Path(best).name if best else None


def _evaluate(trainer: Any, task: Task) -> dict[str, float]:
    """On the held-out rows: loss, with accuracy and F1 of a classifier that tells its predictions, or with
    the perplexity of a language model; empty when there are none.
    """
    if trainer.eval_dataset is None:
        return {}
    values = trainer.evaluate()
    metrics = {
        name: float(values[f"eval_{name}"]) for name in ("loss", "accuracy", "f1") if f"eval_{name}" in values
    }
    if task == "causal-lm":
        metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
    return metrics


class _NothingLeft(Exception):
    """The run is resumed after its last step; Trainer would make one more."""


class _Steps(TrainerCallback):
    """Tells the progress, stops at a loss that is no number, and saves the first step where asked.

    Args:
        done: steps of the finished run that is resumed, 0 of one that was interrupted; None: a new run.
    """

    nothing_left = False

    def __init__(self, progress: Progress | None, save_first_step: bool, done: int | None) -> None:
        self.progress = progress
        self.save_first_step = save_first_step
        self.done = done

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a run before it begins that has no step left to do."""
        if self.done is not None and max(state.global_step, self.done) >= state.max_steps:
            self.nothing_left = True
            raise _NothingLeft

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Count the step."""
        if self.progress and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, "")
        if self.save_first_step and state.global_step == 1:
            control.should_save = True
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True  # a run that is shorter than `logging_steps` would not say its loss
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the weights of the checkpoint be read by whom the umask says."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            files.open_to_umask(*folder.glob("*.safetensors"))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Pass on what Trainer logs."""
        for name, what in _LOSSES.items():
            if name in logs and not math.isfinite(float(logs[name])):
                raise NonFiniteLoss(
                    f"{what} is {logs[name]} at step {state.global_step}",
                    hint="lower train.learning_rate, or train in bf16 or fp32 rather than fp16",
                )
        shown = {name: value for name, value in logs.items() if name in _SHOWN}
        if self.progress and state.is_world_process_zero and shown:
            note = "  ".join(f"{_SHOWN[name]} {float(value):.4g}" for name, value in shown.items())
            self.progress(state.global_step, state.max_steps, note)


_LOSSES = {"loss": "the loss", "train_loss": "the mean loss", "eval_loss": "the held-out loss"}
_SHOWN = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad norm",
    "eval_loss": "held-out loss",
    "eval_accuracy": "accuracy",
    "eval_f1": "f1",
}


# --- failures ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained_failures(args: TrainingArguments) -> Iterator[None]:
    """Say in dstool's own errors what a run most often dies of."""
    try:
        yield
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        raise ConfigError(
            f"train.metric_for_best_model={args.metric_for_best_model} is none of what is measured",
            hint="one of loss, accuracy, f1 (classification) or loss (causal-lm)",
        ) from error
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"out of GPU memory: {str(error).partition('. ')[0]}",
            hint=f"train.per_device_train_batch_size below {args.per_device_train_batch_size}, "
            "train.gradient_checkpointing=true, or dstool init-config --stage 3 --offload cpu --force",
        ) from error
    except (OSError, RuntimeError, SafetensorError) as error:
        if failure := _failure_of_a_file(error, args):
            raise failure from error
        raise


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_TORCH_CANNOT_WRITE = re.compile(r"PytorchStreamWriter failed|file write failed|unexpected pos \d+ vs")
_RUST_CANNOT_WRITE = re.compile(r"\(os error (\d+)\)")


def _failure_of_a_file(error: Exception, args: TrainingArguments) -> RunFailed | None:
    """What a library says of a file or a connection, told apart; None of what is something else.

    A full disk is an OSError of Python's, a RuntimeError of torch.save's, and safetensors' own.
    """
    text = " ".join(str(error).split())[:200]
    rust = _RUST_CANNOT_WRITE.search(text) if isinstance(error, SafetensorError) else None
    number = error.errno if isinstance(error, OSError) else int(rust[1]) if rust else None
    if number in _FULL or (isinstance(error, RuntimeError) and _TORCH_CANNOT_WRITE.search(text)):
        where = getattr(error, "filename", None) or args.output_dir
        reason = os.strerror(number) if number else text
        return RunFailed(
            f"a file could not be written: {where}: {reason}",
            hint="df -h shows the space; train.save_total_limit=2 keeps only the newest checkpoints",
        )
    if not isinstance(error, OSError) or launch.lost_peers(error):
        return None
    if isinstance(error, ConnectionError | TimeoutError) or error.errno is None:
        return RunFailed(
            f"a connection failed: {type(error).__name__}: {text}",
            hint="train.push_to_hub=false, train.report_to=none, or mend the network",
        )
    where = Path(str(error.filename or args.output_dir))
    return RunFailed(
        f"{where}: {error.strerror}",
        hint=f"ls -l {files.typed(where.parent)} shows what is there, and whose it is",
    )


# --- what a run leaves -------------------------------------------------------------------------------


def _save_fp32(trainer: Any, target: Path, stage: int) -> None:
    """The fp32 master weights as a model folder, from a checkpoint of this very step.

    At stage 0 in fp32 there are none but the model's own.
    """
    with _checkpoint_of_now(trainer) as folder:
        if trainer.args.process_index == 0:
            with files.new_folder(target, force=True) as temporary:
                _save_companions(trainer, temporary)
                if stage:
                    _forget_zero3()  # the model that `fit` compares with is outside of ZeRO
                    weights = models.fit(reader.open_checkpoint(folder), models.open_folder(temporary))
                    writer.write_weights(weights, temporary, dtype="F32")
                else:
                    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(temporary)
        torch.distributed.barrier()


@contextlib.contextmanager
def _checkpoint_of_now(trainer: Any) -> Iterator[Path]:
    """A ZeRO checkpoint of the engine as it stands, gone again afterwards. All ranks take part."""
    folder = Path(trainer.args.output_dir) / ".tmp-save-fp32"
    trainer.model_wrapped.save_checkpoint(str(folder))
    try:
        torch.distributed.barrier()
        yield folder
    finally:
        if trainer.args.process_index == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _save_companions(trainer: Any, folder: Path) -> None:
    """The config as that of a model in fp32, the generation config and the tokenizer."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = deepcopy(model.config)  # the model keeps its own
    config.dtype, config.architectures = torch.float32, [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def _record(config: Config, result: TrainResult, rows: str) -> None:
    """Write beside the weights the resolved run file and the versions that made them.

    Args:
        rows: what the model has learnt from, which decides how it is asked: texts, pairs or messages.
    """
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "deepspeed", "transformers", "accelerate", "datasets")
    }
    versions = {"dstool": __version__, "python": sys.version.split()[0], **versions}
    head = "".join(f"# {name} {version}\n" for name, version in versions.items())
    files.write_text(result.output_dir / RUN_FILE, head + dump(without_secrets(resolve(config))))
    values = plain({"versions": versions, "rows": rows, **asdict(result)})
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    files.write_text(result.output_dir / RECORD, text + "\n")
