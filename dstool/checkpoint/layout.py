"""Which files make a ZeRO checkpoint, and whether they are all there and belong together.

What `DeepSpeedEngine.save_checkpoint` leaves behind (deepspeed/runtime/engine.py, 0.19.8):

    checkpoint-N/                                         the root, a run's own name for it
        latest                                            one line, the tag
        global_stepN/                                     the tag folder
            [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   stages 1 to 3, one per rank
            mp_rank_00_model_states.pt                         stages 0 to 2
            zero_pp_rank_R_mp_rank_00_model_states.pt          stage 3, one per rank
            offloaded_tensors/rankRR/*.swp                     stage 3 with the optimizer on NVMe
            zero/NAME/fp32.pt                                  a universal checkpoint, in place of
            optim_states

Nothing here trusts the number of files: the world size, the stage and the step come from inside them.
No pickle is executed and no tensor data is read, except the one number that is a step (`pickles`).
"""

from __future__ import annotations

import logging
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from dstool.checkpoint import pickles
from dstool.checkpoint.pickles import Inert, Shape
from dstool.errors import CheckpointError, ConfigError
from dstool.files import refusal, typed

logger = logging.getLogger("dstool.checkpoint")

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL = "zero"
"""The folder of a universal checkpoint in which each parameter has a folder of its own."""
SWAP_FOLDER = "offloaded_tensors"
WEIGHT_FILES: Mapping[str, str] = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
"""A model's whole weights by their format, in the order that `from_pretrained` prefers."""
INDEX = ".index.json"
"""Follows the name of a weight file, and says which shards stand for it."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""As peft looks for them, in this order."""

_RUN_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:\w+?_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
MALFORMED = (
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    struct.error,
)
"""What reading a content raises that is not of the form that DeepSpeed gives it."""
_MODEL_KEYS = ("module", "param_shapes", "buffer_names", "shared_params")
_FOREIGN = {
    "mixture-of-experts": re.compile(r"expp_rank_\d+_.*|(?:layer_\d+_)?expert_\d+_.*"),
    "pipeline-parallel": re.compile(r"layer_\d+-model.*"),
    "tensor-parallel": re.compile(r".*mp_rank_0*[1-9]\d*_(?:model|optim)_states\.pt"),
}


@dataclass(frozen=True)
class ZeroCheckpoint:
    """A checkpoint whose files have been found complete and of one step."""

    root: Path
    """The folder that holds `latest`, such as checkpoint-100."""
    tag: str
    """The name of the folder inside it, such as global_step100."""
    stage: int
    """0 to 3."""
    world_size: int
    """Data-parallel ranks, each with one partition."""
    step: int
    """Optimizer steps done (`global_steps`)."""
    deepspeed_version: str
    model_files: tuple[Path, ...]
    """In the order of ranks; one file below stage 3."""
    optim_files: tuple[Path, ...]
    """In the order of ranks; none at stage 0."""
    nvme: bool
    """Whether some fp32 partitions lie under offloaded_tensors/."""
    universal: bool = False
    """Whether the masters lie whole, each in a file of its own (checkpoint/ds_to_universal.py)."""
    doubtful: bool = False
    """Whether the optimizer has made another number of steps than the model file says."""
    trust: bool = False
    """Whether objects of unknown classes in the files are passed over, and not refused."""
    contents: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """What the files hold, as far as they were read; of many ranks it takes a while."""

    @property
    def folder(self) -> Path:
        """The tag folder."""
        return self.root / self.tag

    def content(self, file: Path) -> Mapping[str, Any]:
        """What one of the files holds, as `read` gives it."""
        return self.contents[file] if file in self.contents else read(file, trust=self.trust)

    def swap_folder(self, rank: int) -> Path:
        """Where the partitions that `rank` had on NVMe were copied, in the tag folder or the root.

        DeepSpeed 0.14 to 0.16 gave ranks no folders of their own, and so could save from one rank alone.
        """
        bases = [base / SWAP_FOLDER for base in (self.folder, self.root)]
        choices = [base / f"rank{rank:02d}" for base in bases] + (bases if self.world_size == 1 else [])
        return next((choice for choice in choices if choice.is_dir()), choices[0])


