"""The model card: the README.md by which the Hugging Face hub, and a reader, know a merged model.

It says what the run recorded beside its weights, and nothing else: no path of the machine, no secret.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import TrainingArguments
from yaml import YAMLError

from dstool import hub, models
from dstool.checkpoint.companions import CARD, CARD_SAYS
from dstool.config import RECORD, RUN_FILE, Config, Task, load
from dstool.data.names import SAMPLE_SCHEME, looks_local
from dstool.ds_config import read
from dstool.errors import ConfigError

CONVERSATIONAL = "conversational"
"""The tag that the hub has for models to be asked in their chat template."""
PIPELINES: Mapping[Task, str] = {"text-classification": "text-classification", "causal-lm": "text-generation"}
_OF_A_RUN = re.compile(r"|fp32|(consolidated/)?checkpoint-(?P<step>\d+)(/global_step\d+)?")
"""Where in a run's folder its weights lie."""
_LOGGED = ("eval_loss", "eval_accuracy", "eval_f1")
_UNWRITTEN = "[More Information Needed]"
"""In the form that peft saves with every adapter, with the path of the base model on this machine."""


@dataclass(frozen=True)
class Run:
    """What a finished run says of weights of its own."""

    config: Config
    record: Mapping[str, Any]
    metrics: Mapping[str, float]
    """Of these very weights, on the held-out rows; empty where they were not measured."""
    step: int


def write(
    target: Path,
    source: Path,
    folder: models.ModelFolder,
    *,
    name: str,
    base_model: str | None = None,
    adapter: bool = False,
) -> None:
    """Write the model card of the model in `target`; none where nothing is known of how it was trained.

    A card that lies beside the weights in `source` is taken as it is.

    Args:
        source: a run's folder, a checkpoint, or a model folder.
        folder: the model's config.
        name: under which the model will be loaded.
        base_model: in place of the one that the run was started from.
        adapter: `target` holds an adapter alone.
    """
    if _is_written(source / CARD):
        shutil.copyfile(source / CARD, target / CARD)
        return
    run = run_of(source)
    if run is None:
        return
    base = hub_name(base_model or run.config.model.name)
    data = _data(run, folder.task, base, name=name.rpartition("/")[2], adapter=adapter)
    body = "\n\n".join(
        (f"# {name.rpartition('/')[2]}", *_body(run, base), _snippet(run, folder, name, adapter))
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n").save(target / CARD)


def run_of(source: Path) -> Run | None:
    """What is known of the run that the weights in `source` are of; None where that is no finished run."""
    source = source.resolve()
    for home in (source, *source.parents[:2]):
        place = _OF_A_RUN.fullmatch("" if home == source else source.relative_to(home).as_posix())
        if place is None or not ((home / RECORD).is_file() and (home / RUN_FILE).is_file()):
            continue
        try:
            record = json.loads((home / RECORD).read_text(encoding="utf-8"))
            config = load(home / RUN_FILE).config
            step = int(place["step"] or record["steps"])
            record |= {"world_size": int(record["world_size"])}
            if not {"stage", "precision"} <= record.keys():
                return None
            return Run(config, record, _metrics(home, record, place["step"]), step)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError):
            return None  # a card is no reason to fail
    return None


def hub_name(name: str | None) -> str | None:
    """`name` where it is one on the hub; a run's own record has folders here as absolute paths."""
    return name if name and not looks_local(name) and hub.is_name(name) else None


def is_conversational(folder: Path) -> bool:
    """Whether the card of the model in `folder` says that it was trained on conversations."""
    card = folder / CARD
    if not card.is_file():  # huggingface_hub would ask the hub for it
        return False
    try:
        return CONVERSATIONAL in (ModelCard.load(card).data.tags or ())
    except (OSError, ValueError, TypeError, YAMLError):
        return False


def _is_written(card: Path) -> bool:
    return card.is_file() and _UNWRITTEN not in card.read_text(encoding="utf-8", errors="replace")


def _metrics(home: Path, record: Mapping[str, Any], step: str | None) -> dict[str, float]:
    """On the held-out rows: of the final weights by the run's record, of others by Trainer's log."""
    found = record.get("metrics") or {}
    if step and f"checkpoint-{step}" != (record.get("best") or f"checkpoint-{record['steps']}"):
        state = home / f"checkpoint-{step}" / "trainer_state.json"
        log = json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else []
        found = {key: value for line in log if line["step"] == int(step) for key, value in line.items()}
        found = {key.removeprefix("eval_"): found[key] for key in _LOGGED if key in found}
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


# --- for the hub -----------------------------------------------------------------------------------


def _data(run: Run, task: Task, base: str | None, *, name: str, adapter: bool) -> ModelCardData:
    trained_on, sample = hub_name(_only(run.config.data.train)), _sample(run.config.data.train)
    scores = {key: value for key, value in run.metrics.items() if key != "loss"}
    return ModelCardData(
        base_model=base,
        datasets=[trained_on] if trained_on else None,
        language=sample.rpartition("_")[2] if sample else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=PIPELINES[task],
        tags=[
            "deepspeed",
            *(["lora"] if run.config.lora else []),
            *([CONVERSATIONAL] if run.record.get("rows") == "messages" else []),
        ],
        metrics=list(scores) or None,
        model_name=name,
        eval_results=_results(run, task) or None,
    )


