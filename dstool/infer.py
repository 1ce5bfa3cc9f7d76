"""Put a model to work through `deepspeed.init_inference`."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from dstool import card, launch, models
from dstool.checkpoint import layout
from dstool.config import MAX_LENGTH, RECORD, Config, InferSection
from dstool.errors import ConfigError, InputError, ModelError
from dstool.files import typed

logger = logging.getLogger("dstool.infer")


@dataclass(frozen=True)
class Prediction:
    """What the model makes of one text: a label with its probability, a number, or the text that follows."""

    text: str
    text_pair: str | None = None
    label: str | None = None
    """The likeliest one, also where the model was trained to give several."""
    probability: float | None = None
    value: float | None = None
    """What a model of a single output says, such as a score."""
    generated: str | None = None


@dataclass(frozen=True)
class InferResult:
    """The predictions, in the order of the texts, and what made them."""

    model: Path
    device: str
    dtype: str
    chat: bool
    """Whether each text was put into the chat template, as what the user says."""
    predictions: tuple[Prediction, ...]
    seconds: float = field(metadata={"unit": "seconds"})
    """Of the model's own work, loading left out."""


def show(result: InferResult) -> str:
    """The predictions for a reader, each with its text."""
    return "\n".join(_shown(each, chat=result.chat) for each in result.predictions)


def _shown(each: Prediction, *, chat: bool) -> str:
    second = f"  {each.text_pair}" if each.text_pair is not None else ""
    if each.label is not None:
        return f"{each.label}  {each.probability:.3f}  {each.text}{second}"
    if each.value is not None:
        return f"{each.value:.3f}  {each.text}{second}"
    end = "\n" if chat else ""
    return f"{each.text}{end}{each.generated}"


@dataclass(frozen=True)
class _Work:
    """The model at work, and what it takes to ask it."""

    engine: Any
    tokenizer: Any
    folder: models.ModelFolder
    settings: InferSection
    chat: bool


def infer(
    texts: Sequence[str],
    config: Config,
    *,
    model: Path | None = None,
    pairs: Sequence[str] | None = None,
) -> InferResult:
    """Classify or continue `texts`, whichever the model is for.

    Args:
        model: a model folder; by default that of the run file, or the newest weights of its run.
        pairs: the second text of each, for a classifier that was trained on pairs.

    Raises:
        ConfigError: pairs for a generator, or not one for each text; a chat without a template.
        InputError: no text, or one that is empty or no Unicode.
        ModelError: no model there, or one that is broken or computes no numbers.
        NoDevice: the dtype asked for needs a GPU.
    """
    _check_texts([*texts, *(pairs or ())] if texts else ())
    if pairs and len(pairs) != len(texts):
        raise ConfigError(
            f"{len(texts)} --text and {len(pairs)} --text-pair make no pairs", hint="give one for each"
        )
    folder = models.open_folder(model or newest_model(config))
    _check_outputs(folder)
    device = launch.accelerator()
    dtype = models.usable_dtype(config.infer.dtype, folder.config, device)
    tokenizer = load_tokenizer(folder)
    rows = trained_on(folder.path)
    _check_pairs(folder, rows, bool(pairs))
    chat = _is_chat(folder, tokenizer, rows, config.infer.chat)
    work = _Work(load_engine(folder, tokenizer, dtype), tokenizer, folder, config.infer, chat)
    started = time.monotonic()
    ask = _classify if folder.task == "text-classification" else _continue
    size = config.infer.batch_size
    predictions = tuple(
        prediction
        for start in range(0, len(texts), size)
        for prediction in ask(
            work, texts[start : start + size], pairs[start : start + size] if pairs else None
        )
    )
    seconds = time.monotonic() - started
    return InferResult(folder.path.resolve(), device, models.DTYPE_NAMES[dtype], chat, predictions, seconds)


def trained_on(model: Path) -> str | None:
    """What the rows were that the model's run was trained on: texts, pairs or messages, by the run's record.

    It lies beside the final weights, and above those of a checkpoint and of `consolidated/`. Where there is
    none, as with what `merge` made, the model card may say that they were messages; otherwise None.
    """
    for folder in (model.resolve(), *model.resolve().parents[:2]):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads((folder / RECORD).read_text(encoding="utf-8"))["rows"])
    return "messages" if card.is_conversational(model) else None


def _check_pairs(folder: models.ModelFolder, rows: str | None, pairs: bool) -> None:
    if pairs and folder.task != "text-classification":
        raise ConfigError(
            f"{folder.path} continues one text, and takes no --text-pair", hint="put both into --text"
        )
    if rows == "pairs" and not pairs:
        logger.warning("%s was trained on pairs of texts: --text-pair gives the second", folder.path)