# --- the three levels that are accepted ------------------------------------------------------------


def find(path: Path, *, tag: str | None = None, trust: bool = False) -> ZeroCheckpoint:
    """The checkpoint at `path`: a checkpoint-N, a global_stepN inside one, or a run's output folder.

    Args:
        tag: the folder inside the checkpoint, in place of the one that `latest` names.
        trust: whether files may name classes that no ZeRO checkpoint needs; none of their code runs.

    Raises:
        CheckpointError: nothing there, a file missing or damaged, files of two steps or of a kind that
            cannot be read. The message names the file or folder.
    """
    try:
        return _find(path, tag, trust=trust)
    except OSError as error:  # a folder without rights, or a disk that fails
        if said := refusal(error, path):
            raise CheckpointError(said[0], hint=said[1]) from error
        place = error.filename or path
        raise CheckpointError(
            f"{place} cannot be read: {error.strerror or error}", hint=f"ls -ld {typed(place)}"
        ) from error


def _find(path: Path, tag: str | None, *, trust: bool) -> ZeroCheckpoint:
    if not path.is_dir():
        raise _not_a_folder(path)
    if tag is not None:
        return _inspect(path, _given_tag(path, tag), trust=trust)
    for name in (LATEST, LATEST_UNIVERSAL):
        if (path / name).is_file():
            return _inspect(path, _read_latest(path, name), trust=trust)
    if _is_tag_folder(path):
        home = path.resolve()
        root = path.parent if path.name == home.name else home.parent
        return _inspect(root, home.name, trust=trust)
    if tags := _tag_folders(path):
        names = ", ".join(tag.name for tag in tags)
        raise CheckpointError(
            f"{path / LATEST} is missing, and only it says which of these is meant: {names}",
            hint=f"name the folder itself: dstool consolidate {typed(tags[-1])}",
        )
    if _run_checkpoints(path):
        return newest_complete(path, trust=trust)
    raise _nothing_in(path)


def newest_complete(
    run_dir: Path, also: Callable[[ZeroCheckpoint], object] = lambda _: None, *, trust: bool = False
) -> ZeroCheckpoint:
    """The highest checkpoint-N in a run's output folder that is complete.

    Newer ones that are not complete are passed over with a warning.

    Args:
        also: raises `CheckpointError` for one that lacks what the caller needs besides.

    Raises:
        CheckpointError: there is none; says what is wrong with the newest.
    """
    if not run_dir.is_dir():
        raise _not_a_folder(run_dir)
    problems: list[CheckpointError] = []
    for candidate in _run_checkpoints(run_dir):
        try:
            found = find(candidate, trust=trust)
            also(found)
        except CheckpointError as problem:
            problems.append(problem)
            continue
        for passed in problems:
            logger.warning("%s is used, since a newer one cannot be: %s", found.root, passed.message)
        return found
    if len(problems) > 1:
        raise CheckpointError(
            f"{problems[0].message}; nor can any of the {len(problems) - 1} before it be read",
            hint=f"dstool inspect {typed(_run_checkpoints(run_dir)[-1])} says what is wrong with the first",
        )
    raise problems[0] if problems else _nothing_in(run_dir)


def root_of(path: Path) -> Path | None:
    """The checkpoint's folder, whatever is wrong with what is in it; None where there is nothing of one."""
    if not path.is_dir():
        return None
    if _is_root(path):
        return path
    if _is_tag_folder(path):
        return path.resolve().parent
    return next(iter(_run_checkpoints(path)), None)


