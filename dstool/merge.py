"""Make a folder that `from_pretrained` loads, from a checkpoint, a run or another model folder.

A folder that holds whole weights (a run's, a model's) gives those. Where they are asked for in more
precision than they are stored in, and the run has a checkpoint of the very step that they are of, its fp32
masters are taken instead.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstool import adapters, card, files, hub, launch, models
from dstool.checkpoint import companions, layout, lora, verify, writer
from dstool.checkpoint.pickles import TORCH_NAMES, DType
from dstool.checkpoint.reader import Weights
from dstool.checkpoint.stream import Progress
from dstool.config import RECORD, Dtype
from dstool.errors import CheckpointError, ConfigError, ModelError

logger = logging.getLogger("dstool.merge")


@dataclass(frozen=True)
class MergeResult:
    """The model folder that was written."""

    output_dir: Path
    source: Path
    architecture: str
    files: tuple[str, ...]
    tensors: int
    parameters: int
    dtype: str
    bytes: int = field(metadata={"unit": "bytes"})
    seconds: float = field(metadata={"unit": "seconds"})
    pushed_to: str | None = None
    """Its address on the Hugging Face hub, where it was pushed there."""


def merge(
    input_dir: Path,
    output_dir: Path,
    *,
    zero_stage: int | None = None,
    dtype: Dtype | None = None,
    max_shard_size: str = "5GB",
    base_model: str | None = None,
    keep_adapter: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> MergeResult:
    """Write the whole model of `input_dir` to `output_dir`: weights, config, tokenizer, labels, model card.

    The folder is loaded back with `from_pretrained` before it takes its name.

    Args:
        input_dir: a ZeRO checkpoint, a run's output folder, or a folder with a model's weights.
        zero_stage: the stage that the checkpoint is of, where the caller wants that checked. It changes
            nothing else.
        dtype: of the weights; by default that of the model's config, which is what it was trained in.
        base_model: what a LoRA adapter is added to, in place of what its adapter_config.json names.
        keep_adapter: write the adapter itself, not the model that it makes of its base.
        push_to_hub: the repository on the Hugging Face hub that the folder is uploaded to.
        private: only the owner and whom they let in see that repository, which must be new or so already.
        force: replace the model that is in `output_dir`.

    Raises:
        CheckpointError: the checkpoint is incomplete, or of another stage.
        ModelError: config.json or the weights are missing, or do not fit each other.
        ConfigError: `output_dir` exists (and with `force`: is no model), lies in a checkpoint, or is or
            holds `input_dir`; or the shard size cannot be read.
        EnvironmentUnfit: the disk is too small; or the model cannot be pushed, which is looked into first.
    """
    started = time.monotonic()
    writer.parse_size(max_shard_size)
    _refuse_target(input_dir, output_dir, force=force)
    _refuse_push(push_to_hub, private=private)
    plan = _planned(input_dir, zero_stage, dtype, base_model, keep_adapter=keep_adapter)
    if push_to_hub is not None and plan.adapter is not None:
        _refuse_own_base(plan.adapter)
    wanted = writer.DTYPES[dtype or _trained_dtype(plan.folder)]
    with (
        launch.ends_with_clean_up(),
        writer.refusals_named(output_dir),
        files.new_folder(output_dir, force=force) as temporary,
    ):
        _write_companions(plan, temporary, wanted)
        name = push_to_hub or output_dir.resolve().name
        card.write(temporary, input_dir, plan.folder, name=name, base_model=base_model, adapter=keep_adapter)
        written = writer.write_weights(
            plan.weights,
            temporary,
            dtype=wanted,
            max_shard_size=max_shard_size,
            adapter=keep_adapter,
            progress=progress,
        )
        _prove(plan, temporary, input_dir)
    address = hub.push(output_dir.resolve(), push_to_hub, private=private) if push_to_hub else None
    return MergeResult(
        output_dir=output_dir.resolve(),
        source=input_dir.resolve(),
        architecture=(plan.folder.config.architectures or ["?"])[0],
        files=written.files,
        tensors=written.tensors,
        parameters=written.parameters,
        dtype=_name(wanted),
        bytes=written.bytes,
        seconds=time.monotonic() - started,
        pushed_to=address,
    )


def _refuse_target(input_dir: Path, output_dir: Path, *, force: bool) -> None:
    """Raise `ConfigError` where the model may not be written to `output_dir`."""
    if input_dir.resolve().is_relative_to(output_dir.resolve()):
        raise ConfigError(f"{output_dir} is the input folder, or holds it", hint="name another --output-dir")
    layout.refuse_inside(output_dir, "name another --output-dir")
    files.refuse_replacing(output_dir, companions.replaceable(output_dir, input_dir), force=force)


def _refuse_push(repo: str | None, *, private: bool) -> None:
    """Raise what would be in the way of a push, before any work."""
    if repo is not None:
        hub.check(repo, private=private)
    elif private:
        raise ConfigError(
            "--private is for a new repository on the hub", hint=f"{hub.FLAG} OWNER/NAME --private"
        )


@dataclass(frozen=True)
class _Plan:
    """What is written: the weights, the model that they are of, and what lies beside them."""

    weights: Weights
    folder: models.ModelFolder
    home: Path
    """The folder with the config and tokenizer."""
    base: Path | None = None
    """Of an adapter: the base model, which has what `home` lacks."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json that are other ones then."""
    adapter: Mapping[str, Any] | None = None
    """The adapter_config.json, where the adapter is kept."""


