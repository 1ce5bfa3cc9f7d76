"""dstool consolidate against DeepSpeed's own zero_to_fp32.py, on checkpoints that two ranks have trained.

    python scripts/bench_consolidate.py [--folder FOLDER] [--layers 40] [--rounds 5] [--stages 2 3]

Makes the checkpoints that FOLDER lacks (about 8 GB a stage, and half of that again), runs both sides in turn,
and prints the medians, one line per row. The files are in the page cache on both sides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from dstool.launch import free_port

WIDTH, VOCABULARY, RANKS = 1024, 32_000, 2


class Run(NamedTuple):
    """What one process took."""

    seconds: float
    peak: float
    """Bytes resident at the most, anonymous and of files."""


def main() -> None:
    """Make the checkpoints, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path("bench-consolidate"))
    parser.add_argument("--layers", type=int, default=40, help="40 are 0.57 B parameters, 2.3 GB in fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--train", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.folder, *given.train)
        return
    for stage in given.stages:
        whole = made(given.folder, stage, given.layers)
        half = made(given.folder, stage, given.layers // 2)
        compare(stage, whole, half, given.folder / "out", given.rounds)


# --- the checkpoints ---------------------------------------------------------------------------------------


def made(folder: Path, stage: int, layers: int) -> Path:
    """The checkpoint of that stage and size, made now where it is not there."""
    home = folder / f"stage{stage}-{layers}"
    if not (home / "latest").is_file():
        home.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS)]
        argv = [*launcher, "--master_port", str(free_port()), __file__, "--folder", str(home)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with (home / "log.txt").open("wb") as log:
            subprocess.run(
                [*argv, "--train", str(stage), str(layers)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
    return home


def train(home: Path, stage: int, layers: int) -> None:
    """One real step of AdamW in bf16, in this rank, and its checkpoint."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=ds)
    ids = torch.randint(VOCABULARY, (1, 8))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(str(home))


# --- the comparison ----------------------------------------------------------------------------------------

COPYING = """
import sys, time
from pathlib import Path
from dstool.checkpoint import reader, writer
weights, out = reader.open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2])
out.mkdir()
started = time.monotonic()
writer.write_weights(weights, out, dtype="F32", max_shard_size="99GB")
print(time.monotonic() - started)
"""
CAST = """
import os, sys
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
state = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])
os.makedirs(sys.argv[2])
state = {name: value.to(torch.bfloat16) for name, value in state.items()}
save_file(state, sys.argv[2] + "/model.safetensors")
"""


def compare(stage: int, whole: Path, half: Path, out: Path, rounds: int) -> None:
    """Print the table's rows for one stage."""
    runs: dict[str, list[Run]] = {}
    size = 0
    for _ in range(rounds):
        for name, argv in sides(whole, half, out).items():
            shutil.rmtree(out, ignore_errors=True)
            runs.setdefault(name, []).append(timed(argv))
            if name == "copying":
                size = sum(file.stat().st_size for file in out.iterdir())
                runs.setdefault("cp", []).append(copied(out))
    shutil.rmtree(out, ignore_errors=True)
    seconds = {name: statistics.median(run.seconds for run in each) for name, each in runs.items()}
    peaks = {name: statistics.median(run.peak for run in each) / 1e6 for name, each in runs.items()}
    best = min((".bin", ".safetensors"), key=lambda name: seconds[name])
    print(f"stage {stage}, {RANKS} ranks, {size / 1e9:.2f} GB of fp32 output, medians of {rounds}")
    row("whole process, s", seconds["fp32"], f"zero_to_fp32.py to {best}", seconds[best])
    row("copying phase, s", seconds["copying"], "cp of the result", seconds["cp"])
    row("peak memory, MB", peaks["fp32"], f"zero_to_fp32.py to {best}", peaks[best])
    row("peak memory, MB", peaks["fp32"], "itself at half the size", peaks["half"])
    row("to bf16, s", seconds["bf16"], "DeepSpeed's functions and a cast", seconds["cast"])


def row(what: str, ours: float, against: str, theirs: float) -> None:
    """One line: both medians, and how many times ours goes into theirs."""
    print(f"  {what:<18} {ours:8.2f}   {against:<34} {theirs:8.2f}   ratio {theirs / ours:.2f}", flush=True)


def sides(whole: Path, half: Path, out: Path) -> dict[str, list[str]]:
    """The commands that are compared; each writes into `out`."""
    one_file = ["--max_shard_size", "99GB"]
    ours = [sys.executable, "-m", "dstool", "consolidate", "-o", str(out), *one_file]
    script = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(whole), str(out), *one_file]
    return {
        ".bin": script,
        ".safetensors": [*script, "--safe_serialization"],
        "cast": [sys.executable, "-c", CAST, str(whole), str(out)],
        "half": [*ours, str(half)],
        "fp32": [*ours, str(whole)],
        "copying": [sys.executable, "-c", COPYING, str(whole), str(out)],
        "bf16": [*ours, str(whole), "--dtype", "bf16"],
    }


def timed(argv: list[str]) -> Run:
    """Run a command to its end; its time, or that which it prints alone, and the peak of its memory."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    started = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0), errors.seek(0)
        if process.returncode:
            said = errors.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}:\n{said}")
        if COPYING in argv:
            seconds = float(output.read())
    return Run(seconds, usage.ru_maxrss * 1024)


def copied(out: Path) -> Run:
    """cp of what is in `out`."""
    target = out.with_name("cp")
    run = timed(["cp", "-r", str(out), str(target)])
    shutil.rmtree(target)
    return run


if __name__ == "__main__":
    main()
