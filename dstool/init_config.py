"""Write the two files that a run starts from: the DeepSpeed JSON and the run file."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dstool import files, machine, new_run_file, preflight
from dstool import run_file as rewritten
from dstool.config import LENGTH_KEYS, RUN_FILE, Loaded, Task, load
from dstool.ds_config import check as ds_check
from dstool.ds_config import read, source
from dstool.ds_config.build import AUTO, build, dumps, of_run_file
from dstool.ds_config.check import Finding
from dstool.ds_config.keys import keys
from dstool.ds_config.looks import Circumstances
from dstool.ds_config.options import CHOICES, WITHOUT_WARMUP, Options, refuse
from dstool.ds_config.presets import PRESETS
from dstool.errors import ConfigError
from dstool.files import option, typed
from dstool.run_file import by_hand, shown

logger = logging.getLogger("dstool.init_config")

LOCAL_NVME = Path("/local_nvme")


@dataclass(frozen=True)
class InitResult:
    """The files that were written, and those that were there and stay as they are.

    `named` is the JSON that a run file which stays names in place of the one that was written.
    It is a text where that is no file. `words` are for the command line of `dstool train`, over what a run
    file that stays says otherwise.
    """

    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    nvme_path: Path | None
    named: Path | str | None = None
    words: tuple[str, ...] = field(default=(), metadata={"unit": "json"})


def init_config(
    options: Options,
    output: Path = Path("ds_config.json"),
    *,
    run_file: Path = Path(RUN_FILE),
    model: str | None = None,
    data: str | None = None,
    task: Task | None = None,
    lora: bool = False,
    length: int | None = None,
    force: bool = False,
) -> InitResult:
    """Write the DeepSpeed JSON to `output` and, where there is none, a run file that names it.

    `force` writes over the JSON. A run file is people's own work: only what `options` decide is changed in
    it, and it is written over only when `model`, `data` or `task` asks for another as well. With `lora` it
    is to train an adapter alone. `length` are the tokens in a row: a new run file has it, one that stays
    keeps its own.

    Raises:
        ConfigError: options that contradict each other, the machine or the run file, or a file that exists.
    """
    if output.resolve() == run_file.resolve():
        raise ConfigError(f"{output} is the run file", hint="choose another --output, such as ds_config.json")
    options = with_nvme_path(options, run_file.parent)
    text = generate(options)
    files.refuse_existing(output, force=force)
    new = any((model, data, task))
    kept = _kept(run_file, replaced=force and (new or _is_empty(run_file)))
    changes = _changes(options, text, kept) if kept else {}
    if kept:
        _refuse_kept(kept, run_file, changes, new=new, lora=lora, force=force)
    text, warnings = _checked(text, _around(options, kept, changes, model), run_file, options)
    run_text = rewritten.changed(run_file, changes) if changes else None
    files.write_text(output, text)
    if run_text is not None:
        rewritten.write(run_file, run_text, changes)
    if kept is None:
        named, task = os.path.relpath(output, run_file.parent), task or "text-classification"
        run_text = new_run_file.text(
            named, options, model=model, data=data, task=task, lora=lora, length=length
        )
        files.write_text(run_file, run_text)
    _tell(options, run_file, warnings)
    return _result(options, output, run_file, kept, length, touched=run_text is not None)


def _result(
    options: Options, output: Path, run_file: Path, kept: Loaded | None, length: int | None, *, touched: bool
) -> InitResult:
    named = _named_instead(kept, output)
    words = [f"deepspeed={output}"] if named else []
    return InitResult(
        written=(output.resolve(), *([run_file.resolve()] if touched else [])),
        kept=() if touched else (run_file.resolve(),),
        nvme_path=Path(options.nvme_path) if options.nvme_path else None,
        named=named,
        words=(*words, *_other_length(kept, length, run_file)),
    )


def _other_length(kept: Loaded | None, length: int | None, run_file: Path) -> list[str]:
    """`length` as a word, where the run file that stays has another; and say so."""
    if kept is None or length is None:
        return []
    key = LENGTH_KEYS[kept.config.model.task]
    own = getattr(kept.config.data, key)
    if own == length:
        return []
    said = f"keeps data.{key}: {own}" if own else f"still has no data.{key}"
    word = f"data.{key}={length}"
    logger.warning("%s %s; for the length that was planned for: dstool train %s", run_file, said, word)
    return [word]


def options_of(preset: str | None, settings: Iterable[str], given: Mapping[str, Any]) -> Options:
    """The options of `preset` with those that are given over them.

    Args:
        preset: a name in `presets`; None starts from the defaults.
        settings: `key.path=value` words, the value as JSON, or else a text.
        given: values by name; None is not given, and what is no option of the JSON is passed over.

    Raises:
        ConfigError: no such preset, or a word that is none.
    """
    if preset is not None and preset not in PRESETS:
        close = difflib.get_close_matches(preset, PRESETS, 1)
        raise ConfigError(
            f"--preset {preset}: not one of {', '.join(PRESETS)}",
            hint=f"dstool init-config --preset {close[0] if close else 'zero2'}",
        )
    base = PRESETS[preset].options if preset else Options()
    names = [each.name for each in fields(Options) if each.name != "settings"]
    values = {name: given[name] for name in names if given.get(name) is not None}
    if not {values.get("stage"), values.get("offload")} <= {None, 3, "nvme"}:
        base = replace(base, nvme_path=None)
    return replace(base, **values, settings=base.settings + _settings(settings))


_KEYS = {
    "zero_optimization.stage": "stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.device": "offload_param",
    "zero_optimization.offload_optimizer.nvme_path": "nvme_path",
    "zero_optimization.offload_param.nvme_path": "nvme_path",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    "communication_data_type": "communication_data_type",
    "optimizer.type": "optimizer",
    "scheduler.type": "scheduler",
    "optimizer.params.lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "train_batch_size": "global_batch",
    "gradient_accumulation_steps": "accumulation",
    "gradient_clipping": "clip",
}
"""The keys of the JSON whose value an option is. Another that an option only decides, `--set` may change."""


def _refuse_otherwise(own: Mapping[str, Any], settings: Iterable[tuple[str, Any]]) -> None:
    """Raise `ConfigError` where `--set` says otherwise than `own`, which the options alone write.

    An option writes what goes with its value too, and `--set` would leave what goes with another.
    """
    for path, value in settings:
        for key, name in _KEYS.items():
            said, other = _at(own, key), _inside(value, path, key)
            if f"{key}.".startswith(f"{path}.") and said not in (None, AUTO, other):
                left = other is None and "none" not in CHOICES.get(name, ())
                raise ConfigError(
                    f"--set {path}={_typed(value)}: {option(name)} says that {key} is {said}",
                    hint=_instead(key, said if left else other),
                )


def _instead(key: str, value: Any) -> str:
    """The command with the option for `key`: with `value`, or else one that it takes."""
    name = _KEYS[key]
    if name == "precision":
        value = key.partition(".")[0] if value is True else AUTO
    elif value is None:
        value = "none" if "none" in CHOICES.get(name, ()) else ""
    try:
        refuse(replace(Options(), **{name: value}))
    except ConfigError as error:
        return error.hint or ""
    return f"dstool init-config {option(name, value)}"


def _at(block: Any, path: str) -> Any:
    """What stands at the dotted `path` in `block`; None where nothing does."""
    for name in path.split("."):
        block = block.get(name) if isinstance(block, dict) else None
    return block


def _inside(value: Any, path: str, key: str) -> Any:
    """What is at `key`, where `value` is all that is at `path`."""
    return value if path == key else _at(value, key.removeprefix(f"{path}."))


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_FOR_AUTO = ("gpus", "gpu_memory", "nodes", "cpu_memory", "nvme_space", "seq_len", "lora")
"""The options that say what `--auto` is to plan for."""
_BY_AUTO = ("preset", "stage", "offload", "offload_optimizer", "offload_param")
"""Those that decide what it is to find out."""


def refuse_without_auto(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that say what `--auto` is to plan for, where it is not given."""
    words = [option(name, given[name]) for name in _FOR_AUTO if name in given]
    if words:
        named = [option("model", given["model"])] if "model" in given else []
        raise ConfigError(
            f"{', '.join(words)}: for --auto alone, which chooses stage and offload by it",
            hint=f"dstool init-config --auto {' '.join(named + words)}",
        )


