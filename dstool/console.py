"""What a command shows: its result on stdout, as text or as one JSON object; all else on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstool import log
from dstool.errors import DstoolError

_UNITS = ("B", "kB", "MB", "GB", "TB")


class Console:
    """The one way in which commands talk. `as_json` is set by each command's `--json`."""

    as_json = False

    def result(self, title: str, result: Any, *, next_command: str | None = None) -> None:
        """Show a frozen dataclass (or the mapping of one): a heading with a line for each field."""
        values = dict(result) if isinstance(result, Mapping) else dataclasses.asdict(result)
        if self.as_json:
            self._print(json.dumps(plain(values), ensure_ascii=False, allow_nan=False))
            return
        self._print(title)
        units = _units(result)
        shown = {name: _readable(value, units.get(name)) for name, value in values.items()}
        width = max(len(name) for name in shown)
        for name, text in shown.items():
            if text:
                self._print(f"  {name.replace('_', ' '):<{width}}  {text}")
        if next_command:
            self._print(f"  {'next':<{width}}  {next_command}")

    def text(self, text: str) -> None:
        """Show `text` as the result."""
        self._print(text)

    def error(self, error: DstoolError) -> None:
        """Show a failure on stderr: what and where, then the next thing to type."""
        prefix = f"[rank {log.rank()}] " if log.rank() else ""
        print(f"{prefix}error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"{prefix}try: {error.hint}", file=sys.stderr)
        sys.stderr.flush()

    @contextlib.contextmanager
    def guard_stdout(self) -> Iterator[None]:
        """Take file descriptor 1 away meanwhile: DeepSpeed and its children write to it at will.

        What they say goes nowhere, or to stderr with `DSTOOL_DEBUG=1`.
        """
        sys.stdout.flush()
        saved = os.dup(1)
        elsewhere = os.dup(2) if log.debug() else os.open(os.devnull, os.O_WRONLY)
        os.dup2(elsewhere, 1)
        os.close(elsewhere)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)

    def _print(self, text: str) -> None:
        # A terminal of another encoding shows what it cannot write as an escape, which JSON reads back.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


class BytesProgress:
    """A bar with bytes per second, on a terminal alone. On stderr."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes are written."""
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich import progress
            from rich.console import Console as RichConsole

            columns = (
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
            )
            self._bar = progress.Progress(*columns, console=RichConsole(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class StepProgress:
    """A bar on a terminal, and in a log one plain line for every note. On stderr."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int, note: str) -> None:
        """`done` of `total` steps are finished; `note` says what was logged, or nothing."""
        if sys.stderr.isatty():
            self._draw(done, total, note)
        elif note:
            print(f"step {done}/{total}  {note}", file=sys.stderr, flush=True)

    def _draw(self, done: int, total: int, note: str) -> None:
        if self._bar is None:
            from rich import progress
            from rich.console import Console as RichConsole

            columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
            text = progress.TextColumn("{task.description}")
            self._bar = progress.Progress(*columns, text, console=RichConsole(stderr=True))
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, **({"description": note} if note else {}))
        if done >= total:
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def human_bytes(count: float) -> str:
    """`1536` as `1.5 kB`; powers of 1000."""
    power = 0
    while round(count / 1000**power, 1 if power else 0) >= 1000 and power < len(_UNITS) - 1:
        power += 1
    return f"{count / 1000**power:.{1 if power else 0}f} {_UNITS[power]}"


def _units(result: Any) -> dict[str, str]:
    if not dataclasses.is_dataclass(result):
        return {"bytes": "bytes", "seconds": "seconds"}
    return {
        field.name: field.metadata["unit"] for field in dataclasses.fields(result) if "unit" in field.metadata
    }


def _readable(value: Any, unit: str | None) -> str:
    if unit == "json":  # of which a reader would want the few lines around it
        return ""
    if unit == "bytes":
        return human_bytes(value)
    if unit == "seconds":
        return f"{value:.1f} s"
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {_readable(item, None)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_readable(item, None) for item in value)
    return _word(value)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else _near(value) if isinstance(value, Path) else str(value)


def _near(path: Path) -> str:
    """`path` as one would type it here: relative, where it lies below the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def plain(value: Any) -> Any:
    """`value` as JSON has it: absolute paths as text, and no NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value.absolute()) if isinstance(value, Path) else value
