"""Say what a checkpoint holds, what it lacks, and what can be made of it. Reads no tensor data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstool.checkpoint import layout, reader
from dstool.checkpoint.layout import ZeroCheckpoint
from dstool.checkpoint.lora import ADAPTER_CONFIG
from dstool.checkpoint.reader import Entry, Weights
from dstool.errors import CheckpointError
from dstool.files import typed

TRAINERS_FILES = ("trainer_state.json",)
PRECISIONS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


@dataclass(frozen=True)
class Count:
    """Tensors of one kind: how many, their elements, and their bytes as they are stored."""

    tensors: int
    elements: int
    bytes: int = field(metadata={"unit": "bytes"})


@dataclass(frozen=True)
class InspectResult:
    """What is known of a checkpoint. Where `problem` is there, the rest is what could be found out."""

    checkpoint: Path
    tags: tuple[str, ...]
    latest: str | None
    tag: str | None
    """The folder that was looked at: of `tags`, the one that was asked for, or `latest`."""
    problem: str | None
    hint: str | None
    stage: int | None = None
    world_size: int | None = None
    step: int | None = None
    deepspeed_version: str | None = None
    precision: str | None = None
    """Of the model; the masters are in fp32."""
    optimizer: str | None = None
    nvme: bool = False
    trained: Count | None = None
    frozen: Count | None = None
    buffers: Count | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of a tensor, with the first."""
    files: Mapping[str, int] = field(default_factory=dict)
    """The bytes of each file of the tag folder."""
    bytes: int = field(default=0, metadata={"unit": "bytes"})
    consolidates: str = ""
    merges: str = ""
    resumes: str = ""
    next: str = ""
    """What to type next; where there is a problem, the same as `hint`."""


def inspect(path: Path, *, tag: str | None = None) -> InspectResult:
    """Look at the checkpoint at `path`, of any level that `layout.find` takes.

    What is missing or damaged is in the result, as its `problem`.

    Raises:
        CheckpointError: there is nothing of a checkpoint at all.
    """
    root, found, problem = _found(path, tag)
    tags, latest = layout.tags(root)
    given = path.resolve().name if path.resolve().parent == root.resolve() else None
    looked_at = found.tag if found else tag or given or latest
    files = _files(root / (looked_at or ""))
    base: dict[str, Any] = {
        "checkpoint": root.resolve(),
        "tags": tags,
        "latest": latest,
        "tag": looked_at,
        "problem": problem.message if problem else None,
        "hint": problem.hint if problem else None,
        "next": (problem.hint or "") if problem else "",
        "files": files,
        "bytes": sum(files.values()),
    }
    if found is None:
        return InspectResult(**base)
    try:
        weights = reader.of_checkpoint(found)
    except CheckpointError as error:
        said = {"problem": error.message, "hint": error.hint, "next": error.hint or ""}
        return InspectResult(**{**base, **said}, **_head(found))
    uses = _uses(found)
    base["next"] = _next(found, latest, merges=uses["merges"].startswith("yes"))
    return InspectResult(**base, **_head(found), **_content(weights), **uses)


def _found(path: Path, tag: str | None) -> tuple[Path, ZeroCheckpoint | None, CheckpointError | None]:
    """The checkpoint and its folder, and what is wrong with it."""
    try:
        found = layout.find(path, tag=tag)
    except CheckpointError as error:
        root = layout.root_of(path)
        if root is None:
            raise
        return root, None, error
    return found.root, found, None


def _files(folder: Path) -> dict[str, int]:
    if not folder.is_dir():
        return {}
    found = sorted((each for each in folder.rglob("*") if each.is_file()), key=str)
    return {str(each.relative_to(folder)): each.stat().st_size for each in found}


def _head(found: ZeroCheckpoint) -> dict[str, Any]:
    model = found.content(found.model_files[0])
    types = Counter(
        ref.dtype for ref in model["module"].values() if getattr(ref, "dtype", None) in PRECISIONS
    )
    config = model.get("ds_config")
    block = config.get("optimizer") if isinstance(config, Mapping) else None
    return {
        "stage": found.stage,
        "world_size": found.world_size,
        "step": found.step,
        "deepspeed_version": found.deepspeed_version,
        "precision": PRECISIONS[types.most_common(1)[0][0]] if types else None,
        "optimizer": str(block["type"]) if isinstance(block, Mapping) and "type" in block else None,
        "nvme": found.nvme,
    }


