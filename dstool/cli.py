"""The command line: parse, load the config, call one function, show its result.

Nothing here imports torch, deepspeed, transformers or datasets at module level; the commands do, when
they are called.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from dstool import __version__, launch, log
from dstool import options as opt
from dstool.console import BytesProgress, Console, StepProgress
from dstool.ds_config.options import OptimizerName
from dstool.errors import (
    CheckpointError,
    ConfigError,
    DstoolError,
    EnvironmentUnfit,
    InputError,
    RankCrashed,
    RankFailed,
)
from dstool.files import in_run, refusal, typed

if TYPE_CHECKING:
    from dstool.config import Config

out = Console()

INTERRUPTED = 130
PIPE_CLOSED = 141
OTHERS_SECONDS = 10.0
"""How long a rank waits for rank 0 to say what all of them found."""


class _Commands(TyperGroup):
    """The group of commands, and the one place where an exception becomes lines and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        log.set_up()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except DstoolError as error:
            raise SystemExit(_fail(error)) from None
        except Exception as error:
            if isinstance(error, BrokenPipeError):
                _leave_closed_pipe()
            if type(error).__module__.startswith(("typer", "click")):
                raise
            if said := _refused(error):
                raise SystemExit(_fail(InputError(said[0], hint=said[1]))) from None
            raise SystemExit(_crash(error)) from None


def _refused(error: Exception) -> tuple[str, str] | None:
    """What is said of a path that the system does not let this user look at, wherever it was looked at."""
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib, until 3.12
        return str(error), "name another path"
    return refusal(error) if isinstance(error, OSError) else None


def _leave_closed_pipe() -> NoReturn:
    """End without a word where the reader has gone, as in `| head`, with the code of a SIGPIPE."""
    # What is still buffered goes nowhere: Python flushes it at exit, and would speak of the closed pipe.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    raise SystemExit(PIPE_CLOSED) from None


def _fail(error: DstoolError) -> int:
    """Show an expected failure, or leave that to the process that launched this rank; the exit code."""
    if log.debug():
        traceback.print_exc()
    if launch.reports_to_parent():
        launch.report_error(error)
        return error.exit_code
    if log.rank() and isinstance(error, ConfigError | InputError | EnvironmentUnfit):
        # Every rank reads the same files, most often on the same machine, and finds the same fault: rank 0
        # says it, and its end ends this one.
        time.sleep(OTHERS_SECONDS)
    out.error(error)
    return error.exit_code


def _crash(error: Exception) -> int:
    """Show the traceback of a bug; a rank that only lost its peers has nothing to show."""
    if launch.launched() and launch.lost_peers(error):
        time.sleep(OTHERS_SECONDS)
        return _fail(RankFailed("the connection to the other ranks was lost", hint="see what they say"))
    traceback.print_exception(error)
    if launch.reports_to_parent():
        launch.report_error(
            RankCrashed(
                f"rank {log.rank()} ended with {type(error).__name__}: {error}",
                hint="see the traceback above",
            )
        )
    return 1


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Flags are kebab-case; people have --num_gpus and --input_dir in their shell history.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


def _show_version(wanted: bool) -> None:
    if wanted:
        out.text(f"dstool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    local_rank: Annotated[int, typer.Option("--local-rank", hidden=True)] = -1,
) -> None:
    """Train, convert and run Hugging Face models with DeepSpeed."""


# --- the commands ----------------------------------------------------------------------------------


@app.command("init-config")
def init_config(
    ctx: typer.Context,
    preset: opt.Preset = None,
    auto: opt.Auto = False,
    gpus: opt.AutoGpus = None,
    gpu_memory: opt.AutoGpuMemory = None,
    nodes: opt.AutoNodes = None,
    cpu_memory: opt.AutoCpuMemory = None,
    nvme_space: opt.AutoNvmeSpace = None,
    seq_len: opt.AutoSeqLen = None,
    lora: opt.AutoLora = False,
    stage: opt.Stage = None,
    offload: opt.Offload = None,
    offload_optimizer: opt.OffloadOptimizer = None,
    offload_param: opt.OffloadParam = None,
    nvme_path: opt.NvmePath = None,
    precision: opt.Precision = None,
    activation_checkpointing: opt.ActivationCheckpointing = None,
    communication_data_type: opt.CommunicationDataType = None,
    settings: opt.Settings = None,
    optimizer: opt.Optimizer = None,
    scheduler: opt.Scheduler = None,
    lr: opt.Lr = None,
    warmup: opt.Warmup = None,
    micro_batch: opt.MicroBatch = None,
    global_batch: opt.GlobalBatch = None,
    accumulation: opt.Accumulation = None,
    clip: opt.Clip = None,
    model: opt.Model = None,
    data: opt.Data = None,
    task: opt.Task = None,
    output: opt.Output = "ds_config.json",
    force: opt.OverwriteJson = False,
    as_json: opt.Json = False,
) -> None:
    """Write ds_config.json and, where there is none, dstool.yaml."""
    from dstool import init_config as verb

    out.as_json = as_json
    given = _given(ctx)
    if auto:
        verb.refuse_with_auto(given)
        given |= _planned(given)
    else:
        verb.refuse_without_auto(given)
    options = verb.options_of(preset, settings or (), given)
    if output == "-":
        verb.refuse_files(given, auto=auto)
        out.text(verb.json_alone(options, model)[:-1])
        return
    task, length = given.get("task"), given.get("length")
    result = verb.init_config(
        options, Path(output), model=model, data=data, task=task, lora=lora, length=length, force=force
    )
    out.result("Initialised", result, next_command=" ".join(["dstool train", *map(typed, result.words)]))


