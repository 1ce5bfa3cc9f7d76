"""Put a model to work through `deepspeed.init_inference`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessorList

from dstool import launch, models
from dstool.checkpoint import layout
from dstool.config import Config, InferSection
from dstool.errors import InputError, ModelError

logger = logging.getLogger("dstool.infer")

MAX_LENGTH = 512


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one text: a label with its probability, or the text that follows."""

    text: str
    label: str | None = None
    probability: float | None = None
    generated: str | None = None


@dataclass(frozen=True)
class InferResult:
    """The predictions, in the order of the texts, and what made them."""

    model: Path
    device: str
    dtype: str
    predictions: tuple[Prediction, ...]
    seconds: float = field(metadata={"unit": "seconds"})
    """Of the model's own work, loading left out."""


def infer(texts: Sequence[str], config: Config, *, model: Path | None = None) -> InferResult:
    """Classify or continue `texts`, whichever the model is for.

    Args:
        model: a model folder; by default that of the run file, or the newest weights of its run.

    Raises:
        InputError: no text, or one that is empty or no Unicode.
        ModelError: no model there, or one that is broken or computes no numbers.
        NoDevice: the dtype asked for needs a GPU.
    """
    _check_texts(texts)
    folder = models.open_folder(model or newest_model(config))
    device = launch.accelerator()
    dtype = models.usable_dtype(config.infer.dtype, folder.config, device)
    tokenizer = load_tokenizer(folder)
    engine = load_engine(folder, tokenizer, dtype)
    started = time.monotonic()
    work = _classify if folder.task == "text-classification" else _continue
    predictions = tuple(
        prediction
        for start in range(0, len(texts), config.infer.batch_size)
        for prediction in work(
            texts[start : start + config.infer.batch_size], engine, tokenizer, folder, config.infer
        )
    )
    seconds = time.monotonic() - started
    return InferResult(folder.path.resolve(), device, models.DTYPE_NAMES[dtype], predictions, seconds)


def _check_texts(texts: Sequence[str]) -> None:
    if not texts or any(not text.strip() for text in texts):
        raise InputError("there is no text" if not texts else "a text is empty", hint='--text "..."')
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding than the terminal's
            raise InputError(f"{text!r} is no Unicode text", hint="iconv -t UTF-8") from error


def newest_model(config: Config) -> Path:
    """The model that the run file names, or the newest of what its run, consolidate and merge have written.

    Raises:
        ModelError: there is none yet.
    """
    if config.infer.model is not None:
        return Path(config.infer.model)
    run = Path(config.train.output_dir)
    folders = [run, *sorted((run / "consolidated").glob("*"))]
    folders += [Path(name) for name in (config.consolidate.output_dir, config.merge.output_dir) if name]
    found = [
        folder
        for folder in folders
        if (models.has_weights(folder) or models.is_adapter(folder)) and (folder / "config.json").is_file()
    ]
    if not found:
        saved = layout.checkpoints(run)
        hint = f"dstool consolidate {saved[-1]}" if saved else "dstool train, or dstool infer --model DIR"
        raise ModelError(f"{run} holds no model yet", hint=hint)
    newest = max(
        found, key=lambda folder: max(file.stat().st_mtime_ns for file in models.weight_files(folder))
    )
    if len(found) > 1:
        logger.info("model: %s, the newest weights of this run (--model names another)", newest)
    return newest


def load_tokenizer(folder: models.ModelFolder) -> Any:
    """The tokenizer in `folder`, padding on the side that the task needs.

    A generator continues the last token of a row, so that its padding has to stand before the text.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path)
    except models.UNREADABLE as error:
        raise ModelError(
            f"{folder.path} has no usable tokenizer", hint="dstool merge copies it along"
        ) from error
    models.check_vocabulary(
        tokenizer, folder.config, hint=f"put the model's own tokenizer into {folder.path}"
    )
    tokenizer.padding_side = "left" if folder.task == "causal-lm" else "right"
    return models.ensure_pad_token(tokenizer)


def load_engine(folder: models.ModelFolder, tokenizer: Any, dtype: torch.dtype) -> Any:
    """The model in `folder` under DeepSpeed's inference engine, in a world of one."""
    deepspeed = launch.import_deepspeed()
    model = models.load_folder(folder, dtype)
    if folder.task == "text-classification":
        # GPT-2's and its like read the last token that is no padding, and go by the config alone.
        model.config.pad_token_id = tokenizer.pad_token_id
    with launch.rank_environment():
        # Without a dtype the engine takes fp16, which the CPU has not (inference/config.py, 0.19.8).
        return deepspeed.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": 1})


def _encode(texts: Sequence[str], tokenizer: Any, limit: int, engine: Any) -> Any:
    encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
    return encoded.to(engine.module.device)


def _numbers(values: torch.Tensor, folder: models.ModelFolder) -> torch.Tensor:
    """`values`, unless the model's weights or its dtype have made some of them NaN."""
    if values.isnan().any():
        raise ModelError(
            f"{folder.path}: the model computes values that are no numbers",
            hint="--dtype fp32, or train again with a lower train.learning_rate",
        )
    return values


@torch.inference_mode()
def _classify(
    texts: Sequence[str], engine: Any, tokenizer: Any, folder: models.ModelFolder, settings: InferSection
) -> Iterator[Prediction]:
    limit = models.length_limit(tokenizer, folder.config, settings.max_length or MAX_LENGTH)
    logits = engine(**_encode(texts, tokenizer, limit, engine)).logits.float()
    best = _numbers(logits.softmax(dim=-1), folder).max(dim=-1)
    names = folder.labels()
    for text, probability, index in zip(texts, best.values.tolist(), best.indices.tolist(), strict=True):
        yield Prediction(text, label=names[index], probability=probability)


@torch.inference_mode()
def _continue(
    texts: Sequence[str], engine: Any, tokenizer: Any, folder: models.ModelFolder, settings: InferSection
) -> Iterator[Prediction]:
    positions = models.length_limit(tokenizer, folder.config, 1 << 30)
    room = min(positions - settings.max_new_tokens, settings.max_length or positions)
    if room < 1:
        raise InputError(
            f"infer.max_new_tokens={settings.max_new_tokens} leaves no room in {positions} positions",
            hint=f"infer.max_new_tokens={positions // 2}",
        )
    tokenizer.truncation_side = "left"
    encoded = _encode(texts, tokenizer, room, engine)
    torch.manual_seed(settings.seed)
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p} if settings.do_sample else {}
    output = engine.generate(
        **{name: encoded[name] for name in ("input_ids", "attention_mask")},
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.do_sample,
        pad_token_id=tokenizer.pad_token_id,
        logits_processor=LogitsProcessorList([lambda _, scores: _numbers(scores, folder)]),
        **sampling,
    )
    width = encoded["input_ids"].shape[1]
    for text, tokens in zip(texts, output, strict=True):
        yield Prediction(text, generated=tokenizer.decode(tokens[width:], skip_special_tokens=True))
