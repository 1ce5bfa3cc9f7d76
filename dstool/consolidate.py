"""Turn a ZeRO checkpoint into one set of weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from dstool import files, models
from dstool.checkpoint import assemble, layout, writer
from dstool.config import Dtype, FileFormat
from dstool.errors import ConfigError


@dataclass(frozen=True)
class ConsolidateResult:
    """The weights that were written, and the checkpoint they are from."""

    output_dir: Path
    checkpoint: Path
    step: int
    stage: int
    world_size: int
    files: tuple[str, ...]
    tensors: int
    parameters: int
    dtype: str
    bytes: int = field(metadata={"unit": "bytes"})
    seconds: float = field(metadata={"unit": "seconds"})


def consolidate(
    checkpoint: Path,
    output_dir: Path | None = None,
    *,
    dtype: Dtype = "fp32",
    file_format: FileFormat = "safetensors",
    max_shard_size: str = "5GB",
    force: bool = False,
) -> ConsolidateResult:
    """Gather the shards of `checkpoint` and write the weights, with config and tokenizer where it has them.

    Args:
        checkpoint: a checkpoint-N or global_stepN folder, or a run's output folder (its newest checkpoint).
        output_dir: by default `consolidated/NAME` in the run's folder.
        dtype: of the floating-point weights; integer buffers keep theirs.
        force: replace the model that is in `output_dir`.

    Raises:
        ModelError: the checkpoint is of a LoRA run.
        CheckpointError: no checkpoint, an incomplete one, or of a kind that cannot be gathered.
        ConfigError: `output_dir` exists (and with `force`: is no model), lies in a checkpoint or holds
            this one; or the shard size cannot be read.
    """
    started = time.monotonic()
    writer.parse_size(max_shard_size)
    found = layout.find(checkpoint)
    models.refuse_adapter(found.root, "consolidating")
    target = output_dir or default_output(found)
    refuse_overlap(found, target)
    files.refuse_replacing(target, (*models.COMPANIONS, *writer.WEIGHT_PATTERNS), force=force)
    state = assemble.fp32_state_dict(found)
    with files.new_folder(target, force=force) as temporary:
        written = writer.write_weights(
            state,
            temporary,
            dtype=models.DTYPES[dtype],
            max_shard_size=max_shard_size,
            file_format=file_format,
        )
        models.copy_companions(found.root, temporary)
        if (temporary / "config.json").is_file():
            models.set_config_dtype(temporary, models.DTYPES[dtype])
    return ConsolidateResult(
        output_dir=target.resolve(),
        checkpoint=found.folder.resolve(),
        step=found.step,
        stage=found.stage,
        world_size=found.world_size,
        files=written.files,
        tensors=written.tensors,
        parameters=written.parameters,
        dtype=dtype,
        bytes=written.bytes,
        seconds=time.monotonic() - started,
    )


def default_output(found: layout.ZeroCheckpoint) -> Path:
    """`consolidated/NAME` beside the checkpoint, where Trainer's rotation of checkpoints does not reach."""
    root = found.root if found.root.name.strip(".") else found.root.resolve()
    return root.parent / "consolidated" / root.name


def refuse_overlap(found: layout.ZeroCheckpoint, target: Path) -> None:
    """Raise `ConfigError` for a target in a checkpoint, or one that holds this one (the run's folder)."""
    hint = f"-o {files.typed(default_output(found))}"
    layout.refuse_inside(target, hint)
    if found.root.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"{target} holds the checkpoint itself", hint=hint)
