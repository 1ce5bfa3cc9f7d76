"""Turn a ZeRO checkpoint into one set of weights."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dstool import files
from dstool.checkpoint import companions, layout, lora, writer
from dstool.checkpoint.reader import Entry, Weights
from dstool.checkpoint.stream import Progress
from dstool.checkpoint.verify import verify as compare
from dstool.checkpoint.verify import weights_of
from dstool.config import ConsolidateDtype, Engine, FileFormat
from dstool.errors import ConfigError
from dstool.launch import ends_with_clean_up

logger = logging.getLogger("dstool.consolidate")


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
    verified: str | None = None
    """What was compared, where it was."""
    plan: tuple[Entry, ...] = field(default=(), metadata={"unit": "json"})
    """Of a dry run: which bytes of which file would make which tensor. Too long for people to read."""


def consolidate(
    checkpoint: Path,
    output_dir: Path | None = None,
    *,
    dtype: ConsolidateDtype = "fp32",
    file_format: FileFormat = "safetensors",
    max_shard_size: str = "5GB",
    tag: str | None = None,
    exclude_frozen: bool = False,
    verify: bool = False,
    engine: Engine = "stream",
    dry_run: bool = False,
    trust_pickle: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ConsolidateResult:
    """Gather the shards of `checkpoint` and write the weights, with config and tokenizer where it has them.

    Args:
        checkpoint: a checkpoint-N or global_stepN folder, or a run's output folder (its newest checkpoint).
        output_dir: by default `consolidated/NAME` in the run's folder.
        dtype: of the floating-point weights; integer buffers keep theirs, and with "keep" all do.
        tag: the folder inside the checkpoint, in place of the one that `latest` names.
        exclude_frozen: leave out the parameters that were not trained.
        verify: compare every element of what was written with the checkpoint, and write a manifest.
        engine: "deepspeed" puts the weights together by DeepSpeed's own functions, in memory.
        dry_run: plan, and write nothing.
        trust_pickle: read files that name classes beyond those of a ZeRO checkpoint; they still run nothing.
        force: replace the model that is in `output_dir`.
        progress: told the bytes that are written, and all of them.

    Raises:
        CheckpointError: no checkpoint, an incomplete one, or of a kind that cannot be gathered; or what was
            written is not what the checkpoint holds.
        ConfigError: `output_dir` exists (and with `force`: is no model), lies in a checkpoint or holds
            this one; or the shard size cannot be read.
        EnvironmentUnfit: the disk is too small.
    """
    started = time.monotonic()
    limit = writer.parse_size(max_shard_size)
    found = layout.find(checkpoint, tag=tag, trust=trust_pickle)
    target = output_dir or default_output(found)
    refuse_overlap(found, target)
    files.refuse_replacing(target, companions.replaceable(target), force=force)
    where = (found.folder, found.stage, layout.ranks(found.world_size), found.step)
    logger.info("gathering %s: ZeRO stage %d, %s, step %d", *where)
    adapter = (found.root / lora.ADAPTER_CONFIG).is_file()
    masters = _without_frozen(weights_of(found)) if exclude_frozen else weights_of(found)
    weights = lora.peft_names(masters) if adapter else masters
    stored = writer.DTYPES.get(dtype)
    if dry_run:
        written = writer.planned(weights, target, stored, limit, file_format, adapter=adapter)
        return _result(found, target, written, dtype, started, plan=tuple(weights.entries.values()))
    with (
        ends_with_clean_up(),
        writer.refusals_named(target),
        files.new_folder(target, force=force) as temporary,
        _put_together(masters, engine, temporary) as source,
    ):
        written = writer.write_weights(
            lora.peft_names(source) if adapter else source,
            temporary,
            dtype=stored,
            max_shard_size=max_shard_size,
            file_format=file_format,
            adapter=adapter,
            progress=progress,
        )
        _write_companions(found, temporary, stored or _coarsest(weights), adapter=adapter)
        proof = _proof(weights, masters, written, stored) if verify else None
    return _result(found, target, written, dtype, started, verified=proof)


def _result(
    found: layout.ZeroCheckpoint,
    target: Path,
    written: writer.Written,
    dtype: str,
    started: float,
    *,
    verified: str | None = None,
    plan: tuple[Entry, ...] = (),
) -> ConsolidateResult:
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
        verified=verified,
        plan=plan,
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


def _write_companions(found: layout.ZeroCheckpoint, target: Path, dtype: str, *, adapter: bool) -> None:
    """Config, tokenizer and the like, as far as the checkpoint has them."""
    companions.copy(found.root, target)
    if adapter:  # which peft loads; the base model's config lies in the run's folder alone
        companions.fill(found.root.resolve().parent, target)
        shutil.copyfile(found.root / lora.ADAPTER_CONFIG, target / lora.ADAPTER_CONFIG)
    if (target / "config.json").is_file():
        companions.set_dtype(target, dtype)


def _without_frozen(weights: Weights) -> Weights:
    kept = {name: entry for name, entry in weights.entries.items() if entry.kind != "frozen"}
    tied = {alias: name for alias, name in weights.tied.items() if name in kept}
    return Weights(kept, tied, weights.checkpoint)


def _coarsest(weights: Weights) -> str:
    """The type that config.json gives to weights of several: the one of the most elements."""
    counts: dict[str, int] = {}
    for entry in weights.entries.values():
        if entry.is_floating:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.numel
    return max(counts, key=lambda dtype: counts[dtype], default="F32")


@contextmanager
def _put_together(weights: Weights, engine: Engine, folder: Path) -> Iterator[Weights]:
    """The weights that are copied: of the checkpoint's files, or of one that DeepSpeed's functions made."""
    if engine == "stream":
        yield weights
        return
    from dstool.checkpoint import assemble

    file = folder / ".deepspeed.bin"
    try:
        made = assemble.put_together(weights, file)
        yield replace_places(weights, made)
    finally:
        file.unlink(missing_ok=True)


def replace_places(weights: Weights, made: dict[str, Entry]) -> Weights:
    """The entries of `weights` with the places that `made` gives."""
    entries = {name: replace(made[name], kind=entry.kind) for name, entry in weights.entries.items()}
    return Weights(entries, weights.tied, weights.checkpoint)


def _proof(weights: Weights, masters: Weights, written: writer.Written, dtype: str | None) -> str:
    proof = compare(weights, written, dtype, masters=masters)
    for name in proof.not_finite:
        logger.warning("%s has infinite or NaN elements, as in the checkpoint", name)
    rounded = f", {proof.rounded} against the run's own weights" if proof.rounded else ""
    return f"{proof.tensors} tensors bit for bit{rounded}"
