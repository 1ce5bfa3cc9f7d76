"""Make a folder that `from_pretrained` loads, from a checkpoint, a run or another model folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dstool import files, models
from dstool.checkpoint import assemble, layout, writer
from dstool.config import Dtype
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


def merge(
    input_dir: Path,
    output_dir: Path,
    *,
    zero_stage: int | None = None,
    dtype: Dtype | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
) -> MergeResult:
    """Write the whole model of `input_dir` to `output_dir`: weights, config, tokenizer, templates, labels.

    The folder is loaded back with `from_pretrained` before it takes its name.

    Args:
        input_dir: a ZeRO checkpoint, a run's output folder, or a folder with a model's weights.
        zero_stage: the stage that the checkpoint is of, where the caller wants that checked.
        dtype: of the weights; by default that of the model's config, which is what it was trained in.

    Raises:
        CheckpointError: the checkpoint is incomplete, or of another stage.
        ModelError: config.json is missing, or does not fit the weights.
        ConfigError: `output_dir` exists, holds a checkpoint, or is or holds `input_dir`.
    """
    started = time.monotonic()
    if input_dir.resolve().is_relative_to(output_dir.resolve()):
        raise ConfigError(f"{output_dir} is the input folder, or holds it", hint="name another --output-dir")
    if layout.is_zero(output_dir):
        raise ConfigError(f"{output_dir} holds a ZeRO checkpoint", hint="name another --output-dir")
    files.refuse_existing(output_dir, force=force)
    companions, state = _read(input_dir, zero_stage)
    folder = models.open_folder(companions)
    state = models.fit(state, folder)
    wanted = models.DTYPES[dtype] if dtype else _trained_dtype(folder)
    with files.new_folder(output_dir, force=force) as temporary:
        models.copy_companions(companions, temporary)
        models.set_config_dtype(temporary, wanted)
        written = writer.write_weights(state, temporary, dtype=wanted, max_shard_size=max_shard_size)
        models.prove_loadable(models.open_folder(temporary), input_dir)
    return MergeResult(
        output_dir=output_dir.resolve(),
        source=input_dir.resolve(),
        architecture=(folder.config.architectures or ["?"])[0],
        files=written.files,
        tensors=written.tensors,
        parameters=written.parameters,
        dtype=models.DTYPE_NAMES[wanted],
        bytes=written.bytes,
        seconds=time.monotonic() - started,
    )


def _read(input_dir: Path, zero_stage: int | None) -> tuple[Path, Mapping[str, torch.Tensor]]:
    """The folder with the config and tokenizer, and the weights of the model in `input_dir`."""
    models.refuse_adapter(input_dir, "merging")
    if models.has_weights(input_dir) and not (input_dir / "latest").exists() and zero_stage is None:
        logger.info("%s holds whole weights", input_dir)
        return input_dir, models.read_weights(input_dir)
    found = layout.find(input_dir)
    models.refuse_adapter(found.root, "merging")
    if zero_stage is not None and zero_stage != found.stage:
        raise CheckpointError(
            f"{found.folder} is of ZeRO stage {found.stage}, not {zero_stage}",
            hint=f"--zero-stage {found.stage}",
        )
    return _companions(found), assemble.fp32_state_dict(found)


def _companions(found: layout.ZeroCheckpoint) -> Path:
    """The checkpoint's own folder, or the run's, whichever has the model's config."""
    for folder in (found.root, found.root.resolve().parent):
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(
        f"neither {found.root} nor the folder above it has a config.json",
        hint="dstool consolidate writes the weights alone",
    )


def _trained_dtype(folder: models.ModelFolder) -> torch.dtype:
    dtype = folder.config.dtype
    return dtype if dtype in models.DTYPE_NAMES else torch.float32
