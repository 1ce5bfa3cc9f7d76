"""Check the DeepSpeed JSON before it costs an hour, and mend what can be mended."""

from __future__ import annotations

import difflib
import logging
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dstool import config as run_file
from dstool import files, machine, preflight
from dstool.ds_config import check as ds_check
from dstool.ds_config import read, source
from dstool.ds_config.check import Finding
from dstool.ds_config.looks import Circumstances
from dstool.errors import ConfigError

logger = logging.getLogger("dstool.check")

DS_CONFIG = "ds_config.json"


@dataclass(frozen=True)
class CheckResult:
    """What is wrong with the JSON, and the mends that were made, as a difference of the two texts.

    `file` is the run file where the JSON is written into that.
    """

    file: Path
    errors: int
    warnings: int
    findings: tuple[Finding, ...]
    mended: tuple[Finding, ...] = ()
    difference: str = ""
    lines: tuple[str, ...] = ()
    """The text of the line of each finding; empty where there is none."""


def check(
    path: Path | None = None,
    *,
    config: Path | None = None,
    world_size: int | None = None,
    fix: bool = False,
) -> CheckResult:
    """Check the JSON at `path`, or the one that the run file names.

    Args:
        path: the JSON; by default that of the run file, or else ds_config.json.
        config: the run file; by default dstool.yaml, which has a say when it names the JSON at `path`.
        world_size: the number of ranks; None where it is not known.
        fix: whether every mend that cannot change the meaning is made, in the file.

    Raises:
        ConfigError: no such file, or a run file that cannot be read.
    """
    loaded = _loaded(path, config)
    target = path or Path(DS_CONFIG)
    around = Circumstances(world_size=world_size)
    if loaded is not None:
        around = preflight.circumstances(loaded.config, world_size=world_size)
        if path is None and isinstance(loaded.config.deepspeed, Mapping):
            return _check_inline(loaded, around, fix=fix)
        target = path or Path(loaded.config.deepspeed or DS_CONFIG)  # type: ignore[arg-type]
    regular = _is_regular(target, fix=fix)
    text = read.text_of(target)
    around = replace(_on_this_machine(source.parse(text), around), file=str(target) if regular else "")
    fixed = ds_check.Fixed(text, ())
    if fix:
        fixed = ds_check.fix(text, around)
        if fixed.text != text:
            files.write_text(target, fixed.text)
    return _result(target, source.parse(fixed.text), around, fixed, _difference(text, fixed.text, target))


def _is_regular(target: Path, *, fix: bool) -> bool:
    """Whether `target` is a file that can be written anew, unlike a pipe or a device; refused with `fix`."""
    try:
        mode = target.stat().st_mode
    except (OSError, ValueError):
        if str(target) == "-":
            hint = "dstool check /dev/stdin reads what is piped to it"
            raise ConfigError("-: a path is expected", hint=hint) from None
        return True  # who reads it says what is wrong
    special = not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    if special and fix:
        raise ConfigError(
            f"{target}: no regular file, which --fix cannot mend",
            hint=f"dstool check {files.typed(target)} shows what is wrong",
        )
    return not special


def _loaded(path: Path | None, config: Path | None) -> run_file.Loaded | None:
    """The run file that the JSON belongs to."""
    if config is None and path is None:
        loaded = run_file.load(required=False)
        if loaded.path is None and not Path(DS_CONFIG).is_file():
            raise ConfigError(
                f"neither {run_file.RUN_FILE} nor {DS_CONFIG} is here", hint="dstool init-config"
            )
        return loaded if loaded.path is not None else None
    if config is not None:
        return run_file.load(config)
    if not Path(run_file.RUN_FILE).is_file():
        return None
    loaded = run_file.load()
    named = loaded.config.deepspeed
    same = isinstance(named, str) and path is not None and Path(named).resolve() == path.resolve()
    if not same:
        names = named if isinstance(named, str) else "another JSON"
        logger.info("%s was not compared with %s, which names %s", path, loaded.path, names)
    return loaded if same else None