def _planned(
    input_dir: Path, zero_stage: int | None, dtype: Dtype | None, base: str | None, *, keep_adapter: bool
) -> _Plan:
    _refuse_bare(input_dir)
    adapter = _adapter(input_dir, zero_stage)
    if adapter is not None:
        return _planned_adapter(*adapter, base, keep_adapter=keep_adapter)
    for given, flag in ((base, "--base-model"), (keep_adapter, "--keep-adapter")):
        if given:
            raise ConfigError(
                f"{input_dir} holds no adapter, and {flag} is for one", hint=f"leave {flag} out"
            )
    home, weights = _read(input_dir, zero_stage, dtype)
    folder = models.open_folder(home)
    return _Plan(models.fit(weights, folder), folder, home)


def _refuse_bare(folder: Path) -> None:
    """Raise `ModelError` for a folder with the config of a model, or of an adapter, and no weights."""
    if layout.is_zero(folder) or models.has_weights(folder) or layout.adapter_file(folder):
        return
    adapter, *_ = layout.ADAPTER_FILES
    for config, weights in ((lora.ADAPTER_CONFIG, adapter), ("config.json", "model.safetensors")):
        if (folder / config).is_file():
            raise ModelError(
                f"{folder} holds {config} and no weights beside it: {weights} is missing",
                hint=f"copy {weights} to {files.typed(folder)}, or name another --input-dir",
            )


def _adapter(input_dir: Path, zero_stage: int | None) -> tuple[Path, Weights] | None:
    """The folder and the weights of the adapter in `input_dir`, or in a checkpoint; None without one."""
    if models.is_adapter(input_dir) and not (input_dir / layout.LATEST).exists():
        if zero_stage is not None:
            _of_stage(layout.find(input_dir), zero_stage)
        return input_dir, models.read_adapter(input_dir)
    if models.has_weights(input_dir) or not layout.is_zero(input_dir):
        return None
    found = _of_stage(layout.find(input_dir), zero_stage)
    if not models.is_adapter(found.root):
        return None
    return found.root, lora.peft_names(verify.weights_of(found))


def _planned_adapter(home: Path, weights: Weights, named: str | None, *, keep_adapter: bool) -> _Plan:
    adapter = lora.of_weights(home, weights)
    if not keep_adapter:
        lora.refuse_other_kinds(adapter)
    base = adapters.base_folder(named, adapter.settings, home)
    folder, changes = adapters.model_of(home, base, adapter)
    if keep_adapter:
        named_in = {"base_model_name_or_path": named} if named else {}
        return _Plan(weights, folder, home, base, changes, {**adapter.settings, **named_in})
    summed, more = adapters.fold(base, adapter, folder)
    return _Plan(summed, folder, home, base, {**changes, **more})


