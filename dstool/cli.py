"""The command line: parse, load the config, call one function, show its result.

Nothing here imports torch, deepspeed, transformers or datasets at module level; the commands do, when
they are called.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dstool import __version__, launch, log
from dstool.console import Console, StepProgress
from dstool.errors import ConfigError, DstoolError, InputError, RankFailed

out = Console()

INTERRUPTED = 130
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
            # typer ends a command whose reader has gone, as in `| head`, without a word.
            if isinstance(error, BrokenPipeError) or type(error).__module__.startswith(("typer", "click")):
                raise
            raise SystemExit(_crash(error)) from None


def _fail(error: DstoolError) -> int:
    """Show an expected failure, or leave that to the process that launched this rank; the exit code."""
    if log.debug():
        traceback.print_exc()
    if launch.reports_to_parent():
        launch.report_error(error)
        return error.exit_code
    if log.rank() and isinstance(error, ConfigError | InputError):
        # Every rank reads the same files and finds the same fault: rank 0 says it, and its end ends this one.
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
            RankFailed(
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
    typer.Option("--config", "-c", help="The run file. [default: dstool.yaml]", show_default=False),
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values over those of the run file.")
]
ForceOpt = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DtypeOpt = Annotated[Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="The type of the weights.")]
ShardOpt = Annotated[str | None, typer.Option(help="The largest file written, for example 2GB.")]


# --- the commands ----------------------------------------------------------------------------------


@app.command("init-config")
def init_config(
    stage: Annotated[int, typer.Option(min=0, max=3, help="The ZeRO stage.")] = 2,
    offload: Annotated[
        Literal["none", "cpu", "nvme"], typer.Option(help="Where optimizer and, at stage 3, parameters go.")
    ] = "none",
    nvme_path: Annotated[str | None, typer.Option(help="The folder on the NVMe.")] = None,
    precision: Annotated[
        Literal["auto", "fp32", "fp16", "bf16"],
        typer.Option(help="auto: what the run file or the machine says."),
    ] = "auto",
    optimizer: Annotated[
        Literal["AdamW", "Adam", "Adagrad", "none"], typer.Option(help="none: Trainer's own, by train.optim.")
    ] = "AdamW",
    scheduler: Annotated[
        Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "none"],
        typer.Option(help="none: Trainer's own, by train.lr_scheduler_type."),
    ] = "WarmupLR",
    model: Annotated[str | None, typer.Option(help="The model: a folder or hub name.")] = None,
    data: Annotated[
        str | None, typer.Option(help="The training data: a file, folder, glob or hub name.")
    ] = None,
    task: Annotated[
        Literal["text-classification", "causal-lm"], typer.Option(help="What the model is trained to do.")
    ] = "text-classification",
    output: Annotated[
        str, typer.Option("--output", "-o", help="The JSON file; - prints it.")
    ] = "ds_config.json",
    force: ForceOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Write ds_config.json and, where there is none, dstool.yaml."""
    from dstool import init_config as verb
    from dstool.ds_config.build import Options, build, dumps

    out.as_json = as_json
    options = Options(stage, offload, nvme_path, precision, optimizer, scheduler)  # type: ignore[arg-type]
    if output == "-":
        out.text(dumps(build(verb.with_nvme_path(options, Path())))[:-1])
        return
    result = verb.init_config(options, Path(output), model=model, data=data, task=task, force=force)
    out.result("Initialised", result, next_command="dstool train")