def _is_chat(folder: models.ModelFolder, tokenizer: Any, rows: str | None, wanted: bool | None) -> bool:
    """Whether to ask in the chat template: as wanted, or else as the model was trained."""
    if folder.task != "causal-lm":
        return False
    if wanted and not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder.path} has no chat template", hint="--no-chat")
    if wanted is None and rows is None and tokenizer.chat_template:
        logger.info("%s has a chat template: --chat asks it that way", folder.path)
    return bool(tokenizer.chat_template) and (rows == "messages" if wanted is None else wanted)


def _check_texts(texts: Sequence[str]) -> None:
    if not texts or any(not text.strip() for text in texts):
        raise InputError("there is no text" if not texts else "a text is empty", hint='--text "..."')
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding than the terminal's
            raise InputError(f"{text!r} is no Unicode text", hint="iconv -t UTF-8") from error


def _check_outputs(folder: models.ModelFolder) -> None:
    if folder.task == "text-classification" and folder.problem() == "regression":
        count = folder.config.num_labels
        if count > 1:
            raise ModelError(
                f"{folder.path} gives {count} numbers for each text, and no classes",
                hint="name a classifier, or a model of a single output",
            )


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
        hint = (
            f"dstool consolidate {typed(saved[-1])}" if saved else "dstool train, or dstool infer --model DIR"
        )
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
    hint = f"put the model's own tokenizer into {folder.path}"
    tokenizer = models.read_tokenizer(folder.path, hint=hint)
    models.check_vocabulary(tokenizer, folder.config, hint=hint)
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


def _encode(work: _Work, texts: Sequence[str], pairs: Sequence[str] | None, limit: int) -> Any:
    """Tokens of texts, pairs or chats. A template has its own special tokens in it."""
    given = [_asked(work, text, limit) for text in texts] if work.chat else list(texts)
    encoded = work.tokenizer(
        given,
        *([list(pairs)] if pairs else ()),
        padding=True,
        truncation=True,
        max_length=limit,
        add_special_tokens=not work.chat,
        return_tensors="pt",
    )
    return encoded.to(work.engine.module.device)


def _asked(work: _Work, text: str, limit: int) -> str:
    """The end of `text` that fits, as what the user says, up to where the model's answer begins."""
    tokens, frame = (
        work.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        for part in (text, _in_template(work, ""))
    )
    room = limit - len(frame)
    if len(tokens) > room > 0:
        text = work.tokenizer.decode(tokens[-room:])
    return _in_template(work, text)


def _in_template(work: _Work, text: str) -> str:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": text}]
    try:
        return str(work.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError) as error:
        raise ModelError(
            f"{work.folder.path}: its chat template takes no single text: {' '.join(str(error).split())}",
            hint="--no-chat",
        ) from error


def _numbers(values: torch.Tensor, folder: models.ModelFolder) -> torch.Tensor:
    """`values`, unless the model's weights or its dtype have made some of them NaN."""
    if values.isnan().any():
        raise ModelError(
            f"{folder.path}: the model computes values that are no numbers",
            hint="--dtype fp32, or train again with a lower train.learning_rate",
        )
    return values


@torch.inference_mode()
def _classify(work: _Work, texts: Sequence[str], pairs: Sequence[str] | None) -> Iterator[Prediction]:
    limit = models.length_limit(work.tokenizer, work.engine.module, work.settings.max_length or MAX_LENGTH)
    logits = work.engine(**_encode(work, texts, pairs, limit)).logits.float()
    names, problem = work.folder.labels(), work.folder.problem()
    seconds: Sequence[str | None] = pairs or [None] * len(texts)
    if problem == "regression":
        for text, second, values in zip(texts, seconds, _numbers(logits, work.folder).tolist(), strict=True):
            yield Prediction(text, second, value=values[0])
        return
    chances = logits.sigmoid() if problem == "multi_label_classification" else logits.softmax(dim=-1)
    best = _numbers(chances, work.folder).max(dim=-1)
    for text, second, probability, index in zip(
        texts, seconds, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        yield Prediction(text, second, label=names[index], probability=probability)


@torch.inference_mode()
def _continue(work: _Work, texts: Sequence[str], _: Sequence[str] | None) -> Iterator[Prediction]:
    tokenizer, folder, settings = work.tokenizer, work.folder, work.settings
    positions = models.length_limit(tokenizer, work.engine.module, 1 << 30)
    room = min(positions - settings.max_new_tokens, settings.max_length or positions)
    if room < 1:
        raise InputError(
            f"infer.max_new_tokens={settings.max_new_tokens} leaves no room in {positions} positions",
            hint=f"infer.max_new_tokens={positions // 2}",
        )
    tokenizer.truncation_side = "left"
    encoded = _encode(work, texts, None, room)
    torch.manual_seed(settings.seed)
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p} if settings.do_sample else {}
    output = work.engine.generate(
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