def tags(root: Path) -> tuple[tuple[str, ...], str | None]:
    """The folders of a checkpoint in their order, and the one that `latest` names, there or not."""
    names = tuple(tag.name for tag in _tag_folders(root))
    try:
        latest = (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return names, None
    return names, latest if latest and len(latest) < 256 and latest.isprintable() else None


def is_zero(path: Path) -> bool:
    """Whether `path` looks like something that `find` takes. Reads names only."""
    if not path.is_dir():
        return False
    return _is_root(path) or _is_tag_folder(path) or any(_is_root(each) for each in _run_checkpoints(path))


def refuse_inside(target: Path, hint: str) -> None:
    """Raise `ConfigError` where `target` is a checkpoint or lies in one, also where that is another's.

    Older 16-bit weights lie there that loaders would prefer, and the files of a checkpoint belong together.
    """
    for folder in (target.resolve(), *target.resolve().parents):
        if is_checkpoint(folder):
            holds = folder == target.resolve()
            what = "holds a ZeRO checkpoint" if holds else f"lies in the checkpoint {folder}"
            raise ConfigError(f"{target} {what}", hint=hint)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint itself, of either level: one that a run has its `latest` in, or the tag.

    Reads names only.
    """
    return _is_tag_folder(path) or ((path / LATEST).is_file() and bool(_tag_folders(path)))


def ranks(count: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} rank{'s' if count != 1 else ''}"


def plain_weights(path: Path) -> str | None:
    """The name of the weight file, or of the index of its shards, that `from_pretrained` reads in `path`."""
    names = (name for each in WEIGHT_FILES.values() for name in (each, each + INDEX))
    return next((name for name in names if (path / name).is_file()), None)


def adapter_file(path: Path) -> Path | None:
    """The weights of the adapter in `path`, as peft finds them."""
    return next((path / name for name in ADAPTER_FILES if (path / name).is_file()), None)


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint-N folders in a run's output folder, oldest first. Reads names only."""
    return _run_checkpoints(run_dir)[::-1] if run_dir.is_dir() else []


def _is_root(path: Path) -> bool:
    return (path / LATEST).is_file() or bool(_tag_folders(path))


def _is_tag_folder(path: Path) -> bool:
    return path.is_dir() and any(any(path.glob(f"*_{kind}_states.pt")) for kind in ("model", "optim"))


def _tag_folders(root: Path) -> list[Path]:
    """The folders in `root` with ZeRO files in them, in the order of their step."""
    return sorted((entry for entry in root.iterdir() if _is_tag_folder(entry)), key=_natural)


def _run_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint-N folders of a run, newest first."""
    found = (entry for entry in run_dir.iterdir() if _RUN_CHECKPOINT.fullmatch(entry.name) and entry.is_dir())
    return sorted(found, key=_natural, reverse=True)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _given_tag(root: Path, tag: str) -> str:
    """`tag`, checked to be a folder of a checkpoint in `root`."""
    tags = [folder.name for folder in _tag_folders(root)]
    if tag in tags:
        return tag
    if _is_tag_folder(root):
        raise CheckpointError(
            f"{root} is itself the folder of a tag, and --tag names one in a checkpoint",
            hint=f"dstool consolidate {typed(root)}",
        )
    if within := [each for each in _run_checkpoints(root) if (each / tag).is_dir()]:
        raise CheckpointError(
            f"{root} is the folder of a run, and --tag names a folder in one of its checkpoints",
            hint=f"dstool consolidate {typed(within[0] / tag)}",
        )
    raise CheckpointError(
        f"{root} has no tag {tag!r}; there is {', '.join(tags) or 'none'}",
        hint=f"--tag {typed(tags[-1])}" if tags else "name the checkpoint-N folder that the run wrote",
    )


def _read_latest(root: Path, name: str = LATEST) -> str:
    """The tag that `latest` names, checked to be a folder in `root`."""
    file = root / name
    tags = _tag_folders(root)
    hint = f"name the folder itself: dstool consolidate {typed(tags[-1])}" if tags else _other_hint(root)
    try:
        tag = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} cannot be read as text: {error}", hint=hint) from error
    if not tag:
        raise CheckpointError(f"{file} is empty, it should name a folder beside it", hint=hint)
    is_name = "\n" not in tag and "\0" not in tag and Path(tag).name == tag and tag.strip(".")
    if not is_name or not (root / tag).is_dir():
        raise CheckpointError(f"{file} names {tag[:80]!r}, which is no folder in {root}", hint=hint)
    return tag


# --- one tag folder ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """The names in a tag folder, sorted by what they are."""

    root: Path
    folder: Path
    model: Path | None
    models: Mapping[int, Path]
    optims: Mapping[int, Path]

    @property
    def every_model(self) -> list[Path]:
        return [*([self.model] if self.model else []), *self.models.values()]


@dataclass(frozen=True)
class _ModelHead:
    """What a model-state file says of the run."""

    file: Path
    world_size: int
    step: int
    skipped: int
    version: str
    partitioned: bool
    bf16: bool


@dataclass(frozen=True)
class _OptimHead:
    """What an optimizer-state file says of the run."""

    file: Path
    stage: int
    world_size: int
    step: int | None
    swapped: bool


def _inspect(root: Path, tag: str, *, trust: bool) -> ZeroCheckpoint:
    files = _sort_names(root, root / tag)
    seen: dict[bytes, Any] = {}
    names = (*files.every_model, *files.optims.values())
    contents = {file: read(file, trust=trust, seen=seen) for file in names}
    models = [_model_head(file, root, contents[file]) for file in files.every_model]
    optims = [_optim_head(file, contents[file]) for file in files.optims.values()]
    sizes = [(head.file, head.world_size) for head in models] + [
        (head.file, head.world_size) for head in optims
    ]
    world_size = int(_agreed(sizes, "world size", root))
    stage = _stage(files, models, optims)
    universal = not optims and (files.folder / UNIVERSAL).is_dir()
    model_files = _complete_models(files, stage, world_size)
    bf16 = any(head.bf16 for head in models)
    optim_files = () if universal else _complete_optims(files, stage, world_size, bf16=bf16)
    step = _agreed([(head.file, head.step) for head in models], "global step", root)
    updates = _agreed([(head.file, head.step) for head in optims], "optimizer step", root)
    done = step - models[0].skipped
    if updates is not None and updates != done:
        logger.warning(
            "%s: the optimizer has made %d steps, the model file says %d: if files of two saves are mixed, "
            "the weights are wrong (consolidate and merge compare them with the run's own, if it has any)",
            *(root / tag, updates, done),
        )
    nvme = any(head.swapped for head in optims)
    found = ZeroCheckpoint(
        *(root, tag, stage, world_size, step, models[0].version, model_files, optim_files, nvme),
        universal=universal,
        doubtful=updates is not None and updates != done,
        trust=trust,
        contents=contents,
    )
    _check_swap_folders(found)
    return found


def _sort_names(root: Path, folder: Path) -> _Files:
    """Sort the names in a tag folder, refusing the kinds that hold other things than ZeRO partitions."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    for kind, pattern in _FOREIGN.items():
        if name := next(filter(pattern.fullmatch, names), None):
            raise _refuse_foreign(root, folder, kind, name)
    files = _Files(
        root,
        folder,
        next((folder / name for name in names if _MODEL.fullmatch(name)), None),
        _by_rank(folder, names, _MODEL_OF_RANK),
        _by_rank(folder, names, _OPTIM),
    )
    if files.model and files.models:
        one, other = files.model.name, next(iter(files.models.values())).name
        raise CheckpointError(
            f"{folder} holds both {one} (stages 0 to 2) and {other} (stage 3): two runs are mixed",
            hint=_other_hint(root),
        )
    if not files.every_model and not files.optims:
        if (folder / UNIVERSAL).is_dir():
            raise CheckpointError(
                f"{folder} is a universal checkpoint without its *_model_states.pt, which names its tensors",
                hint="copy them from the checkpoint that it was made from",
            )
        raise CheckpointError(
            f"{folder} holds no *_model_states.pt and no *_optim_states.pt", hint=_other_hint(root)
        )
    return files


def _by_rank(folder: Path, names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    """The files that `pattern` matches, by rank and in the order of ranks."""
    found: dict[int, Path] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            rank = int(match["rank"])
            if rank in found:
                raise CheckpointError(
                    f"{folder} holds {found[rank].name} and {name}, both of rank {rank}: two runs are mixed",
                    hint=f"keep the one whose date fits the other files: ls -l {typed(folder)}",
                )
            found[rank] = folder / name
    return dict(sorted(found.items()))


def _refuse_foreign(root: Path, folder: Path, kind: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder / name} is part of a {kind} checkpoint, which dstool cannot put together",
        hint=f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {typed(folder)} "
        f"--output_folder {typed(root / (folder.name + '_universal'))}",
    )


def _stage(files: _Files, models: list[_ModelHead], optims: list[_OptimHead]) -> int:
    """The ZeRO stage, from the optimizer files when there are any."""
    if optims and (odd := next((head.file for head in models if not head.partitioned), None)):
        raise CheckpointError(
            f"{odd} is of stage 0, but {optims[0].file.name} holds ZeRO partitions: two runs are mixed",
            hint=_other_hint(files.root),
        )
    if optims:
        return int(_agreed([(head.file, head.stage) for head in optims], "ZeRO stage", files.root))
    if files.models:
        return 3
    return 1 if models[0].partitioned else 0


def _complete_models(files: _Files, stage: int, world_size: int) -> tuple[Path, ...]:
    if stage == 3:
        known = files.models.get(next(iter(files.models), 0))
        name = known.name if known else "zero_pp_rank_0_mp_rank_00_model_states.pt"
        return _complete(files, files.models, world_size, name)
    if files.model is None:
        raise _missing(files, "mp_rank_00_model_states.pt", "the only file of names and shapes")
    return (files.model,)


def _complete_optims(files: _Files, stage: int, world_size: int, *, bf16: bool) -> tuple[Path, ...]:
    if stage == 0:
        return ()
    known = next(iter(files.optims.values()), None)
    name = known.name if known else f"{'bf16_' if bf16 else ''}zero_pp_rank_0_mp_rank_00_optim_states.pt"
    return _complete(files, files.optims, world_size, name)


def _complete(files: _Files, found: Mapping[int, Path], world_size: int, name: str) -> tuple[Path, ...]:
    """One file for each rank, no more and no less; `name` shows how they are called."""
    if lost := [rank for rank in range(world_size) if rank not in found]:
        absent = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{lost[0]}", name)
        more = ", ".join(map(str, lost[1:9])) + (" ..." if len(lost) > 9 else "")
        also = f"; those of {len(lost) - 1} more as well: {more}" if len(lost) > 1 else ""
        raise _missing(files, absent, f"rank {lost[0]} of {world_size}{also}")
    if surplus := [file for rank, file in found.items() if rank >= world_size]:
        raise CheckpointError(
            f"{surplus[0]} is there, but the run had only {ranks(world_size)}: two runs are mixed",
            hint=_other_hint(files.root),
        )
    return tuple(found[rank] for rank in range(world_size))


def _missing(files: _Files, name: str, what: str) -> CheckpointError:
    hint = _other_hint(files.root, "a rank saves to its own machine's disk: copy the missing file from there")
    return CheckpointError(f"{files.folder / name} is missing ({what})", hint=hint)


def _agreed(values: list[tuple[Path, Any]], what: str, root: Path) -> Any:
    """The one value that all files give; None when there are no files."""
    for file, value in values:
        first, expected = values[0]
        if value != expected:
            raise CheckpointError(
                f"{file} is of {what} {value}, but {first.name} of {expected}: files of two saves are mixed",
                hint=_other_hint(root),
            )
    return values[0][1] if values else None


def _check_swap_folders(checkpoint: ZeroCheckpoint) -> None:
    if checkpoint.nvme:
        for rank in range(checkpoint.world_size):
            if not (folder := checkpoint.swap_folder(rank)).is_dir():
                raise CheckpointError(
                    f"{folder} is missing, and the weights of rank {rank} (optimizer on NVMe) are only there",
                    hint=_other_hint(checkpoint.root, "copy it from the machine that ran this rank"),
                )


# --- reading a file without trusting it --------------------------------------------------------------


def read(file: Path, *, trust: bool = False, seen: dict[bytes, Any] | None = None) -> dict[str, Any]:
    """The content of a *_states.pt file, as `read_any` gives it.

    Raises:
        CheckpointError: as there, or it is no dictionary.
    """
    content = read_any(file, trust=trust, seen=seen)
    if not isinstance(content, dict):
        what = "an object" if isinstance(content, Inert) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{file} holds {what}, where a checkpoint has a dict: nothing of DeepSpeed's",
            hint=_other_hint(file.parent.parent),
        )
    return content


