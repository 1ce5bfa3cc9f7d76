"""Write the two files that a run starts from: the DeepSpeed JSON and the run file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from dstool import files
from dstool.config import RUN_FILE, Task, scalar
from dstool.ds_config.build import Options, build, dumps
from dstool.errors import ConfigError

logger = logging.getLogger("dstool.init_config")

LOCAL_NVME = Path("/local_nvme")
SAMPLE = "sample:reviews_en"


@dataclass(frozen=True)
class InitResult:
    """The files that were written, and those that were there and stay as they are."""

    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    nvme_path: Path | None


def init_config(
    options: Options,
    output: Path = Path("ds_config.json"),
    *,
    run_file: Path = Path(RUN_FILE),
    model: str | None = None,
    data: str | None = None,
    task: Task = "text-classification",
    force: bool = False,
) -> InitResult:
    """Write the DeepSpeed JSON to `output` and, where there is none, a run file that names it.

    Raises:
        ConfigError: options that contradict each other, or a file that exists.
    """
    if output.resolve() == run_file.resolve():
        raise ConfigError(f"{output} is the run file", hint="choose another --output, such as ds_config.json")
    options = with_nvme_path(options, run_file.parent)
    text = dumps(build(options))
    files.refuse_existing(output, force=force)
    keep = run_file.exists() and not force
    if keep and (model or data):
        raise ConfigError(
            f"{run_file} exists, and --model and --data are for a new one", hint="--force overwrites it"
        )
    files.write_text(output, text)
    if not keep:
        here = os.path.relpath(output, run_file.parent)
        files.write_text(run_file, run_file_text(here, options, model=model, data=data, task=task))
    written = (output,) if keep else (output, run_file)
    nvme = Path(options.nvme_path) if options.nvme_path else None
    return InitResult(tuple(p.resolve() for p in written), (run_file.resolve(),) if keep else (), nvme)


def with_nvme_path(options: Options, folder: Path) -> Options:
    """`options` with a place on the NVMe, where the offload needs one: /local_nvme, or else in `folder`."""
    if options.offload != "nvme" or options.nvme_path is not None or options.stage < 3:
        return options  # below stage 3 `build` refuses it
    if LOCAL_NVME.is_dir() and os.access(LOCAL_NVME, os.W_OK):
        return replace(options, nvme_path=str(LOCAL_NVME))
    path = folder.resolve() / "nvme_offload"
    logger.info("nvme_path: %s, as there is no %s to write to (--nvme-path names another)", path, LOCAL_NVME)
    return replace(options, nvme_path=str(path))


def run_file_text(
    json_path: str, options: Options, *, model: str | None, data: str | None, task: Task
) -> str:
    """A run file with a comment on every line: for `model` and `data`, or runnable on the bundled sample."""
    other = "causal-lm" if task == "text-classification" else "text-classification"
    lines = [
        ("model:", "what is trained"),
        (f"  task: {task}", f"or {other}"),
        *(
            ((f"  name: {scalar(model)}", "a folder, or a name on the Hugging Face hub"),)
            if model
            else _SCRATCH[task]
        ),
        *_data_lines(data, task),
        *_train_lines(model is not None, options),
        (f"deepspeed: {scalar(json_path)}", "the DeepSpeed JSON: a path, or the same mapping written here"),
    ]
    return _HEAD + "".join(_line(text, comment) for text, comment in lines)


def _line(text: str, comment: str) -> str:
    blank = "" if text.startswith(" ") else "\n"
    return f"{blank}{text:<32} # {comment}\n"


_HEAD = """\
# The run file of dstool: train, consolidate, merge and infer all read it.
# Each key can be given on the command line as well: dstool train train.learning_rate=1e-4
# What a run would use, and where each value is from: dstool train --show-config
"""

_SIZES = (
    ("    vocab_size: 2000", "its tokenizer is trained on the data, up to this size"),
    ("    hidden_size: 128", "the width of a layer"),
    ("    num_hidden_layers: 2", "the layers"),
    ("    num_attention_heads: 4", "the heads in each"),
    ("    intermediate_size: 256", "the width inside a feed-forward block"),
    ("    max_position_embeddings: 128", "the longest text, in tokens"),
)
_SCRATCH = {
    task: (
        ("  from_scratch:", "a small model with random weights, to try everything at once;"),
        (f"    model_type: {kind}", "for a real one, name: FOLDER_OR_HUB_NAME in place of this block"),
        *_SIZES,
    )
    for task, kind in (("text-classification", "bert"), ("causal-lm", "llama"))
}


def _data_lines(data: str | None, task: Task) -> list[tuple[str, str]]:
    last = {
        "text-classification": ("  label_column: label", "the column with the label: words or whole numbers"),
        "causal-lm": ("  block_size: 128", "tokens in a block; texts are packed end to end"),
    }
    return [
        ("data:", "the text"),
        (
            f"  train: {scalar(data or SAMPLE)}",
            "csv, tsv, jsonl, parquet, txt: file, folder, glob or hub name",
        ),
        ("  eval_split: 0.2", "the part that is held out; or name a file: eval: valid.csv"),
        ("  text_column: text", "the column with the text"),
        last[task],
    ]


def _train_lines(real_model: bool, options: Options) -> list[tuple[str, str]]:
    own_scheduler = [("  lr_scheduler_type: linear", "the course of the learning rate")]
    return [
        ("train:", "every field of transformers.TrainingArguments, by its name"),
        ("  output_dir: out", "checkpoints, the final model and the run's settings go here"),
        ("  num_train_epochs: 1", "passes over the data"),
        ("  per_device_train_batch_size: 8", "rows per rank and step"),
        (
            f"  learning_rate: {'5e-5' if real_model else '1e-3'}",
            "fills the JSON's `auto` values, like the rest",
        ),
        ("  warmup_steps: 0.1", "steps until the full rate; below 1 it is a share of all steps"),
        *(own_scheduler if options.scheduler == "none" else []),
        ("  save_strategy: epoch", "when to write a checkpoint: epoch, steps or no"),
        (
            f"  save_first_step: {'false' if real_model else 'true'}",
            "whether to write one after the first step too",
        ),
        ("  save_fp32: false", "whether to leave the fp32 weights as well, in out/fp32"),
    ]
