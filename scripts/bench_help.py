"""How long `dstool --help` takes, against a typer program with two empty commands.

Both start in turn, so that what else the machine does meets both alike; the ratio is that of the medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 30
EMPTY = '''
import typer

app = typer.Typer()


@app.command()
def first() -> None:
    """The one."""


@app.command()
def second() -> None:
    """The other."""


app()
'''


def main() -> None:
    """Print the median of each, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.py")
        empty.write_text(EMPTY, encoding="utf-8")
        programs = {
            "typer": [sys.executable, str(empty), "--help"],
            "dstool": [sys.executable, "-m", "dstool", "--help"],
        }
        taken: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(ROUNDS):
            for name, argv in programs.items():
                taken[name].append(seconds(argv))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, median in medians.items():
        print(f"{name:<7} {median * 1000:6.0f} ms (of {ROUNDS}, fastest {min(taken[name]) * 1000:.0f} ms)")
    print(f"ratio   {medians['dstool'] / medians['typer']:6.2f}")


def seconds(argv: list[str]) -> float:
    """The wall-clock time of one start."""
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
