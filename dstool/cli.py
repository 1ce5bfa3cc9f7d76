"""The command line: parse, load the config, call one function, show its result.

Nothing here imports torch, deepspeed, transformers or datasets at module level; the commands do, when
they are called.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from dstool import __version__, launch, log
from dstool.console import BytesProgress, Console, StepProgress
from dstool.ds_config.options import OptimizerName, SchedulerName
from dstool.errors import (
    CheckpointError,
    ConfigError,
    DstoolError,
    EnvironmentUnfit,
    InputError,
    RankCrashed,
    RankFailed,
)
from dstool.files import in_run, typed

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
            raise SystemExit(_crash(error)) from None


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


# --- options that several commands share -----------------------------------------------------------

ConfigOpt = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The run file; by default dstool.yaml.", show_default=False),
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values over those of the run file.")
]
ForceOpt = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
ReplaceOpt = Annotated[bool, typer.Option("--force", help="Replace a model that is there.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
KeepDtypeOpt = Annotated[
    Literal["fp32", "bf16", "fp16", "keep"] | None,
    typer.Option(help="The type of the weights; keep: that of the checkpoint."),
]
DtypeOpt = Annotated[Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="The type of the weights.")]
ShardOpt = Annotated[str | None, typer.Option(help="The largest file written, for example 2GB.")]


# --- the commands ----------------------------------------------------------------------------------


Device = Literal["none", "cpu", "nvme"]
FILES, OPTIMISING, NUMBERS = "The files", "Optimizer and scheduler", "Numbers, else the run file's"


@app.command("init-config")
def init_config(
    preset: Annotated[
        str | None, typer.Option(help="A ready set of options, over which the others go: see configs/.")
    ] = None,
    auto: Annotated[
        bool,
        typer.Option("--auto", help="Take stage and offload from dstool plan: the fastest that fits."),
    ] = False,
    gpus: Annotated[int | None, typer.Option(help="For --auto: GPUs here. Default: those found.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="For --auto: of each GPU, 80GB. Default: what is found.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="For --auto: machines. Default: 1.")] = None,
    cpu_memory: Annotated[
        str | None, typer.Option(help="For --auto: of each node, 512GB. Default: that of this one.")
    ] = None,
    nvme_space: Annotated[
        str | None, typer.Option(help="For --auto: of each node, 2TB. Default: not looked at.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="For --auto: tokens in a row. Default: the run file's.")
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="For --auto: train an adapter alone; a new run file says so.")
    ] = False,
    stage: Annotated[int | None, typer.Option(min=0, max=3, help="The ZeRO stage. Default: 2.")] = None,
    offload: Annotated[
        Device | None,
        typer.Option(help="Where optimizer and, at stage 3, parameters go. Default: none."),
    ] = None,
    offload_optimizer: Annotated[
        Device | None, typer.Option(help="Where the optimizer goes. Default: --offload.")
    ] = None,
    offload_param: Annotated[
        Device | None, typer.Option(help="Where the parameters go. Default: --offload.")
    ] = None,
    nvme_path: Annotated[
        str | None, typer.Option(help="The folder on the NVMe. Default: /local_nvme.")
    ] = None,
    precision: Annotated[
        Literal["auto", "fp32", "fp16", "bf16"] | None,
        typer.Option(help="auto: what the run file or the machine says. Default: auto."),
    ] = None,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation-checkpointing", help="Compute activations again: train.gradient_checkpointing."
        ),
    ] = None,
    communication_data_type: Annotated[
        Literal["fp32", "fp16", "bf16"] | None,
        typer.Option(help="The type in which gradients travel. Default: the run's."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any other key of the JSON. Can be repeated."),
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(help="none: Trainer's own, by train.optim. Default: AdamW.", rich_help_panel=OPTIMISING),
    ] = None,
    scheduler: Annotated[
        SchedulerName | None,
        typer.Option(
            help="none: Trainer's own, by train.lr_scheduler_type. Default: WarmupLR.",
            rich_help_panel=OPTIMISING,
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.", rich_help_panel=NUMBERS)] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Steps until the full rate; below 1 a share of all steps.", rich_help_panel=NUMBERS
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Rows per rank and step.", rich_help_panel=NUMBERS)
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Rows per update of all ranks; what is not given of the other two follows from it.",
            rich_help_panel=NUMBERS,
        ),
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Steps that accumulate into one update.", rich_help_panel=NUMBERS)
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="The norm that gradients are clipped to.", rich_help_panel=NUMBERS)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model: a folder or hub name.", rich_help_panel=FILES)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The training data: a file, folder, glob or hub name.", rich_help_panel=FILES),
    ] = None,
    task: Annotated[
        Literal["text-classification", "causal-lm"] | None,
        typer.Option(
            help="What the model is trained to do. Default: text-classification.",
            rich_help_panel=FILES,
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The JSON file; - prints it.", rich_help_panel=FILES)
    ] = "ds_config.json",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Write over the JSON; with --model, --data or --task over the run file too.",
            rich_help_panel=FILES,
        ),
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Write ds_config.json and, where there is none, dstool.yaml."""
    from dstool import init_config as verb

    out.as_json = as_json
    plan_for = {
        "gpus": gpus,
        "gpu_memory": gpu_memory,
        "nodes": nodes,
        "cpu_memory": cpu_memory,
        "nvme_space": nvme_space,
        "seq_len": seq_len,
    }
    length: int | None = None
    if auto:
        verb.refuse_with_auto(
            preset=preset,
            stage=stage,
            offload=offload,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
        )
        given = {
            **plan_for,
            "micro_batch": micro_batch,
            "precision": None if precision == "auto" else precision,
            "optimizer": optimizer,
            "gradient_checkpointing": activation_checkpointing,
        }
        flags = {"model.task": task, "train.gradient_accumulation_steps": accumulation}
        stage, offload, found, length = _planned(model, flags, given, lora=lora)
        task = found if model else task
    else:
        verb.refuse_without_auto(model, **plan_for, lora=lora)
    options = verb.options_of(
        preset,
        settings or (),
        stage=stage,
        offload=offload,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        nvme_path=nvme_path,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        communication_data_type=communication_data_type,
        optimizer=optimizer,
        scheduler=scheduler,
        lr=lr,
        warmup=warmup,
        micro_batch=micro_batch,
        global_batch=global_batch,
        accumulation=accumulation,
        clip=clip,
    )
    if output == "-":
        planned = {} if auto else {"model": model, "task": task}  # --auto has planned for them
        verb.refuse_files(**planned, data=data, as_json=as_json, force=force)
        out.text(verb.json_alone(options)[:-1])
        return
    result = verb.init_config(
        options, Path(output), model=model, data=data, task=task, lora=lora, length=length, force=force
    )
    other = f" deepspeed={typed(Path(output))}" if result.named else ""
    out.result("Initialised", result, next_command=f"dstool train{other}")


