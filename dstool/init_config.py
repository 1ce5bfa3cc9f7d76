"""Write the two files that a run starts from: the DeepSpeed JSON and the run file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from dstool import files
from dstool.config import RUN_FILE, Task
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
    if options.offload != "nvme" or options.nvme_path is not None:
        return options
    if LOCAL_NVME.is_dir() and os.access(LOCAL_NVME, os.W_OK):
        return replace(options, nvme_path=str(LOCAL_NVME))
    path = folder.resolve() / "nvme_offload"
    logger.info("nvme_path: %s, as there is no %s to write to (--nvme-path names another)", path, LOCAL_NVME)
    return replace(options, nvme_path=str(path))


def run_file_text(
    json_path: str, options: Options, *, model: str | None, data: str | None, task: Task
) -> str:
    """A run file with a comment on every line: for `model` and `data`, or runnable on the bundled sample."""
    parts = [
        _HEAD,
        _model_text(model, task),
        _data_text(data, task),
        _train_text(model is not None, options),
        _TAIL,
    ]
    return "\n".join(parts).replace("DS_CONFIG", json_path)


_HEAD = """\
# The run file of dstool: train, consolidate, merge and infer all read it.
# Each key can be given on the command line as well: dstool train train.learning_rate=1e-4
# What a run would use, and where each value is from: dstool train --show-config
"""

_SCRATCH = {
    "text-classification": """\
  from_scratch:                  # a small model with random weights, to try everything at once; delete
    model_type: bert             #   these lines and write   name: FOLDER_OR_HUB_NAME   for a real one
    vocab_size: 2000             #   (its tokenizer is trained on the data, up to this size)
    hidden_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    intermediate_size: 256
    max_position_embeddings: 128""",
    "causal-lm": """\
  from_scratch:                  # a small model with random weights, to try everything at once; delete
    model_type: llama            #   these lines and write   name: FOLDER_OR_HUB_NAME   for a real one
    vocab_size: 2000             #   (its tokenizer is trained on the data, up to this size)
    hidden_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    intermediate_size: 256
    max_position_embeddings: 256""",
}


def _model_text(model: str | None, task: Task) -> str:
    other = "causal-lm" if task == "text-classification" else "text-classification"
    body = (
        f"  name: {_quoted(model):<25}# a folder, or a name on the Hugging Face hub"
        if model
        else _SCRATCH[task]
    )
    return f"model:\n  task: {task:<25}# or {other}\n{body}\n"


def _data_text(data: str | None, task: Task) -> str:
    label = "  label_column: label            # the column with the label: words or whole numbers\n"
    size = "  block_size: 128                # tokens in a block; texts are packed end to end\n"
    return (
        "data:\n"
        f"  train: {_quoted(data or SAMPLE):<24}# csv, tsv, jsonl, parquet or txt: a file, folder, glob or hub name\n"
        "  eval_split: 0.2                # the part held out for evaluation; or name files: eval: valid.csv\n"
        "  text_column: text              # the column with the text\n"
        f"{label if task == 'text-classification' else size}"
    )


def _train_text(real_model: bool, options: Options) -> str:
    rate = "2e-5 " if real_model else "1e-3 "
    first = (
        "  save_first_step: false         # true: also a checkpoint after the first step, to see that saving works\n"
        if real_model
        else "  save_first_step: true          # also a checkpoint after the first step, to see that saving works\n"
    )
    scheduler = (
        ""
        if options.scheduler != "none"
        else "  lr_scheduler_type: linear      # the course of the learning rate\n"
    )
    return (
        "train:                           # every field of transformers.TrainingArguments, under its own name\n"
        "  output_dir: out                # checkpoints, the final model and the settings of the run go here\n"
        "  num_train_epochs: 1            # passes over the data\n"
        "  per_device_train_batch_size: 8 # rows per rank and step\n"
        f"  learning_rate: {rate}           # the JSON's `auto` values are filled in from here\n"
        f"{scheduler}"
        "  save_strategy: epoch           # when to write a checkpoint: epoch, steps or no\n"
        f"{first}"
        "  save_fp32: false               # true: also leave the fp32 weights, in out/fp32\n"
    )


_TAIL = """\
deepspeed: DS_CONFIG        # the DeepSpeed JSON: a path, or the same mapping written here
"""


def _quoted(text: str) -> str:
    """`text` as a YAML scalar."""
    import yaml

    return yaml.safe_dump(text, allow_unicode=True, width=10_000).splitlines()[0]
