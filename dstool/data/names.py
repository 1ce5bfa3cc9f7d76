"""What a data set's name in the run file means: a path here, a bundled sample, or a name on the hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from dstool.data.files import FORMATS, find_files
from dstool.errors import DataError

SAMPLE_SCHEME = "sample:"


def looks_local(spec: str) -> bool:
    """Whether `spec` is meant as a path, rather than as the name of a data set on the hub."""
    path = Path(spec)
    return (
        path.exists()
        or path.suffix.lower() in FORMATS
        or path.is_absolute()
        or bool(re.search(r"[*?\[\\]|^[.~]", spec))
    )


def sample_file(name: str) -> Path:
    """The file behind `sample:NAME`, which comes with dstool.

    Raises:
        DataError: there is none of that name; says which there are.
    """
    folder = Path(str(resources.files("dstool"))) / "sample"
    path = folder / f"{name.removeprefix(SAMPLE_SCHEME)}.csv"
    if not path.is_file():
        known = ", ".join(sorted(f"{SAMPLE_SCHEME}{file.stem}" for file in folder.glob("*.csv")))
        raise DataError(f"{name}: no such sample", hint=f"there are {known}")
    return path


def local_files(spec: str | list[str] | None) -> list[Path]:
    """The files that `spec` names here; none for the name of a hub data set.

    Raises:
        DataError: `spec` is meant as a path, and there is no data file.
    """
    if spec is None or (isinstance(spec, str) and not (looks_local(spec) or spec.startswith(SAMPLE_SCHEME))):
        return []
    if isinstance(spec, str) and spec.startswith(SAMPLE_SCHEME):
        return [sample_file(spec)]
    return find_files(spec)