def _planned(
    model: str | None, flags: dict[str, Any], given: dict[str, Any], *, lora: bool
) -> tuple[Any, Any, Any, int]:
    """What `dstool plan` recommends for the model given, or the run file's: stage, offload, task and length.

    `flags` go over the run file, `given` are options of the plan; None is not given.
    """
    from dstool.config import load

    config = load(flags=flags, required=False).config
    if model is None and config.model.name is None and config.model.from_scratch is None:
        raise ConfigError(
            "--auto needs to know the model, and no dstool.yaml here names one",
            hint="dstool init-config --auto --model Qwen/Qwen3-0.6B, or another folder or hub name",
        )
    words = [*(["--model", model] if model else []), *(["--lora"] if lora else [])]
    words += ["deepspeed=null"] if config.deepspeed else []
    config = config.model_copy(update={"deepspeed": None})  # it is about to be written
    with out.guard_stdout():
        from dstool import plan as planning

        if model is not None:
            config = planning.with_model(config, model, task_given=flags["model.task"] is not None)
            flags = {**flags, "model.task": config.model.task}
        config = planning.with_lora(config) if lora else config
        options = planning.Options(**{name: value for name, value in given.items() if value is not None})
        result = planning.plan(config, options)
    words += [f"{key}={value}" for key, value in flags.items() if value is not None]
    planning.log_choice(result, planning.command(options, *words))
    return result.stage, result.offload, config.model.task, result.setup.seq_len