def read_any(file: Path, *, trust: bool = False, seen: dict[bytes, Any] | None = None) -> Any:
    """The content of a file of torch.save, with the place of its bytes for each tensor (`pickles.read`).

    Raises:
        CheckpointError: the file is missing, damaged, or asks for classes that no ZeRO checkpoint needs;
        names it.
    """
    try:
        size = file.stat().st_size
        if size == 0:
            raise _damaged(file, "is empty (0 bytes)")
        with file.open("rb") as stream:  # by its name, is_zipfile says no of one that may not be read
            is_zip = zipfile.is_zipfile(stream)
        if not is_zip:
            raise _damaged(file, f"is cut short or no file of torch.save ({size} bytes, no zip directory)")
        return pickles.read(file, trust=trust, seen=seen)
    except CheckpointError:
        raise
    except PermissionError as error:
        message, hint = refusal(error, file) or (str(error), None)
        raise CheckpointError(message, hint=hint) from error
    except MemoryError as error:
        raise _damaged(file, "cannot be read: it asks for more memory than there is") from error
    except Exception as error:  # whatever a broken pickle makes the unpickler do
        words = str(error).splitlines() or [type(error).__name__]
        raise _damaged(file, f"cannot be read: {words[0]}") from error


def _said(error: Exception) -> str:
    """The type and the first words of an error, in one line."""
    return " ".join(repr(error).split())[:200]


