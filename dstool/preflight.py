"""What can be found wrong with a run before torch is started for it, in well under a second.

`dstool train` looks here before it launches ranks, and each rank once more, since the DeepSpeed
launcher can start them without it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstool import files, log, machine
from dstool.config import RUN_FILE, Config
from dstool.data.files import columns_for, read_rows, reading_options
from dstool.data.names import local_files
from dstool.ds_config import check as ds_check
from dstool.ds_config import read, source
from dstool.ds_config.looks import Circumstances
from dstool.errors import ConfigError, DataError, DstoolError, EnvironmentUnfit, ModelError

logger = logging.getLogger("dstool.preflight")

HUB_SECONDS = 10.0


def check(config: Config, *, may_exist: bool = False) -> read.Reconciled:
    """Check the JSON, the model, the data and the output folder that the run file names.

    Args:
        may_exist: whether the output folder may hold an earlier run.

    Returns:
        The DeepSpeed JSON and the Trainer's arguments, brought together.

    Raises:
        ConfigError, ModelError, DataError: for the first that cannot be used.
    """
    settled = settle(config)
    _check_arguments(settled.train)
    check_model(config)
    _check_lora(config)
    _check_data(config)
    may_exist = may_exist or bool(settled.train.get("resume_from_checkpoint"))
    check_output(Path(config.train.output_dir), may_exist=may_exist)
    return settled


def settle(config: Config) -> read.Reconciled:
    """The DeepSpeed JSON and the Trainer's arguments, brought together.

    Raises:
        ConfigError: no JSON, or one that cannot be used or contradicts the run file.
    """
    if config.deepspeed is None:
        raise ConfigError(
            "the run file names no DeepSpeed JSON",
            hint="dstool init-config writes one, deepspeed: ds_config.json names it",
        )
    train = config.train.arguments()
    inline = isinstance(config.deepspeed, dict)
    name = "deepspeed" if inline else str(config.deepspeed)
    text = source.of_value(config.deepspeed) if inline else source.parse(read.text_of(Path(name)))
    ds = text.value if isinstance(text.value, dict) else {}
    found = ds_check.check(text, replace(circumstances(config), machine=machine.look(ds)))
    error = ds_check.refusal(found, json_name=name, run_name=RUN_FILE, places=not inline)
    if error is not None:
        raise error
    given = config.deepspeed if isinstance(config.deepspeed, dict) else text.value
    return read.reconcile(given, train, json_name=name)


def circumstances(config: Config, *, world_size: int | None = None) -> Circumstances:
    """What the DeepSpeed JSON of a run is checked against, the machine left out."""
    return Circumstances(config.train.arguments(), world_size, _model_config(config))


def _model_config(config: Config) -> dict[str, Any] | None:
    """The config.json of the model, where it is on this machine."""
    return config.model.from_scratch or config_of(config.model.name)


def config_of(model: str | None) -> dict[str, Any] | None:
    """The config.json in the folder `model`; None where there is none that can be read."""
    if model is None:
        return None
    try:
        found = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # `check_model` says what is wrong with it
    return found if isinstance(found, dict) else None


def check_output(output_dir: Path, *, may_exist: bool = False) -> None:
    """Raise `ConfigError` for an output folder with something in it, or one that cannot be made."""
    if not may_exist and files.occupied(output_dir):
        raise ConfigError(
            f"{output_dir} exists and is not empty",
            hint="--resume goes on from its newest checkpoint, --force starts anew, or train.output_dir=DIR",
        )
    files.refuse_unwritable(output_dir)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what Trainer takes, or refuses only once the model is loaded (trainer.py, 5.24)."""
    epochs, steps = arguments.get("num_train_epochs", 3), arguments.get("max_steps", -1)
    if steps == 0 or (steps < 0 and not epochs > 0):
        raise ConfigError(
            f"train.max_steps={steps} and train.num_train_epochs={epochs} train nothing",
            hint="train.num_train_epochs=1, or train.max_steps=100",
        )
    if arguments.get("push_to_hub"):
        _check_hub_answers("train.push_to_hub")
    if arguments.get("save_only_model") and arguments.get("load_best_model_at_end"):
        raise ConfigError(
            "train.load_best_model_at_end needs the optimizer's state in each checkpoint, and "
            "train.save_only_model leaves it out",
            hint="take one of them out",
        )


def check_model(config: Config, *, by: str = "model.name=") -> None:
    """Raise `ConfigError` or `ModelError` where no model is named, or not one that can be found.

    `by` is what stands before the name on the command line, for the hint.
    """
    section = config.model
    if (section.name is None) == (section.from_scratch is None):
        problem = "names no model" if section.name is None else "has both model.name and model.from_scratch"
        raise ConfigError(f"the run file {problem}", hint=f"set {by}FOLDER_OR_HUB_NAME")
    if section.name is None:
        return
    path = Path(section.name)
    if path.is_file():
        raise ModelError(f"{path} is a file", hint=f"name its folder: {by}{path.parent}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json", hint="name a folder that save_pretrained or dstool made"
        )
    if not path.exists() and (
        path.is_absolute() or section.name.startswith(".") or section.name.count("/") > 1
    ):
        raise ModelError(f"{path}: no such folder", hint=f"set {by}FOLDER_OR_HUB_NAME")
    if not path.exists():
        check_hub(section.name, "model", ModelError)


def _check_lora(config: Config) -> None:
    """Refuse what would leave an adapter that nothing can load, or that `train` cannot write."""
    if config.lora is None:
        return
    if config.model.name is None:
        raise ConfigError(
            "lora: saves an adapter alone, and the random weights of model.from_scratch would be lost",
            hint="set model.name=FOLDER_OR_HUB_NAME, or lora=null to train the whole model",
        )
    if config.train.save_fp32:
        raise ConfigError(
            "train.save_fp32 with lora: writing an adapter in fp32 is not supported yet",
            hint="train.save_fp32=false; the adapter itself is in the run's folder",
        )


def _check_data(config: Config) -> None:
    """The columns and the first row of every file here; a hub data set is read by the ranks."""
    section = config.data
    if section.train is None:
        raise ConfigError("the run file names no data", hint="set data.train=FILE")
    columns, options = columns_for(section, config.model.task), reading_options(section)
    for spec in (section.train, section.eval):
        files_here = local_files(spec)
        if spec and not files_here:
            check_hub(str(spec), "dataset", DataError)
        for file in files_here:
            next(read_rows([file], columns, **options), None)


def check_hub(name: str, kind: str, error: type[DstoolError]) -> None:
    """Raise `error` where `name` has to come from the Hugging Face hub, and that cannot be reached.

    Transformers and datasets would try for half a minute each, in every rank.
    """
    from huggingface_hub import constants

    copies = (
        Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}"),
        Path(constants.HF_HOME, "datasets", name.replace("/", "___")),
    )
    if log.rank() or any(copy.is_dir() for copy in copies):
        return
    reason = silent_hub()
    if reason:
        raise error(
            f"{name} is not on this machine, and the Hugging Face hub cannot be reached ({reason})",
            hint="check the spelling or the network; a folder or file on this machine needs neither",
        )


def _check_hub_answers(key: str) -> None:
    if reason := silent_hub():
        raise EnvironmentUnfit(
            f"{key}: the Hugging Face hub cannot be reached ({reason})",
            hint=f"{key}=false, or mend the network",
        )


def silent_hub() -> str:
    """Why the hub does not answer; empty when it does."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)


def _unreachable(url: str) -> str:
    """Why nothing answers at `url`; empty when something does."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=HUB_SECONDS):  # noqa: S310 - https, or HF_ENDPOINT
            return ""
    except HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