def refuse_with_auto(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that decide what `--auto` is to find out."""
    for name in _BY_AUTO:
        if name in given:
            raise ConfigError(
                f"--auto chooses the stage and offload, and {option(name)} says otherwise",
                hint="leave one of the two out; dstool plan shows what each stage takes "
                f"({option(name, given[name])})",
            )


def _settings(words: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    for word in words:
        path, value = _setting(word)
        if path in found:
            raise ConfigError(
                f"--set {path} is given twice: {_typed(found[path])} and {_typed(value)}",
                hint=f"leave one of the two out: --set {path}={_typed(value)}",
            )
        found[path] = value
    return tuple(found.items())


def _setting(word: str) -> tuple[str, Any]:
    path, equals, text = word.partition("=")
    if not equals or not all(path.split(".")):
        raise ConfigError(
            f"--set {word}: not KEY.PATH=VALUE",
            hint="for example --set zero_optimization.reduce_bucket_size=500000000",
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return path, text
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ConfigError(f"--set {word}: JSON has finite numbers alone", hint=f"--set {path}=1.0") from None
    return path, value


def refuse_files(given: Mapping[str, Any], *, auto: bool = False) -> None:
    """Raise `ConfigError` for options that say something of files, where the JSON is only printed.

    With `auto`, model and task say what is planned for.
    """
    flags = {"data": "--data", "as_json": "--json", "force": "--force"}
    for name, flag in flags.items() if auto else {"model": "--model", "task": "--task", **flags}.items():
        if given.get(name):
            raise ConfigError(
                f"--output - prints the JSON alone, and {flag} is about files",
                hint=f"leave {flag} out, or name a file: --output ds_config.json",
            )


def generate(options: Options) -> str:
    """The text of the JSON for `options`, without a look at the machine or a run file.

    Raises:
        ConfigError: options that contradict each other.
    """
    _refuse_otherwise(build(replace(options, settings=())), options.settings)
    return dumps(build(options))


def json_alone(options: Options, model: str | None = None) -> str:
    """The text of the JSON, for `model` where one is known, where no file is written.

    Raises:
        ConfigError: options that contradict each other or the machine.
    """
    options = with_nvme_path(options, Path())
    around = _around(options, None, {}, model)
    text, warnings = _checked(generate(options), around, Path(RUN_FILE), options)
    _tell(options, Path(RUN_FILE), warnings)
    return text


def _kept(run_file: Path, *, replaced: bool) -> Loaded | None:
    """The run file that is there and stays."""
    return load(run_file) if run_file.exists() and not replaced else None


def _is_empty(run_file: Path) -> bool:
    """Whether a run file holds nothing but comments."""
    try:
        lines = run_file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError):
        return False  # `load` says what is wrong with it
    return all(not line.strip() or line.lstrip().startswith("#") for line in lines)


def _named_instead(kept: Loaded | None, output: Path) -> Path | str | None:
    """What the run file that stays names, where that is not the JSON that was written."""
    if kept is None:
        return None
    named = kept.config.deepspeed
    if not isinstance(named, str):
        return "a mapping of its own" if named else "no JSON"
    return None if Path(named).resolve() == output.resolve() else Path(named)


_TRAINERS_DEFAULTS = {"warmup_steps": 0, "gradient_checkpointing": False}


def _refuse_kept(
    kept: Loaded, run_file: Path, changes: Mapping[str, Any], *, new: bool, lora: bool, force: bool
) -> None:
    """Raise `ConfigError` where the run file stays, and what is asked for is not what it says."""
    if new:
        raise ConfigError(
            f"{run_file} exists, and --model, --data and --task are for a new one",
            hint="--force overwrites it",
        )
    if lora and kept.config.lora is None:
        raise ConfigError(
            f"--lora: {run_file} stays as it is, and trains the whole model",
            hint=f"write `{new_run_file.LORA}` into {run_file}, and give the command again",
        )
    if changes and not force:
        raise ConfigError(
            f"{run_file} stays as it is, and these options need another `train:` in it: {by_hand(changes)}",
            hint="--force changes that in it, and leaves the rest of it",
        )


def _changes(options: Options, text: str, kept: Loaded) -> dict[str, Any]:
    """What the run file's `train:` must say instead for `options`; a field that is None must go."""
    train = kept.config.train.arguments()
    given = {**_TRAINERS_DEFAULTS, **train}
    own = {name: value for name, value in of_run_file(options).items() if given.get(name) != value}
    changes = {**read.other_words(json.loads(text), train), **own}
    gone = changes.get("lr_scheduler_type", "") is None or _scheduler_of(kept) in WITHOUT_WARMUP
    warmup = new_run_file.train(options).get("warmup_steps")
    if gone and warmup and not train.get("warmup_steps"):
        # no warm-up was that of a scheduler that has none, and goes with it
        changes.setdefault("warmup_steps", warmup)
    return changes


def _scheduler_of(kept: Loaded) -> str | None:
    """The scheduler in the JSON that the run file names, before it is written over."""
    named = kept.config.deepspeed
    try:
        ds = read.read(Path(named)) if isinstance(named, str) else named
    except ConfigError:
        return None
    found = _at(ds, "scheduler.type")
    return found if isinstance(found, str) else None


def _around(
    options: Options, kept: Loaded | None, changes: Mapping[str, Any], model: str | None
) -> Circumstances:
    """What the JSON is checked against: the run file as it will be."""
    if kept is None:
        return Circumstances(new_run_file.train(options), model_config=preflight.config_of(model))
    around = preflight.circumstances(kept.config)
    train = {**(around.train or {}), **changes}
    return replace(around, train={name: value for name, value in train.items() if value is not None})


def _checked(text: str, around: Circumstances, run_file: Path, options: Options) -> tuple[str, list[Finding]]:
    """The JSON as it can run, and what `dstool check` warns of; an error for what it finds wrong.

    Where the model has no hidden size to compute an "auto" from, DeepSpeed's own number takes its place.
    """
    parsed = source.parse(text)
    findings = ds_check.check(parsed, replace(around, machine=machine.look(parsed.value)))
    sizes = [each for each in findings if each.rule == "auto-unfilled" and each.edit]
    others = [each for each in findings if each not in sizes]
    errors = [each for each in others if each.severity == "error"]
    if errors:
        # The optimizer's folder and the parameters' are most often one, with one problem.
        words = "; ".join(dict.fromkeys(each.problem for each in errors))
        raise ds_check.error_of(errors)(words, hint=_mend(errors[0], run_file, options))
    text = source.apply(text, [edit for each in sizes for edit in each.edit])
    return text, list({each.problem: each for each in others}.values())


def _mend(error: Finding, run_file: Path, options: Options) -> str:
    """What to type where the JSON is not there yet for `error` to be mended in it."""
    if error.rule == "batch":
        total = dict(options.settings).get(error.path, options.global_batch)
        return f"dstool init-config --global-batch {total} --micro-batch 1"
    for path, value in options.settings:
        if _overlap(path, error.path):
            keys_here = [key for key in _KEYS if _overlap(key, path) and _overlap(key, error.path)]
            return (
                _instead(keys_here[0], _inside(value, path, keys_here[0])) if keys_here else _explained(path)
            )
    if error.rule == "nvme-path":
        return "--nvme-path FOLDER, one on a local NVMe disk"
    if error.rule in ("mismatch", "silent-winner"):
        return f"change that in {run_file}, or leave the option out that says otherwise"
    return error.mend


def _overlap(path: str, other: str) -> bool:
    """Whether one of the two is the other, or a block around it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _explained(path: str) -> str:
    """The command that says what the key at `path` takes, or the nearest to it, or which there are."""
    near = difflib.get_close_matches(path, keys(), 1)
    return f"dstool explain {near[0]}" if near else "dstool explain"


def _tell(options: Options, run_file: Path, warnings: Iterable[Finding]) -> None:
    """Say what stands in the run file alone, as the JSON cannot say it, and what may go wrong."""
    for name, value in of_run_file(options).items():
        logger.info("Trainer's own: %s says train.%s: %s, the JSON nothing", run_file, name, shown(value))
    if options.optimizer == "FusedAdam":
        runs = "DeepSpeedCPUAdam, as it is offloaded" if options.optimizer_device != "none" else "FusedAdam"
        logger.info("FusedAdam: DeepSpeed's name for it is AdamW, and it runs %s", runs)
    if options.nvme_path and not Path(options.nvme_path).exists():
        # DeepSpeed makes it (runtime/zero/stage3.py, swap_tensor/partitioned_param_swapper.py)
        path = options.nvme_path
        logger.info("nvme_path: %s is not there yet: the run makes it, or mkdir -p %s", path, typed(path))
    for each in warnings:
        logger.warning("%s: %s (%s)", each.problem, each.consequence, each.mend)


def with_nvme_path(options: Options, folder: Path) -> Options:
    """`options` with a place on the NVMe, where the offload needs one: /local_nvme, or else in `folder`."""
    if not options.nvme or options.nvme_path is not None or options.stage < 3:
        return options  # below stage 3 `build` refuses it
    if LOCAL_NVME.is_dir() and os.access(LOCAL_NVME, os.W_OK):
        return replace(options, nvme_path=str(LOCAL_NVME))
    path = folder.resolve() / "nvme_offload"
    logger.info("nvme_path: %s, as there is no %s to write to (--nvme-path names another)", path, LOCAL_NVME)
    return replace(options, nvme_path=str(path))