@app.command()
def check(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="DS_CONFIG", help="The DeepSpeed JSON, or else that of the run file."),
    ] = None,
    config: ConfigOpt = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="The number of ranks that the batch is to fit.")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Make every mend that cannot change the meaning.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Say what is wrong with the DeepSpeed JSON, before it costs an hour."""
    from dstool import check as verb

    out.as_json = as_json
    result = verb.check(path, config=config, world_size=world_size, fix=fix)
    if as_json:
        out.result("", result)
    else:
        named = f" {typed(path)}" if path else ""
        ranks = f" --world-size {world_size}" if world_size else ""
        command = f"dstool check{named}{_with(config)}{ranks} --fix"
        out.text("\n".join(verb.report(result, _near(result.file), command)))
    if result.errors:
        raise typer.Exit(ConfigError.exit_code)


@app.command()
def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A key of the JSON, any part of one, or a topic; without: a list."
        ),
    ] = None,
    lang: Annotated[
        Literal["en", "ko"] | None,
        typer.Option(help="The language; by default that of the locale.", show_default=False),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Say what a key of the DeepSpeed JSON means, what it costs, and what sets it."""
    from dstool.explain import explain as run
    from dstool.explain import show

    out.as_json = as_json
    result = run(name, lang)
    if as_json:
        out.result("", result)
    else:
        out.text(show(result))