def _damaged(file: Path, what: str) -> CheckpointError:
    hint = _other_hint(
        file.parent.parent, "the save was interrupted or the disk was full: copy the file again"
    )
    return CheckpointError(f"{file} {what}", hint=hint)


def _model_head(file: Path, root: Path, content: Mapping[str, Any]) -> _ModelHead:
    try:
        module, shapes, _, _ = (content[key] for key in _MODEL_KEYS)
        head = _ModelHead(
            file,
            int(content["dp_world_size"]),
            int(content["global_steps"]),
            int(content.get("skipped_steps", 0)),
            str(content.get("ds_version", "unknown")).strip(),
            shapes is not None,
            any(getattr(value, "dtype", None) == "BF16" for value in module.values()),
        )
    except MALFORMED as error:
        raise _damaged(file, f"is no model-state file of DeepSpeed's ({_said(error)})") from error
    if head.world_size < 1:
        raise _damaged(file, f"is of a run of {head.world_size} ranks")
    if content.get("ds_autoep_layers") or content.get("autoep_layers"):
        raise _refuse_foreign(root, file.parent, "mixture-of-experts", file.name)
    if content.get("mp_world_size") not in (None, 0, 1):
        raise _refuse_foreign(root, file.parent, "tensor-parallel", file.name)
    return head