@app.command()
def check(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[DS_CONFIG]", help="The DeepSpeed JSON, or else that of the run file."),
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
        out.text("\n".join(verb.report(result, _typed(result.file))))
    if result.errors:
        raise typer.Exit(ConfigError.exit_code)


@app.command()
def explain(
    name: Annotated[
        str | None, typer.Argument(help="A key of the JSON, any part of one, or a topic. [default: a list]")
    ] = None,
    lang: Annotated[
        Literal["en", "ko"] | None,
        typer.Option(help="The language. [default: that of the locale]", show_default=False),
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
    optimizer: Annotated[
        Literal["AdamW", "Adam", "Adagrad", "none"] | None, typer.Option(help="none: train.optim.")
    ] = None,
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
        out.text(verb.show(result))


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
        _show_trained(result, adapter=loaded.config.lora is not None)
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
        _show_trained(asdict(trained), adapter=loaded.config.lora is not None)


def _show_config(rows: list[tuple[str, Any, str]]) -> None:
    if out.as_json:
        out.result("", {key: {"value": value, "from": origin} for key, value, origin in rows})
        return
    lines = [(f"{key}: {json.dumps(value, ensure_ascii=False)}", origin) for key, value, origin in rows]
    width = max(len(line) for line, _ in lines if len(line) < 60)
    for line, origin in lines:
        out.text(f"{line:<{width}}  # {origin}")


def _show_trained(result: dict[str, Any], *, adapter: bool) -> None:
    last = result["checkpoints"][-1] if result["checkpoints"] and not adapter else None
    result["output_dir"] = Path(result["output_dir"])
    out.result(
        "Trained", result, next_command=f"dstool consolidate {last}" if last else 'dstool infer --text "..."'
    )


@app.command()
def consolidate(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint-N or global_stepN folder, or a run's folder.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the weights go.")
    ] = None,
    dtype: DtypeOpt = None,
    file_format: Annotated[
        Literal["safetensors", "bin"] | None, typer.Option("--format", help="The type of the files.")
    ] = None,
    max_shard_size: ShardOpt = None,
    config: ConfigOpt = None,
    force: ForceOpt = False,
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
    settings = load(config, flags=flags, required=False).config
    source = find_input(checkpoint, Path(settings.train.output_dir))
    target = settings.consolidate.output_dir

    def work() -> Any:
        from dstool.consolidate import consolidate as run

        return run(
            source,
            Path(target) if target else None,
            dtype=settings.consolidate.dtype,
            file_format=settings.consolidate.format,
            max_shard_size=settings.consolidate.max_shard_size,
            force=force,
        )

    _once(
        work,
        "Consolidated",
        as_json,
        lambda result: f'dstool infer --model {_typed(result.output_dir)} --text "..."',
    )


@app.command()
def merge(
    input_dir: Annotated[
        Path | None, typer.Option(help="A checkpoint, a run's folder or a model folder.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where the model goes.")
    ] = None,
    zero_stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="Refuse a checkpoint of another ZeRO stage.")
    ] = None,
    dtype: DtypeOpt = None,
    max_shard_size: ShardOpt = None,
    config: ConfigOpt = None,
    force: ForceOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Make a folder that from_pretrained loads: weights, config, tokenizer, labels."""
    from dstool.config import load

    flags = {
        "input_dir": input_dir,
        "output_dir": output_dir,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    settings = load(
        config, flags={f"merge.{key}": value and str(value) for key, value in flags.items()}, required=False
    )
    section, run_dir = settings.config.merge, Path(settings.config.train.output_dir)
    if section.output_dir is None:
        raise ConfigError("merge needs a place for the model", hint="--output-dir DIR")
    source = find_input(Path(section.input_dir) if section.input_dir else None, run_dir)
    target = Path(section.output_dir)

    def work() -> Any:
        from dstool.merge import merge as run

        return run(
            source,
            target,
            zero_stage=zero_stage,
            dtype=section.dtype,
            max_shard_size=section.max_shard_size,
            force=force,
        )

    _once(
        work,
        "Merged",
        as_json,
        lambda result: f'dstool infer --model {_typed(result.output_dir)} --text "..."',
    )


@app.command()
def infer(
    words: Words = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="A text; may be given again.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A model folder. [default: the run's newest weights]", show_default=False),
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

    flags = {"infer.dtype": dtype, "infer.max_new_tokens": max_new_tokens}
    loaded = load(config, words=words or (), flags=flags, required=model is None)
    out.as_json = as_json
    if log.rank():
        return
    if not text:
        raise ConfigError("there is no text", hint='dstool infer --text "..."')
    from dstool.infer import infer as run

    with out.guard_stdout():
        result = run(text, loaded.config, model=model)
    if as_json:
        out.result("", result)
        return
    for prediction in result.predictions:
        if prediction.label is not None:
            out.text(f"{prediction.label}  {prediction.probability:.3f}  {prediction.text}")
        else:
            out.text(f"{prediction.text}{prediction.generated}")


# --- what several commands do ------------------------------------------------------------------------


def find_input(path: Path | None, run_dir: Path) -> Path:
    """`path`, or where that is not here the same name in the run's folder; without a path, that folder."""
    if path is None:
        return run_dir
    below = run_dir / path
    return below if not path.exists() and not path.is_absolute() and below.exists() else path


def _once(work: Callable[[], Any], title: str, as_json: bool, next_command: Callable[[Any], str]) -> None:
    """Do `work` in one process, however many ranks were started for it, and show what it returns."""
    out.as_json = as_json
    if log.rank():
        return
    with out.guard_stdout():
        result = work()
    out.result(title, result, next_command=next_command(result))


def _typed(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
