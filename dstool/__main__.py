"""`python -m dstool`, and `python dstool`, which is what `deepspeed dstool train` runs."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

if not __package__:
    # Python put this very folder on sys.path, where `import data` would find dstool's own modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _PACKAGE]
    sys.path.insert(0, str(_PACKAGE.parent))


def main() -> None:
    """Run the command line."""
    from dstool.cli import app

    app(prog_name="dstool")


if __name__ == "__main__":
    main()