def _results(run: Run, task: Task) -> list[EvalResult]:
    section = run.config.data
    spec = section.eval or section.train
    known = hub_name(_only(spec))
    split = (section.hub_eval_split if not section.eval_split else None) if known else None
    return [
        EvalResult(
            task_type=PIPELINES[task],
            dataset_type=known or "other",
            dataset_name=known or _sample(spec) or "held-out rows",
            dataset_config=section.hub_config if known else None,
            dataset_split=split,
            metric_type=key,
            metric_value=value,
        )
        for key, value in run.metrics.items()
    ]


def _only(spec: str | Sequence[str] | None) -> str | None:
    return spec if isinstance(spec, str) else None


def _sample(spec: str | Sequence[str] | None) -> str:
    """The name of the sample that comes with dstool; empty for other data."""
    return (
        spec.removeprefix(SAMPLE_SCHEME) if isinstance(spec, str) and spec.startswith(SAMPLE_SCHEME) else ""
    )


# --- for the reader --------------------------------------------------------------------------------


def _body(run: Run, base: str | None) -> list[str]:
    model, data = run.config.model, run.config.data
    start = f"[{base}](https://huggingface.co/{base})" if base else "a model that is not on the hub"
    if model.from_scratch is not None and base is None:
        start = f"random weights ({model.from_scratch.get('model_type')})"
    name, sample = hub_name(_only(data.train)), _sample(data.train)
    rows = f"[{name}](https://huggingface.co/datasets/{name})" if name else "files that are not on the hub"
    rows = f"the sample {sample} that comes with dstool" if sample else rows
    how = "An adapter (LoRA) trained" if run.config.lora else "Trained"
    parts = [f"{how} {CARD_SAYS}, from {start}, on {rows}."]
    if run.metrics:
        parts += ["## Evaluation", "On held-out rows:", _table("metric", run.metrics)]
    return [*parts, "## Training", _table("setting", _settings(run))]


def _settings(run: Run) -> dict[str, Any]:
    """The run's settings, by the names that people know them by."""
    ds, train = _settled(run)

    def of(name: str) -> Any:
        return train.get(name, TrainingArguments.__dataclass_fields__[name].default)

    batch, accumulated = of("per_device_train_batch_size"), of("gradient_accumulation_steps")
    ranks = run.record["world_size"]
    parts = f"{batch} x {accumulated} accumulated x {ranks} ranks"
    optimizer = (ds.get("optimizer") or {}).get("type") or of("optim")
    versions = run.record.get("versions") or {}
    is_last = run.step == int(run.record["steps"])
    return {
        "ZeRO stage": run.record["stage"],
        "precision": run.record["precision"],
        "optimizer": getattr(optimizer, "value", optimizer),
        "learning rate": of("learning_rate"),
        "batch per step": f"{batch * accumulated * ranks}: {parts}",
        **({"epochs": of("num_train_epochs")} if of("max_steps") <= 0 and is_last else {}),
        "steps": run.step,
        "seed": of("seed"),
        **({"LoRA": f"r {run.config.lora.r}, alpha {run.config.lora.lora_alpha}"} if run.config.lora else {}),
        **{name: versions[name] for name in ("deepspeed", "transformers", "torch") if name in versions},
    }


def _settled(run: Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The JSON and Trainer's arguments as the run had them; where the JSON has gone, the arguments alone."""
    train, given = run.config.train.arguments(), run.config.deepspeed
    try:
        settled = read.reconcile(given if isinstance(given, dict) else read.read(Path(given or "")), train)
        return settled.ds, read.fit_batch(settled.ds, run.record["world_size"], settled.train)
    except ConfigError:
        return {}, train


def _table(kind: str, values: Mapping[str, Any]) -> str:
    rows = [
        f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |"
        for name, value in values.items()
    ]
    return "\n".join([f"| {kind} | value |", "|---|---|", *rows])


def _snippet(run: Run, folder: models.ModelFolder, name: str, adapter: bool) -> str:
    code = ", trust_remote_code=True" if run.config.model.trust_remote_code else ""
    if adapter:
        auto = models.AUTO_CLASSES[folder.task].replace("AutoModel", "AutoPeftModel")
        labels = f", num_labels={len(folder.labels())}" if folder.labels() else ""
        lines = [f"from peft import {auto}", "", f'model = {auto}.from_pretrained("{name}"{labels}{code})']
    else:
        task = PIPELINES[folder.task]
        lines = ["from transformers import pipeline", "", f'ask = pipeline("{task}", model="{name}"{code})']
        lines.append('print(ask("..."))')
    return "\n".join(["## Use", "", "```python", *lines, "```"])