def _content(weights: Weights) -> dict[str, Any]:
    entries = weights.entries.values()
    return {
        "trained": _count([each for each in entries if each.kind == "trained"]),
        "frozen": _count([each for each in entries if each.kind == "frozen"]),
        "buffers": _count([each for each in entries if each.kind == "buffer"]),
        "tied": dict(weights.tied),
    }


def _count(entries: Sequence[Entry]) -> Count:
    return Count(len(entries), sum(each.numel for each in entries), sum(each.nbytes for each in entries))


def _uses(found: ZeroCheckpoint) -> dict[str, Any]:
    plain = "yes: the weights of the model itself, as there are no masters"
    doubt = "after a comparison with the weights that the run kept, as the step counts disagree"
    return {
        "consolidates": doubt if found.doubtful else "yes" if found.stage else plain,
        "merges": _merges(found),
        "resumes": _resumes(found),
    }


def _merges(found: ZeroCheckpoint) -> str:
    if (found.root / ADAPTER_CONFIG).is_file():
        return "yes: an adapter, folded into the base model that its adapter_config.json names"
    if any((folder / "config.json").is_file() for folder in (found.root, found.root.resolve().parent)):
        return "yes"
    return "no: neither it nor the folder above it has a config.json"


def _resumes(found: ZeroCheckpoint) -> str:
    if lacks := [name for name in TRAINERS_FILES if not (found.root / name).is_file()]:
        return f"no: it has no {lacks[0]}"
    if found.stage == 0 or found.universal:
        return "with any number of ranks"
    return f"with {layout.ranks(found.world_size)}; with another number by a universal checkpoint"


def show(result: InspectResult, name: str) -> Iterator[str]:
    """The lines that a terminal shows."""
    from dstool.console import human_bytes

    yield name
    rows: list[tuple[str, str]] = [("tags", _tags(result))]
    if result.stage is not None:
        where = " (optimizer on NVMe)" if result.nvme else ""
        rows += [
            ("stage", f"{result.stage}{where}"),
            ("world size", str(result.world_size)),
            ("step", str(result.step)),
            ("precision", result.precision or "unknown"),
            ("optimizer", result.optimizer or "not in the JSON"),
            ("deepspeed", result.deepspeed_version or "unknown"),
        ]
    for title, count in (("trained", result.trained), ("frozen", result.frozen), ("buffers", result.buffers)):
        if count is not None and count.tensors:
            size = human_bytes(count.bytes)
            rows.append((title, f"{count.elements:,} elements in {count.tensors} tensors, {size}"))
    if result.tied:
        rows.append(("tied", ", ".join(f"{alias} = {first}" for alias, first in result.tied.items())))
    rows.append(("files", f"{len(result.files)}, {human_bytes(result.bytes)}"))
    if result.problem:
        rows.append(("problem", result.problem))
    else:
        rows += [
            ("consolidates", result.consolidates),
            ("merges", result.merges),
            ("resumes", result.resumes),
        ]
    rows.append(("next", result.next))
    width = max(len(title) for title, _ in rows)
    yield from (f"  {title:<{width}}  {text}" for title, text in rows if text)


def _tags(result: InspectResult) -> str:
    shown = (f"{tag} (latest)" if tag == result.latest else tag for tag in result.tags)
    return ", ".join(shown) or "none"


def _next(found: ZeroCheckpoint, latest: str | None, *, merges: bool) -> str:
    """The command that makes weights of the tag that was looked at, also where that is not the latest."""
    folder = found.root if found.tag == latest else found.folder
    name = typed(Path(os.path.relpath(folder)) if folder.resolve().is_relative_to(Path.cwd()) else folder)
    return f"dstool merge --input-dir {name} --output-dir DIR" if merges else f"dstool consolidate {name}"
