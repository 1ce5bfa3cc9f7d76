"""Every failure that dstool expects, with the exit code it ends in.

    DstoolError                 1   never raised itself
    ├── RankCrashed             1   a bug, in a process that was launched
    ├── ConfigError             2   a bad run file, DeepSpeed JSON or flag
    ├── InputError              3   what the user gave is missing or broken
    │   ├── ModelError
    │   ├── DataError
    │   └── CheckpointError
    ├── EnvironmentUnfit        4   this machine cannot do it
    │   ├── MissingDependency
    │   └── NoDevice
    └── RunFailed               5   a started run died
        ├── RankFailed
        └── NonFiniteLoss

Anything else that reaches the command line is a bug: it shows its traceback and exits 1.
"""

from __future__ import annotations

from typing import ClassVar


class DstoolError(Exception):
    """What went wrong and where, in one line, and in `hint` the next thing to type."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RankCrashed(DstoolError):
    """One of the launched processes met a bug, whose traceback it has shown."""


class ConfigError(DstoolError):
    """A run file, DeepSpeed JSON or flag that cannot be used."""

    exit_code = 2


class InputError(DstoolError):
    """Something the user named is missing or broken."""

    exit_code = 3


class ModelError(InputError):
    """A model or tokenizer that cannot be loaded, or does not fit the task."""


class DataError(InputError):
    """A data file that is missing, empty, or has a row that cannot be used."""


class CheckpointError(InputError):
    """A checkpoint that is missing, incomplete or of a kind that cannot be read."""


class EnvironmentUnfit(DstoolError):
    """This machine, or what is installed on it, cannot do what was asked."""

    exit_code = 4


class MissingDependency(EnvironmentUnfit):
    """A package, compiler or system library that the run needs is not installed."""


class NoDevice(EnvironmentUnfit):
    """The accelerator, or the number of them, that was asked for is not there."""


class RunFailed(DstoolError):
    """A run that had started ended before its time."""

    exit_code = 5


class RankFailed(RunFailed):
    """One of the launched processes died."""


class NonFiniteLoss(RunFailed):
    """The loss became NaN or infinite."""


def by_name(name: str) -> type[DstoolError]:
    """The error class called `name`; `RunFailed` when there is none.

    A rank reports its failure to the process that launched it under the class's name.
    """
    known = {cls.__name__: cls for cls in _descendants(DstoolError)}
    return known.get(name, RunFailed)


def _descendants(cls: type[DstoolError]) -> list[type[DstoolError]]:
    return [cls, *(deep for sub in cls.__subclasses__() for deep in _descendants(sub))]
