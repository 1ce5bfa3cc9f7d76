"""The run file that `init-config` writes: what stands in it, and why, beside each line."""

from __future__ import annotations

from typing import Any

from dstool.config import Task, scalar
from dstool.ds_config.build import of_run_file
from dstool.ds_config.options import WITHOUT_WARMUP, Options
from dstool.run_file import shown

SAMPLE = "sample:reviews_en"


def text(
    json_path: str,
    options: Options,
    *,
    model: str | None,
    data: str | None,
    task: Task,
    lora: bool = False,
    length: int | None = None,
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
        *_data_lines(data, task, length),
        *_train_lines(options, real_model=model is not None),
        *(((LORA, "an adapter alone is trained, on every linear layer"),) if lora else ()),
        (f"deepspeed: {scalar(json_path)}", "the DeepSpeed JSON: a path, or the same mapping written here"),
    ]
    return _HEAD + "".join(_line(line, comment) for line, comment in lines)


def _line(line: str, comment: str) -> str:
    blank = "" if line.startswith(" ") else "\n"
    return f"{blank}{line:<32} # {comment}\n"


_HEAD = """\
# The run file of dstool: train, consolidate, merge and infer all read it.
# Each key can be given on the command line as well: dstool train train.learning_rate=1e-4
# What a run would use, and where each value is from: dstool train --show-config
"""

LORA = "lora: {target_modules: all-linear}"

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


def _data_lines(data: str | None, task: Task, length: int | None) -> list[tuple[str, str]]:
    last = {
        "text-classification": [
            ("  label_column: label", "the column with the label: words or whole numbers"),
            *([(f"  max_length: {length}", "tokens of a text; what is longer is cut")] if length else []),
        ],
        "causal-lm": [(f"  block_size: {length or 128}", "tokens in a block; texts are packed end to end")],
    }
    return [
        ("data:", "the text"),
        (
            f"  train: {scalar(data or SAMPLE)}",
            "csv, tsv, jsonl, parquet, txt: file, folder, glob or hub name",
        ),
        ("  eval_split: 0.2", "the part that is held out; or name a file: eval: valid.csv"),
        ("  text_column: text", "the column with the text"),
        *last[task],
    ]


def _train_lines(options: Options, *, real_model: bool) -> list[tuple[str, str]]:
    return [
        ("train:", "every field of transformers.TrainingArguments, by its name"),
        *(
            (f"  {name}: {shown(value)}", _TRAIN_COMMENTS[name])
            for name, value in train(options, real_model=real_model).items()
        ),
    ]


_TRAIN_COMMENTS = {
    "output_dir": "checkpoints, the final model and the run's settings go here",
    "num_train_epochs": "passes over the data",
    "per_device_train_batch_size": "rows per rank and step",
    "learning_rate": "fills the JSON's `auto` values, like the rest",
    "lr_scheduler_type": "the course of the learning rate",
    "warmup_steps": "steps until the full rate; below 1 it is a share of all steps",
    "gradient_checkpointing": "less memory for activations, about a third more time",
    "save_strategy": "when to write a checkpoint: epoch, steps or no",
    "save_total_limit": "the newest checkpoints that are kept; each is several times the weights",
    "save_first_step": "whether to write one after the first step too",
    "save_fp32": "whether to leave the fp32 weights as well, in out/fp32",
}


def train(options: Options, *, real_model: bool = False) -> dict[str, Any]:
    """The run file's `train:` for `options`: what the JSON has a number for is said there alone."""
    said = of_run_file(options)
    own_scheduler = options.scheduler == "none"
    warms = options.warmup is None and options.scheduler not in WITHOUT_WARMUP
    values: dict[str, Any] = {
        "output_dir": "out",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8 if _free_micro_batch(options) else None,
        "learning_rate": (5e-5 if real_model else 1e-3) if options.lr is None else None,
        "lr_scheduler_type": "linear" if own_scheduler else None,
        "warmup_steps": 0.1 if warms else None,
        "gradient_checkpointing": None,
        "save_strategy": "epoch",
        "save_total_limit": 3,
        "save_first_step": not real_model,
        "save_fp32": False,
    }
    return {name: value for name, value in {**values, **said}.items() if value is not None}


def _free_micro_batch(options: Options) -> bool:
    """Whether neither the JSON nor the sum of a global batch decides the rows of a step."""
    return options.micro_batch is None and not (options.global_batch and options.accumulation)