def _check_inline(loaded: run_file.Loaded, around: Circumstances, *, fix: bool) -> CheckResult:
    """The JSON that is written into the run file, whose lines are those of the findings."""
    place = loaded.path or Path(run_file.RUN_FILE)
    if fix:
        raise ConfigError(
            f"the DeepSpeed JSON is written in {place}, which --fix leaves alone",
            hint=f"dstool check shows what to correct in {place}",
        )
    parsed = source.of_value(loaded.config.deepspeed)
    around = _on_this_machine(parsed, around)
    result = _result(place, parsed, around, ds_check.Fixed("", ()), "")
    findings = tuple(_of_run_file(each, loaded.sources) for each in result.findings)
    return replace(result, findings=findings, lines=("",) * len(findings))


def _of_run_file(finding: Finding, sources: Mapping[str, str]) -> Finding:
    """The finding with its line in the run file, which has no edits."""
    key = f"deepspeed.{finding.path}"
    while key not in sources and "." in key:
        key = key.rpartition(".")[0]
    line = sources.get(key, "").rpartition(":")[2]
    return replace(finding, line=int(line) if line.isdecimal() else None, column=None, edit=())


def _on_this_machine(parsed: source.Source, around: Circumstances) -> Circumstances:
    ds = parsed.value if isinstance(parsed.value, dict) else {}
    return replace(around, machine=machine.look(ds))


def _result(
    file: Path, parsed: source.Source, around: Circumstances, fixed: ds_check.Fixed, difference: str
) -> CheckResult:
    findings = ds_check.check(parsed, around)
    if not around.file:  # where nothing can be written, no mend is offered
        findings = tuple(replace(each, edit=()) for each in findings)
    errors = sum(each.severity == "error" for each in findings)
    lines = tuple(parsed.line(each.line) if each.line else "" for each in findings)
    return CheckResult(
        file, errors, len(findings) - errors, findings, fixed.mended, difference, tuple(map(_shown, lines))
    )


def _shown(line: str) -> str:
    return "".join(char if char.isprintable() else " " for char in line)


def _difference(before: str, after: str, file: Path) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(file), f"{file} mended", lineterm=""
    )
    return "\n".join(lines)


def report(result: CheckResult, name: str, command: str = "dstool check --fix") -> Iterator[str]:
    """The lines that a terminal shows: the difference, each finding with a caret, and the sum.

    `command` is what one types to have the same file mended.
    """
    if result.difference:
        yield from map(_shown, result.difference.split("\n"))
        yield ""
    for finding, line in zip(result.findings, result.lines, strict=True):
        yield from _finding(finding, line, name)
        yield ""
    yield _sum(result, name, command)


def _finding(finding: Finding, line: str, name: str) -> Iterator[str]:
    place = ":".join(str(part) for part in (name, finding.line, finding.column) if part)
    key = f" in {finding.path}" if finding.path else ""
    yield f"{place}: {finding.severity}{key}: {finding.problem}"
    if line.strip() and finding.column:
        shown, column = _window(line, finding.column)
        yield f"    {shown}"
        yield f"    {' ' * (column - 1)}^"
    yield f"  if left: {finding.consequence}"
    yield f"  mend: {finding.mend}{' (--fix does it)' if finding.edit else ''}"


def _window(line: str, column: int, width: int = 100) -> tuple[str, int]:
    """The part of a long line around a column, and the column in it."""
    start = max(0, min(column - width // 2, len(line) - width)) if len(line) > width else 0
    return line[start : start + width], column - start


def _sum(result: CheckResult, name: str, command: str) -> str:
    counts = [(len(result.mended), "mend"), (result.errors, "error"), (result.warnings, "warning")]
    said = [f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count]
    open_ = sum(bool(each.edit) for each in result.findings)
    more = f"; {command} mends {open_}" if open_ else ""
    return f"{name}: {', '.join(said) or 'nothing is wrong'}{more}"