def _optim_head(file: Path, content: Mapping[str, Any]) -> _OptimHead:
    """What an optimizer file says. `BF16_Optimizer` (runtime/bf16_optimizer.py) is stage 1 and does not."""
    try:
        state = content["optimizer_state_dict"]
        stage = int(state["zero_stage"]) if "zero_stage" in state else 1
        count = state["partition_count"]
        groups = state[fp32_groups_key(stage)]
        swapped = stage == 3 and any(group.numel() == 0 for group in groups)
        world_size = max(count) if isinstance(count, list) else int(count)
        return _OptimHead(file, stage, world_size, _optimizer_step(state), swapped)
    except MALFORMED as error:
        raise _damaged(file, f"is no ZeRO optimizer file ({_said(error)})") from error


def partition_numel(shapes: Mapping[str, Any], world_size: int) -> int:
    """Elements of one rank's flat partition at stage 3 (zero/partition_parameters.py: ceil, padded)."""
    return sum(ceil(Shape(shape).numel() / world_size) for shape in shapes.values())


def fp32_groups_key(stage: int) -> str:
    """Where an optimizer file keeps its partitions of the fp32 masters (utils/zero_to_fp32.py)."""
    return "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"


def _optimizer_step(state: Mapping[str, Any]) -> int | None:
    """The number of updates made, wherever this optimizer keeps it; None when nowhere."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = base.get("param_groups", []) if isinstance(base, Mapping) else []
    states = base.get("state", {}).values() if isinstance(base, Mapping) else base or []
    places = [state, *groups, *states]
    keys = ("base_optimizer_state_step", "step")
    steps = [place[key] for place in places if isinstance(place, Mapping) for key in keys if key in place]
    return max((int(step) for step in steps), default=None)


# --- errors that say what to type next ----------------------------------------------------------------


def _other_hint(root: Path, otherwise: str = "save the checkpoint again, or copy it again as a whole") -> str:
    """An earlier checkpoint-N to take instead of `root`, or `otherwise`."""
    match = _RUN_CHECKPOINT.fullmatch(root.name)
    if match and root.parent.is_dir():
        earlier = [
            candidate
            for candidate in _run_checkpoints(root.parent)
            if int(candidate.name.removeprefix("checkpoint-")) < int(match[1]) and _is_root(candidate)
        ]
        if earlier:
            return f"an earlier checkpoint exists: dstool consolidate {typed(earlier[0])}"
    return otherwise


def _not_a_folder(path: Path) -> CheckpointError:
    if path.exists():
        return CheckpointError(
            f"{path} is a file", hint=f"name its folder: dstool consolidate {typed(path.parent)}"
        )
    near = [entry for entry in path.parent.iterdir() if is_zero(entry)] if path.parent.is_dir() else []
    names = ", ".join(typed(entry) for entry in sorted(near, key=_natural))
    return CheckpointError(f"{path} does not exist", hint=f"there is {names}" if near else "check the path")


def _nothing_in(path: Path) -> CheckpointError:
    looked = f"`{LATEST}`, global_step*/ and checkpoint-*/"
    adapter = None if plain_weights(path) else adapter_file(path)
    if weights := adapter.name if adapter else plain_weights(path):
        return CheckpointError(
            f"{path} holds {weights} and no ZeRO state ({looked}): these are already plain weights",
            hint="peft loads an adapter as it is" if adapter else _merge(path),
        )
    inside = sorted((entry for entry in path.iterdir() if is_zero(entry)), key=_natural)
    adapters = sorted(entry for entry in path.iterdir() if entry.is_dir() and adapter_file(entry))
    hint = "name the checkpoint-N folder that the run wrote"
    if others := inside or adapters:
        hint = f"dstool consolidate {typed(inside[-1])}" if inside else _merge(adapters[-1])
    also = f"; there is {', '.join(map(str, others))}" if len(others) > 1 else ""
    return CheckpointError(f"no ZeRO checkpoint in {path}: looked for {looked}{also}", hint=hint)


def _merge(folder: Path) -> str:
    return f"dstool merge --input-dir {typed(folder)} --output-dir DIR"