def _refuse_own_base(settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an adapter that others could not load, and that tells of this machine."""
    name = settings.get("base_model_name_or_path")
    if card.hub_name(name) is None:
        raise ConfigError(
            f"{hub.FLAG}: the base model of the adapter is {name}, which is here alone",
            hint="--base-model NAME_ON_THE_HUB, or leave --keep-adapter out",
        )


def _write_companions(plan: _Plan, target: Path, dtype: DType) -> None:
    """Config, tokenizer and the like; of an adapter that is kept also its own settings."""
    companions.copy(plan.home, target)
    if plan.base is not None:
        companions.fill(plan.base, target)
    if plan.adapter is not None:
        text = json.dumps(plan.adapter, indent=2, ensure_ascii=False)
        (target / lora.ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")
    companions.set_values(target, plan.changes)
    companions.set_dtype(target, dtype)


def _prove(plan: _Plan, folder: Path, source: Path) -> None:
    """Load back what was written to `folder`."""
    if plan.adapter is not None:
        adapters.prove(folder, plan.weights, plan.folder)
    else:
        models.prove_loadable(models.open_folder(folder), source)


def _read(input_dir: Path, zero_stage: int | None, dtype: Dtype | None) -> tuple[Path, Weights]:
    """The folder with the config and tokenizer, and the weights of the model in `input_dir`."""
    if not models.has_weights(input_dir) or (input_dir / layout.LATEST).exists():
        found = _of_stage(layout.find(input_dir), zero_stage)
        return _home(found), verify.weights_of(found)
    if zero_stage is not None:
        _of_stage(layout.find(input_dir), zero_stage)
    weights = models.read_weights(input_dir)
    stored = _least_precise(weights)
    if dtype is None or stored is None or _PRECISION[writer.DTYPES[dtype]] <= _PRECISION[stored]:
        logger.info("%s holds whole weights", input_dir)
        return input_dir, weights
    masters = _masters(input_dir)
    if masters is not None:
        logger.info("%s holds %s weights, %s their fp32 masters", input_dir, _name(stored), masters.root)
        return input_dir, verify.weights_of(masters)
    logger.warning(
        "%s holds %s weights, and has no whole checkpoint of the same step: written as %s they stay rounded",
        *(input_dir, _name(stored), dtype),
    )
    return input_dir, weights


def _of_stage(found: layout.ZeroCheckpoint, zero_stage: int | None) -> layout.ZeroCheckpoint:
    if zero_stage is not None and zero_stage != found.stage:
        raise CheckpointError(
            f"{found.folder} is of ZeRO stage {found.stage}, not {zero_stage}",
            hint=f"--zero-stage {found.stage}",
        )
    return found


_PRECISION: Mapping[DType, int] = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
"""Bits of the significand."""


def _least_precise(weights: Weights) -> DType | None:
    """The coarsest floating type among the tensors."""
    floating = {entry.dtype for entry in weights.entries.values() if entry.is_floating}
    return min(floating, key=lambda dtype: _PRECISION[dtype], default=None)


def _name(dtype: DType) -> str:
    return next((name for name, each in writer.DTYPES.items() if each == dtype), TORCH_NAMES[dtype])


def _masters(run_dir: Path) -> layout.ZeroCheckpoint | None:
    """The checkpoint of the step that the final weights of a run are of, going by the run's own record.

    None where there is none, or where it is incomplete, or of a kind without masters (stage 0).
    """
    try:
        record = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
        name = record.get("best") or f"checkpoint-{record['steps']}"
        found = layout.find(run_dir / name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, CheckpointError):
        return None
    return found if found.stage else None


def _home(found: layout.ZeroCheckpoint) -> Path:
    """The checkpoint's own folder, or the run's, whichever has the model's config."""
    for folder in (found.root, found.root.resolve().parent):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(
        f"neither {found.root} nor the folder above it has a config.json",
        hint="dstool consolidate writes the weights alone",
    )


_SHORT: Mapping[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _trained_dtype(folder: models.ModelFolder) -> Dtype:
    """What the config says, or else fp32."""
    named = str(folder.config.dtype).removeprefix("torch.")
    return _SHORT.get(named, "fp32")