@app.command()
def plan(
    words: Words = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub name. [default: the run file's]", show_default=False),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs on each node. [default: those here]")] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpu_memory: Annotated[str | None, typer.Option(help="Of each GPU: 80GB (1000^3), 80GiB.")] = None,
    cpu_memory: Annotated[str | None, typer.Option(help="Of each node. [default: that of this one]")] = None,
    nvme_space: Annotated[str | None, typer.Option(help="Of each node. [default: not looked at]")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Rows for each GPU and forward pass.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    precision: Annotated[Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Of the run.")] = None,
    optimizer: Annotated[OptimizerName | None, typer.Option(help="none: train.optim.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train an adapter alone.")] = False,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option("--gradient-checkpointing", help="Compute activations twice, keep few.")
    ] = None,
    config: ConfigOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Say which ZeRO stage and offload fit, and what each takes, before anything is loaded."""
    from dstool.config import load

    out.as_json = as_json
    loaded = load(config, words=words or (), required=model is None)
    with out.guard_stdout():
        from dstool import plan as verb

        settings = loaded.config
        if model is not None:
            settings = verb.with_model(settings, model, task_given="model.task" in loaded.sources)
        settings = verb.with_lora(settings) if lora else settings
        options = verb.Options(
            gpus,
            nodes,
            gpu_memory,
            cpu_memory,
            nvme_space,
            micro_batch,
            seq_len,
            precision,
            optimizer,
            gradient_checkpointing,
        )
        result = verb.plan(settings, options)
    if as_json:
        out.result("", result)
    else:
        given: dict[str, Any] = {"model": model, "task": settings.model.task if model else None}
        flags = {"precision": precision, "micro-batch": micro_batch, "optimizer": optimizer}
        said = {} if model else verb.said_in_json(settings)
        given |= {**said, **{name: value for name, value in flags.items() if value is not None}}
        out.text(verb.show(result, _as_options(given, activation_checkpointing=gradient_checkpointing)))
        if result.stage is not None:
            later = [*(words or ()), *verb.as_words(settings, seq_len)]
            later += ["lora.target_modules=all-linear"] if lora and loaded.config.lora is None else []
            _say_of_planned(optimizer, result.stage, result.offload or "none", later)


def _as_options(given: dict[str, Any], *, activation_checkpointing: bool | None) -> str:
    """What was given to plan, as init-config takes it."""
    said = [f" --{name} {typed(str(value))}" for name, value in given.items() if value is not None]
    said += [" --activation-checkpointing"] if activation_checkpointing else []
    return "".join(said) + (" --force" if Path("ds_config.json").exists() else "")


def _say_of_planned(optimizer: OptimizerName | None, stage: Any, offload: Any, words: Sequence[str]) -> None:
    """Say what init-config would refuse on this machine, and what it has no option for."""
    from dstool import init_config as writing
    from dstool.ds_config.options import Options

    if words:
        out.text(" ".join(["then: dstool train", *map(typed, words)]))
    if optimizer is None:
        return
    try:
        writing.json_alone(Options(stage=stage, offload=offload, optimizer=optimizer))
    except DstoolError as error:
        out.text(f"init-config refuses that here: {error.message}\ntry: {error.hint}")


@app.command()
def train(
    words: Words = None,
    config: ConfigOpt = None,
    num_gpus: Annotated[
        int | None, typer.Option(help="Ranks on this machine: GPUs, or CPU ranks where there is none.")
    ] = None,
    include: Annotated[
        str | None, typer.Option(help="The GPUs to use, as the launcher names them: localhost:0,2")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the settings and their origin.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Start anew where an earlier run lies.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Fine-tune the model of the run file, in one rank or in many."""
    from dstool import preflight
    from dstool.config import explain, load

    out.as_json = as_json
    loaded = load(config, words=words or ())
    if show_config:
        _show_config(explain(loaded))
        return
    if not launch.launched():
        flags = [*(["--config", str(config)] if config else []), *(["--resume"] if resume else [])]
        flags += ["--force"] if force else []
        preflight.check(loaded.config, may_exist=force or resume)
        result = launch.run(["train", *flags, "--", *(words or ())], num_gpus=num_gpus, include=include)
        _show_trained(result, config, adapter=loaded.config.lora is not None)
        return
    from dstool.train import train as run

    progress = StepProgress()
    try:
        with out.guard_stdout():
            trained = run(loaded.config, force=force, resume=resume, progress=progress)
    finally:
        progress.close()
    if launch.reports_to_parent():
        launch.report_result(asdict(trained))
    elif log.rank() == 0:
        _show_trained(asdict(trained), config, adapter=loaded.config.lora is not None)


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
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint-N or global_stepN folder, or a run's folder. Default: the run's."),
    ] = None,
    tag: Annotated[str | None, typer.Option(help="The folder inside, in place of that in `latest`.")] = None,
    config: ConfigOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Say what a ZeRO checkpoint holds, what it lacks, and what can be made of it."""
    from dstool import inspection
    from dstool.config import load

    out.as_json = as_json
    run_dir = Path(load(config, required=False).config.train.output_dir)
    path = in_run(checkpoint, run_dir) if checkpoint else run_dir
    result = inspection.inspect(path, tag=tag)
    if as_json:
        out.result("", result)
    else:
        out.text("\n".join(inspection.show(result, _near(result.checkpoint))))
    if result.problem:
        raise typer.Exit(CheckpointError.exit_code)


@app.command()
def consolidate(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT] [KEY=VALUE",
            help="A checkpoint-N or global_stepN folder, or a run's folder; and values over those of the run "
            "file.",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the weights go.")
    ] = None,
    dtype: KeepDtypeOpt = None,
    file_format: Annotated[
        Literal["safetensors", "bin"] | None, typer.Option("--format", help="The type of the files.")
    ] = None,
    max_shard_size: ShardOpt = None,
    tag: Annotated[str | None, typer.Option(help="The folder inside, in place of that in `latest`.")] = None,
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out what was not trained.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare all that is written with the checkpoint; write a manifest."),
    ] = False,
    engine: Annotated[
        Literal["stream", "deepspeed"],
        typer.Option(help="deepspeed: put together by DeepSpeed's own functions, in memory."),
    ] = "stream",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, and write nothing.")] = False,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read files that name classes of others; none is run.")
    ] = False,
    config: ConfigOpt = None,
    force: ReplaceOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Gather the shards of a ZeRO checkpoint into one set of weights."""
    from dstool.config import load

    flags = {
        "dtype": dtype,
        "format": file_format,
        "max_shard_size": max_shard_size,
        "output_dir": output_dir,
    }
    flags = {f"consolidate.{key}": value and str(value) for key, value in flags.items()}
    checkpoint, words = _checkpoint_and_words(given or ())
    settings = load(config, words=words, flags=flags, required=False).config
    run_dir = Path(settings.train.output_dir)
    source = in_run(checkpoint, run_dir) if checkpoint else run_dir
    target = settings.consolidate.output_dir

    def work(progress: BytesProgress) -> Any:
        from dstool.consolidate import consolidate as run

        return run(
            source,
            Path(target) if target else None,
            dtype=settings.consolidate.dtype,
            file_format=settings.consolidate.format,
            max_shard_size=settings.consolidate.max_shard_size,
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
    words: Words = None,
    input_dir: Annotated[
        Path | None, typer.Option(help="A checkpoint, a run's folder or a model folder.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the model goes.")
    ] = None,
    zero_stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="Refuse a checkpoint of another ZeRO stage.")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(
            help="The type of the weights. fp32 of a 16-bit run is that of the checkpoint of its last step, "
            "where there is one."
        ),
    ] = None,
    max_shard_size: ShardOpt = None,
    base_model: Annotated[
        str | None, typer.Option(help="Of a LoRA adapter: the model it is added to. Default: what it names.")
    ] = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Of a LoRA adapter: write it, not the sum.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Then upload it to this repository on the Hugging Face hub."),
    ] = None,
    config: ConfigOpt = None,
    force: ReplaceOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Make a folder that from_pretrained loads: weights, config, tokenizer, labels, model card."""
    from dstool.config import load

    flags = {
        "input_dir": input_dir,
        "output_dir": output_dir,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    flags = {f"merge.{key}": value and str(value) for key, value in flags.items()}
    settings = load(config, words=words or (), flags=flags, required=False)
    section, run_dir = settings.config.merge, Path(settings.config.train.output_dir)
    if section.output_dir is None:
        raise ConfigError("merge needs a place for the model", hint="--output-dir DIR")
    source = in_run(Path(section.input_dir), run_dir) if section.input_dir else run_dir
    target = Path(section.output_dir)

    def work(progress: BytesProgress) -> Any:
        from dstool.merge import merge as run

        return run(
            source,
            target,
            zero_stage=zero_stage,
            dtype=section.dtype,
            max_shard_size=section.max_shard_size,
            base_model=base_model,
            keep_adapter=keep_adapter,
            push_to_hub=push_to_hub,
            force=force,
            progress=progress,
        )

    _once(work, "Merged", as_json, lambda result: _infer(result.output_dir) + _with(config))


@app.command()
def infer(
    words: Words = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="A text; may be given again.")
    ] = None,
    text_pair: Annotated[
        list[str] | None,
        typer.Option(help="The second text of a pair, for a classifier of pairs; one for each --text."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put each text into the chat template, or not; by default where the run was trained on "
            "messages.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model folder; by default the run's newest weights.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="The type to compute in.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that are generated at most.")
    ] = None,
    config: ConfigOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Classify texts, or continue them, whichever the model is for."""
    from dstool.config import load

    flags = {"infer.dtype": dtype, "infer.max_new_tokens": max_new_tokens, "infer.chat": chat}
    loaded = load(config, words=words or (), flags=flags, required=model is None)
    out.as_json = as_json
    if log.rank():
        return
    if not text:
        raise ConfigError("there is no text", hint='dstool infer --text "..."')
    from dstool.infer import infer as run

    with out.guard_stdout():
        result = run(text, loaded.config, model=model, pairs=text_pair)
    if as_json:
        out.result("", result)
        return
    for each in result.predictions:
        second = f"  {each.text_pair}" if each.text_pair is not None else ""
        if each.label is not None:
            out.text(f"{each.label}  {each.probability:.3f}  {each.text}{second}")
        elif each.value is not None:
            out.text(f"{each.value:.3f}  {each.text}{second}")
        else:
            out.text(f"{each.text}{chr(10) if result.chat else ''}{each.generated}")


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
    return Path(paths[0]) if paths else None, words


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