def _given(ctx: typer.Context) -> dict[str, Any]:
    """The options of a command that were given, by the names of its parameters."""
    return {name: value for name, value in ctx.params.items() if value is not None and value is not False}


def _planned(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `dstool plan` recommends for init-config's options: stage and offload, and for what it does so.

    That is the length that was given, and for a new run file the task and length of its model.
    """
    with out.guard_stdout():
        from dstool import plan as planning

        asked = planning.ask_anew(given)
        result = planning.plan(asked.config, asked.options)
    planning.log_choice(result, asked)
    chosen = {"stage": result.stage, "offload": result.offload}
    if asked.model is None:
        return {**chosen, "length": asked.options.seq_len}
    return {**chosen, "task": asked.config.model.task, "length": result.setup.seq_len}


@app.command()
def check(
    path: opt.DsConfig = None,
    config: opt.Config = None,
    world_size: opt.WorldSize = None,
    fix: opt.Fix = False,
    as_json: opt.Json = False,
) -> None:
    """Say what is wrong with the DeepSpeed JSON, before it costs an hour."""
    from dstool import check as verb

    out.as_json = as_json
    result = verb.check(path, config=config, world_size=world_size, fix=fix)
    named = f" {typed(path)}" if path else ""
    ranks = f" --world-size {world_size}" if world_size else ""
    command = f"dstool check{named}{_with(config)}{ranks} --fix"
    _show(result, lambda: "\n".join(verb.report(result, _near(result.file), command)))
    if result.errors:
        raise typer.Exit(ConfigError.exit_code)


@app.command()
def explain(name: opt.Name = None, lang: opt.Lang = None, as_json: opt.Json = False) -> None:
    """Say what a key of the DeepSpeed JSON means, what it costs, and what sets it."""
    from dstool import explain as verb

    out.as_json = as_json
    result = verb.explain(name, lang)
    _show(result, lambda: verb.show(result))


@app.command()
def plan(
    ctx: typer.Context,
    words: opt.Words = None,
    model: opt.PlanModel = None,
    gpus: opt.PlanGpus = None,
    nodes: opt.PlanNodes = 1,
    gpu_memory: opt.PlanGpuMemory = None,
    cpu_memory: opt.PlanCpuMemory = None,
    nvme_space: opt.PlanNvmeSpace = None,
    micro_batch: opt.PlanMicroBatch = None,
    seq_len: opt.PlanSeqLen = None,
    precision: opt.PlanPrecision = None,
    optimizer: opt.PlanOptimizer = None,
    lora: opt.PlanLora = False,
    gradient_checkpointing: opt.GradientCheckpointing = None,
    config: opt.Config = None,
    as_json: opt.Json = False,
) -> None:
    """Say which ZeRO stage and offload fit, and what each takes, before anything is loaded."""
    from dstool.config import load

    out.as_json = as_json
    loaded = load(config, words=words or (), required=model is None)
    with out.guard_stdout():
        from dstool import plan as verb

        asked = verb.ask(loaded, _given(ctx), words or ())
        result = verb.plan(asked.config, asked.options)
    _show(result, lambda: verb.show(result, asked) + _refused_here(result.stage, result.offload, optimizer))


def _refused_here(stage: Any, offload: Any, optimizer: OptimizerName | None) -> str:
    """What init-config would say against a planned optimizer on this machine; empty where it takes it."""
    from dstool import init_config as writing
    from dstool.ds_config.options import Options

    if stage is None or optimizer is None:
        return ""
    try:
        writing.json_alone(Options(stage=stage, offload=offload, optimizer=optimizer))
    except DstoolError as error:
        return f"\ninit-config refuses that here: {error.message}\ntry: {error.hint}"
    return ""


@app.command()
def train(
    words: opt.Words = None,
    config: opt.Config = None,
    num_gpus: opt.NumGpus = None,
    include: opt.Include = None,
    resume: opt.Resume = False,
    show_config: opt.ShowConfig = False,
    force: opt.StartAnew = False,
    as_json: opt.Json = False,
) -> None:
    """Fine-tune the model of the run file, in one rank or in many."""
    from dstool.config import explain, load

    out.as_json = as_json
    loaded = load(config, words=words or ())
    if show_config:
        _show_config(explain(loaded))
        return
    if launch.launched():
        result = _train_as_rank(loaded.config, resume=resume, force=force)
    else:
        from dstool import preflight

        preflight.check(loaded.config, may_exist=force or resume)
        flags = [*(["--config", str(config)] if config else []), *(["--resume"] if resume else [])]
        flags += ["--force"] if force else []
        result = launch.run(["train", *flags, "--", *(words or ())], num_gpus=num_gpus, include=include)
    if launch.reports_to_parent():
        launch.report_result(result)
    elif log.rank() == 0:
        _show_trained(result, config, adapter=loaded.config.lora is not None)


def _train_as_rank(settings: Config, *, resume: bool, force: bool) -> dict[str, Any]:
    from dstool.train import train as run

    progress = StepProgress()
    try:
        with out.guard_stdout():
            return asdict(run(settings, force=force, resume=resume, progress=progress))
    finally:
        progress.close()


def _show_config(rows: list[tuple[str, Any, str]]) -> None:
    if out.as_json:
        out.result("", {key: {"value": value, "from": origin} for key, value, origin in rows})
        return
    lines = [(f"{key}: {json.dumps(value, ensure_ascii=False)}", origin) for key, value, origin in rows]
    width = max(len(line) for line, _ in lines if len(line) < 60)
    for line, origin in lines:
        out.text(f"{line:<{width}}  # {origin}")


def _show_trained(result: dict[str, Any], config: Path | None, *, adapter: bool = False) -> None:
    """Show the result, and what to do next with the checkpoint that holds what the run ends with."""
    result["output_dir"] = folder = Path(result["output_dir"])
    last = result["best"] or next(reversed(result["checkpoints"]), None)
    following = f"dstool consolidate {_typed(folder / last)}" if last and not adapter else _infer(folder)
    out.result("Trained", result, next_command=following + _with(config))


@app.command()
def inspect(
    checkpoint: opt.Inspected = None,
    tag: opt.Tag = None,
    config: opt.Config = None,
    as_json: opt.Json = False,
) -> None:
    """Say what a ZeRO checkpoint holds, what it lacks, and what can be made of it."""
    from dstool import inspection
    from dstool.config import load

    out.as_json = as_json
    run_dir = Path(load(config, required=False).config.train.output_dir)
    result = inspection.inspect(in_run(checkpoint, run_dir) if checkpoint else run_dir, tag=tag)
    _show(result, lambda: "\n".join(inspection.show(result, _near(result.checkpoint))))
    if result.problem:
        raise typer.Exit(CheckpointError.exit_code)


@app.command()
def consolidate(
    given: opt.CheckpointAndWords = None,
    output_dir: opt.WeightsDir = None,
    dtype: opt.KeepDtype = None,
    file_format: opt.FileFormat = None,
    max_shard_size: opt.MaxShardSize = None,
    tag: opt.Tag = None,
    exclude_frozen: opt.ExcludeFrozen = False,
    verify: opt.Verify = False,
    engine: opt.Engine = "stream",
    dry_run: opt.DryRun = False,
    trust_pickle: opt.TrustPickle = False,
    config: opt.Config = None,
    force: opt.Replace = False,
    as_json: opt.Json = False,
) -> None:
    """Gather the shards of a ZeRO checkpoint into one set of weights."""
    checkpoint, words = _checkpoint_and_words(given or ())
    flags = {
        "output_dir": output_dir,
        "dtype": dtype,
        "format": file_format,
        "max_shard_size": max_shard_size,
    }
    settings = _settings(config, words, "consolidate", flags)
    section, run_dir = settings.consolidate, Path(settings.train.output_dir)

    def work(progress: BytesProgress) -> Any:
        from dstool.consolidate import consolidate as run

        return run(
            in_run(checkpoint, run_dir) if checkpoint else run_dir,
            Path(section.output_dir) if section.output_dir else None,
            dtype=section.dtype,
            file_format=section.format,
            max_shard_size=section.max_shard_size,
            tag=tag,
            exclude_frozen=exclude_frozen,
            verify=verify,
            engine=engine,
            dry_run=dry_run,
            trust_pickle=trust_pickle,
            force=force,
            progress=progress,
        )

    title = "Would be consolidated" if dry_run else "Consolidated"
    _once(work, title, as_json, lambda result: "" if dry_run else _infer(result.output_dir) + _with(config))


@app.command()
def merge(
    words: opt.Words = None,
    input_dir: opt.InputDir = None,
    output_dir: opt.ModelDir = None,
    zero_stage: opt.ZeroStage = None,
    dtype: opt.MergeDtype = None,
    max_shard_size: opt.MaxShardSize = None,
    base_model: opt.BaseModel = None,
    keep_adapter: opt.KeepAdapter = False,
    push_to_hub: opt.PushToHub = None,
    private: opt.Private = False,
    config: opt.Config = None,
    force: opt.Replace = False,
    as_json: opt.Json = False,
) -> None:
    """Make a folder that from_pretrained loads: weights, config, tokenizer, labels, model card."""
    flags = {
        "input_dir": input_dir,
        "output_dir": output_dir,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    settings = _settings(config, words or (), "merge", flags)
    section, run_dir = settings.merge, Path(settings.train.output_dir)
    if section.output_dir is None:
        raise ConfigError("merge needs a place for the model", hint="--output-dir DIR")
    target = Path(section.output_dir)

    def work(progress: BytesProgress) -> Any:
        from dstool.merge import merge as run

        return run(
            in_run(Path(section.input_dir), run_dir) if section.input_dir else run_dir,
            target,
            zero_stage=zero_stage,
            dtype=section.dtype,
            max_shard_size=section.max_shard_size,
            base_model=base_model,
            keep_adapter=keep_adapter,
            push_to_hub=push_to_hub,
            private=private,
            force=force,
            progress=progress,
        )

    _once(work, "Merged", as_json, lambda result: _infer(result.output_dir) + _with(config))


@app.command()
def infer(
    words: opt.Words = None,
    text: opt.Text = None,
    text_pair: opt.TextPair = None,
    chat: opt.Chat = None,
    model: opt.InferModel = None,
    dtype: opt.ComputeDtype = None,
    max_new_tokens: opt.MaxNewTokens = None,
    config: opt.Config = None,
    as_json: opt.Json = False,
) -> None:
    """Classify texts, or continue them, whichever the model is for."""
    out.as_json = as_json
    flags = {"dtype": dtype, "max_new_tokens": max_new_tokens, "chat": chat}
    settings = _settings(config, words or (), "infer", flags, required=model is None)
    if log.rank():
        return
    if not text:
        raise ConfigError("there is no text", hint='dstool infer --text "..."')
    from dstool import infer as verb

    with out.guard_stdout():
        result = verb.infer(text, settings, model=model, pairs=text_pair)
    _show(result, lambda: verb.show(result))


# --- what several commands do ------------------------------------------------------------------------


def _checkpoint_and_words(given: Sequence[str]) -> tuple[Path | None, list[str]]:
    """A checkpoint's folder, where one is named, and the KEY=VALUE words, told apart by their form."""
    from dstool.config import is_word

    words = [text for text in given if is_word(text) and not Path(text).exists()]
    paths = [text for text in given if text not in words]
    if len(paths) > 1:
        raise ConfigError(
            f"{' and '.join(paths)} are {len(paths)} checkpoints, and one is consolidated at a time",
            hint=f"dstool consolidate {typed(paths[0])}",
        )
    if "" in paths:
        raise ConfigError("the path of the checkpoint is empty", hint="dstool consolidate CHECKPOINT")
    return Path(paths[0]) if paths else None, words


def _settings(
    path: Path | None,
    words: Sequence[str],
    section: str,
    flags: Mapping[str, Any],
    *,
    required: bool = False,
) -> Config:
    """The run file's settings with the words over them, and over those the flags that one section has."""
    from dstool.config import load

    texts = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    flags = {f"{section}.{name}": value for name, value in texts.items()}
    return load(path, words=words, flags=flags, required=required).config


def _show(result: Any, text: Callable[[], str]) -> None:
    """Show the result: as one JSON object where that is asked for, else as `text`."""
    if out.as_json:
        out.result("", result)
    else:
        out.text(text())


def _once(
    work: Callable[[BytesProgress], Any], title: str, as_json: bool, next_command: Callable[[Any], str]
) -> None:
    """Do `work` in one process, however many ranks were started for it, and show what it returns."""
    out.as_json = as_json
    if log.rank():
        return
    progress = BytesProgress()
    try:
        with out.guard_stdout():
            result = work(progress)
    finally:
        progress.close()
    out.result(title, result, next_command=next_command(result))


def _near(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _typed(path: Path) -> str:
    return typed(_near(path))


def _infer(model: Path) -> str:
    return f'dstool infer --model {_typed(model)} --text "..."'


def _with(config: Path | None) -> str:
    """The option that names the run file once more, where it was named."""
    return f" --config {typed(config)}" if config else ""
