"""Training in this process, one rank: data and labels, stages, resuming, and what can go wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback, TrainingArguments

from dstool import train as train_module
from dstool.config import load
from dstool.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingDependency,
    ModelError,
    NoDevice,
    NonFiniteLoss,
    RunFailed,
)

pytestmark = pytest.mark.distributed

STAGES = (0, 1, 2, 3)
BEST_BY_SPEED = (
    "train.metric_for_best_model=speed",
    "train.load_best_model_at_end=true",
    "train.eval_strategy=epoch",
    "train.max_steps=2",
)
SHORT = ("train.max_steps=2", "train.save_first_step=false", "train.save_strategy=no")


class Losses(TrainerCallback):
    """Keeps every loss that is logged."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Take the loss, where there is one."""
        self.values += [logs["loss"]] if "loss" in logs else []


@pytest.fixture
def reviews(write: Callable[..., Path]) -> Callable[..., str]:
    """`reviews("good", "bad")` makes a CSV of 16 rows with these labels in turn; the word for it."""

    def make(*labels: str, name: str = "reviews.csv", encoding: str = "utf-8") -> str:
        rows = (f"text of row {row},{labels[row % len(labels)]}" for row in range(16))
        return f"data.train={write(name, 'text,label', *rows, encoding=encoding).name}"

    return make


# --- data and labels -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("pos", "neg"), {0: "neg", 1: "pos"}),
        (("0", "1"), {0: "0", 1: "1"}),
        (("10", "9", "1"), {0: "1", 1: "9", 2: "10"}),
        (("좋음", "나쁨"), {0: "나쁨", 1: "좋음"}),
    ],
)
def test_D05_the_names_of_the_labels_land_in_the_config(
    labels: tuple[str, ...], names: dict[int, str], train_here: Callable[..., Any], reviews: Any
) -> None:
    result = train_here(reviews(*labels), *SHORT)
    config = AutoModelForSequenceClassification.from_pretrained(result.output_dir).config
    assert config.id2label == names
    assert config.label2id == {name: index for index, name in names.items()}


def test_D05_a_classifier_keeps_the_order_of_the_labels_it_has(
    tiny: Callable[..., Path], train_here: Callable[..., Any], reviews: Any
) -> None:
    model = tiny("bert", id2label={0: "pos", 1: "neg"}, label2id={"pos": 0, "neg": 1})
    result = train_here(reviews("neg", "pos"), f"model.name={model}", "model.from_scratch=null", *SHORT)
    config = AutoModelForSequenceClassification.from_pretrained(result.output_dir).config
    assert config.id2label == {0: "pos", 1: "neg"}


def test_D07_one_row_without_a_label_is_named_and_nothing_written(
    write: Callable[..., Path], train_here: Callable[..., Any], here: Path
) -> None:
    write("reviews.csv", "text,label", "a,0", "b,", "c,1")
    with pytest.raises(DataError, match=r"reviews\.csv:3 has no label"):
        train_here("data.train=reviews.csv")
    assert not (here / "out").exists()


def test_D07_a_single_label_is_refused(train_here: Callable[..., Any], reviews: Any, here: Path) -> None:
    with pytest.raises(DataError, match="every row has the label '1'"):
        train_here(reviews("1"))
    assert not (here / "out").exists()


def test_a_label_that_training_never_saw_is_named(
    write: Callable[..., Path], train_here: Callable[..., Any], reviews: Any, here: Path
) -> None:
    write("valid.csv", "text,label", "fine,pos", "so so,neutral")
    with pytest.raises(DataError, match=r"valid\.csv:3: the label 'neutral' is in no training row"):
        train_here(reviews("pos", "neg"), "data.eval=valid.csv")
    assert not (here / "out").exists()


def test_korean_rows_in_cp949(train_here: Callable[..., Any], reviews: Any) -> None:
    result = train_here(reviews("좋음", "나쁨", encoding="cp949"), "data.encoding=cp949", *SHORT)
    assert 0 <= result.metrics["accuracy"] <= 1


def test_held_out_rows_behind_a_byte_order_mark(
    here: Path, train_here: Callable[..., Any], reviews: Any
) -> None:
    (here / "valid.csv").write_text("text,label\n정말 좋아요,좋음\n별로예요,나쁨\n", encoding="utf-8-sig")
    result = train_here(reviews("좋음", "나쁨"), "data.eval=valid.csv", *SHORT)
    assert result.metrics["accuracy"] in {0, 0.5, 1}


def test_the_korean_sample_trains(train_here: Callable[..., Any]) -> None:
    result = train_here("data.train=sample:reviews_ko", *SHORT)
    assert 0 <= result.metrics["accuracy"] <= 1


def test_pairs_of_texts_are_encoded_together(
    write: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    rows = [f"question {row},answer {row},{row % 2}" for row in range(16)]
    write("pairs.csv", "text,second,label", *rows)
    result = train_here("data.train=pairs.csv", "data.text_pair_column=second", *SHORT)
    assert result.steps == 2


def test_a_classifier_has_no_perplexity(train_here: Callable[..., Any]) -> None:
    """Told to predict nothing but the loss, Trainer has no accuracy to give."""
    assert list(train_here("train.prediction_loss_only=true", *SHORT).metrics) == ["loss"]


def test_D08_gpt2_without_a_padding_token_classifies(
    tiny: Callable[..., Path], train_here: Callable[..., Any], reviews: Any
) -> None:
    result = train_here(
        reviews("pos", "neg"), f"model.name={tiny('gpt2')}", "model.from_scratch=null", *SHORT
    )
    tokenizer = AutoTokenizer.from_pretrained(result.output_dir)
    model = AutoModelForSequenceClassification.from_pretrained(result.output_dir).eval()
    assert tokenizer.pad_token == "<end>"
    assert model.config.pad_token_id == tokenizer.pad_token_id
    short, long = "a lamp", "the worst kettle, it leaks and it leaks"
    with torch.no_grad():
        batch = model(**tokenizer([short, long], padding=True, return_tensors="pt")).logits
        alone = model(**tokenizer(short, return_tensors="pt")).logits
    torch.testing.assert_close(batch[:1], alone)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_T01_the_loss_of_a_classifier_is_the_mean_over_rows(
    stage: int, train_here: Callable[..., Any], reviews: Any
) -> None:
    """With accumulation or ranks, Trainer's own choice multiplies it."""
    losses = Losses()
    train_here(
        *(reviews("pos", "neg"), *SHORT, "train.gradient_accumulation_steps=2", "train.logging_steps=1"),
        *("train.per_device_train_batch_size=2", "train.learning_rate=1e-9"),
        stage=stage,
        callbacks=[losses],
    )
    assert losses.values == pytest.approx([math.log(2)] * 2, abs=0.1)


def test_the_loss_of_two_ranks_is_their_mean(trained: Path) -> None:
    record = json.loads((trained / "out/run.json").read_text())
    assert record["world_size"] == 2
    assert record["train_loss"] == pytest.approx(math.log(2), abs=0.2)


# --- language models -----------------------------------------------------------------------------


@pytest.fixture
def prose(write: Callable[..., Path]) -> str:
    """A text file, and the words of a run file that train a small Llama on it."""
    write("prose.txt", *(f"line {n} of a text about lamps, kettles and cups" for n in range(200)))
    return "data.train=prose.txt"


LLAMA = (
    "model.task=causal-lm",
    "model.from_scratch={model_type: llama, vocab_size: 400, hidden_size: 32, intermediate_size: 37, "
    "num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 64}",
    "data.block_size=32",
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_language_model_learns_its_text(stage: int, train_here: Callable[..., Any], prose: str) -> None:
    result = train_here(*LLAMA, prose, "train.num_train_epochs=4", "train.learning_rate=1e-2", stage=stage)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["loss"]))
    assert result.metrics["loss"] < 3 < math.log(400)


def test_conversations_go_through_the_chat_template(
    tiny: Callable[..., Path], write: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    model = tiny("llama")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    )
    turn = [{"role": "user", "content": "a lamp?"}, {"role": "assistant", "content": "a warm light"}]
    write("chat.jsonl", *[json.dumps({"messages": turn})] * 40)
    words = (f"model.name={model}", "model.from_scratch=null", "model.task=causal-lm", "data.block_size=16")
    result = train_here("data.train=chat.jsonl", "data.text_column=messages", *words, *SHORT)
    assert (result.output_dir / "chat_template.jinja").is_file()


def test_conversations_without_a_chat_template_are_refused(
    tiny: Callable[..., Path], write: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    write("chat.jsonl", *[json.dumps({"messages": [{"role": "user", "content": "a lamp?"}]})] * 40)
    words = (f"model.name={tiny('llama')}", "model.from_scratch=null", "model.task=causal-lm")
    with pytest.raises(DataError, match="no chat template"):
        train_here("data.train=chat.jsonl", "data.text_column=messages", *words, *SHORT)


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("data.block_size=128", ConfigError, "block_size 128 is more than the model's 64 positions"),
        ("data.eval_split=0.001", DataError, "the held-out data has .* tokens, fewer than one block"),
    ],
)
def test_blocks_that_cannot_be_filled(
    word: str, error: type[Exception], said: str, train_here: Callable[..., Any], write: Callable[..., Path]
) -> None:
    write("prose.jsonl", *[json.dumps({"text": "a lamp"})] * 1000)
    with pytest.raises(error, match=said):
        train_here(*LLAMA, "data.train=prose.jsonl", word)


# --- models ----------------------------------------------------------------------------------------


def test_T10_stage_3_starts_from_the_same_weights_as_stage_2(
    tiny: Callable[..., Path], train_here: Callable[..., Any], prose: str, here: Path
) -> None:
    words = (f"model.name={tiny('llama')}", "model.from_scratch=null", "model.task=causal-lm", prose)
    losses = {}
    for stage in (2, 3):
        seen = Losses()
        (here / "dstool.yaml").unlink(missing_ok=True)
        (here / "ds_config.json").unlink(missing_ok=True)
        train_here(
            *(*words, *SHORT, "data.block_size=32", "train.logging_steps=1", f"train.output_dir=out{stage}"),
            stage=stage,
            callbacks=[seen],
        )
        losses[stage] = seen.values
    assert losses[3] == pytest.approx(losses[2], rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_T10_a_model_without_its_weights_is_refused(
    stage: int, tiny: Callable[..., Path], train_here: Callable[..., Any], reviews: Any, here: Path
) -> None:
    model = tiny("llama")
    values = load_file(model / "model.safetensors")
    from safetensors.torch import save_file

    save_file({f"lost.{name}": value for name, value in values.items()}, model / "model.safetensors")
    with pytest.raises(ModelError, match="weights of the model's body are not in its files"):
        train_here(reviews("a", "b"), f"model.name={model}", "model.from_scratch=null", stage=stage)
    assert not (here / "out").exists()


def test_T11_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tiny: Callable[..., Path], train_here: Callable[..., Any], reviews: Any
) -> None:
    model = tiny("llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<new1>", "<new2>"])
    tokenizer.save_pretrained(model)
    with pytest.raises(ModelError, match="the tokenizer has 302 tokens, the model's vocab_size is 300"):
        train_here(reviews("a", "b"), f"model.name={model}", "model.from_scratch=null")


def test_T07_a_generation_config_that_contradicts_itself_is_mended_before_training(
    tiny: Callable[..., Path], train_here: Callable[..., Any], prose: str
) -> None:
    model = tiny("llama")
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.5}))
    words = (f"model.name={model}", "model.from_scratch=null", "model.task=causal-lm", "data.block_size=32")
    result = train_here(prose, *words, *SHORT)
    kept = json.loads((result.output_dir / "generation_config.json").read_text())
    assert kept.get("temperature") in {None, 1.0}


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("model.name=nowhere/atall", ModelError, "nowhere/atall is not on this machine"),
        ("model.name=nowhere/at/all", ModelError, "no such folder"),
        ("model.from_scratch={hidden_size: 8}", ModelError, "no model_type"),
        ("model.from_scratch={model_type: lama}", ModelError, "lama"),
    ],
)
def test_a_model_that_is_not_there(
    word: str,
    error: type[Exception],
    said: str,
    train_here: Callable[..., Any],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error, match=said):
        train_here(word, *(["model.from_scratch=null"] if "name" in word else []))
    assert not (here / "out").exists()


# --- the machine -----------------------------------------------------------------------------------


def test_L01_L02_a_lone_process_needs_no_mpi_and_stays_as_it_was(train_here: Callable[..., Any]) -> None:
    before = dict(os.environ)
    assert train_here(*SHORT).world_size == 1
    assert "mpi4py" not in sys.modules
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & (os.environ.keys() - before.keys())


@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizer_runs_on_the_cpu_where_it_is_offloaded(
    stage: int, train_here: Callable[..., Any]
) -> None:
    assert train_here(*SHORT, stage=stage, offload="cpu").steps == 2


def test_L13_offloading_to_nvme_without_libaio_is_refused(
    here: Path, train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda *_, **__: False)
    with pytest.raises(MissingDependency, match="libaio") as caught:
        train_here(*SHORT, stage=3, offload="nvme")
    assert "libaio-dev" in str(caught.value.hint)
    assert not (here / "out").exists()


# --- a run and its end -----------------------------------------------------------------------------


def test_T04_contradicting_arguments_are_refused_before_anything_is_written(
    train_here: Callable[..., Any], here: Path
) -> None:
    words = ("train.load_best_model_at_end=true", "train.save_only_model=true", "train.eval_strategy=epoch")
    with pytest.raises(ConfigError, match="save_only_model"):
        train_here(*words)
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("train.report_to=swanlab",), MissingDependency, "to be installed"),
        (("train.auto_find_batch_size=true",), ConfigError, "auto_find_batch_size"),
        (
            BEST_BY_SPEED,
            ConfigError,
            "metric_for_best_model=speed is none of what is measured",
        ),
        (("data.eval_split=0.9999",), DataError, "holds out all of 320 rows"),
    ],
)
def test_what_trainer_would_die_of_is_said_in_one_line(
    words: tuple[str, ...], error: type[Exception], said: str, train_here: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=said) as caught:
        train_here(*words, stage=3)
    assert caught.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [2, 3])
def test_T05_the_best_model_is_loaded_at_the_end(stage: int, train_here: Callable[..., Any]) -> None:
    result = train_here(
        *("train.load_best_model_at_end=true", "train.eval_strategy=steps", "train.eval_steps=2"),
        *("train.save_strategy=steps", "train.save_steps=2", "train.max_steps=6"),
        *("train.save_first_step=false", "train.learning_rate=1e-2"),
        stage=stage,
    )
    state = json.loads((result.output_dir / "checkpoint-6/trainer_state.json").read_text())
    best = load_file(Path(state["best_model_checkpoint"]) / "model.safetensors")
    final = load_file(result.output_dir / "model.safetensors")
    assert all(torch.equal(best[name], final[name]) for name in best)
    assert result.metrics["loss"] == pytest.approx(state["best_metric"], abs=1e-5)
    assert result.best == Path(state["best_model_checkpoint"]).name


def test_T08_fp16_on_the_cpu_is_refused(train_here: Callable[..., Any], here: Path) -> None:
    with pytest.raises(NoDevice, match="fp16 needs a GPU") as caught:
        train_here("train.fp16=true")
    assert "bf16" in str(caught.value.hint)
    assert not (here / "out").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_T13_a_resumed_run_ends_where_an_uninterrupted_one_does(
    stage: int, train_here: Callable[..., Any]
) -> None:
    """At stage 0 in bf16, where DeepSpeed once lost the optimizer's state; else in fp32.

    In bf16 at stages 1 to 3 the two part by up to the learning rate (1e-3) after the second step. The first
    resumed step has the same loss, gradient, rate and moments, bit for bit; its fp32 masters differ in the
    last bit alone (1e-7), since DeepSpeed's Adam on the CPU multiplies beta**step up as it goes and begins a
    resumed run with std::pow (csrc/includes/cpu_adam.h, 0.19.8). Some weights then round to the other bf16
    neighbour, and Adam moves what has next to no gradient by the whole rate in either direction.
    """
    words = ("train.max_steps=4", "train.save_strategy=steps", "train.save_steps=2")
    words += ("train.save_first_step=false", f"train.bf16={str(stage == 0).lower()}")
    whole = train_here(*words, "train.output_dir=whole", stage=stage)
    parts = train_here(*words, "train.output_dir=parts", stage=stage)
    shutil.rmtree(parts.output_dir / "checkpoint-4")
    resumed = train_here(*words, "train.output_dir=parts", stage=stage, resume=True)
    assert resumed.steps == 4
    left, right = (load_file(run.output_dir / "model.safetensors") for run in (whole, resumed))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-5, msg=name)


EVERY_STEP = ("train.save_strategy=steps", "train.save_steps=1", "train.save_first_step=false")
THREE = (*EVERY_STEP, "train.max_steps=3")
TWO_EPOCHS = (*EVERY_STEP, "train.num_train_epochs=2", "train.per_device_train_batch_size=8")


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", [THREE, TWO_EPOCHS])
@pytest.mark.parametrize("newest_is_gone", [False, True])
def test_a_complete_run_is_left_as_it_is_by_resume(
    newest_is_gone: bool, words: tuple[str, ...], train_here: Callable[..., Any], reviews: Any
) -> None:
    words = (reviews("pos", "neg"), *words)
    first = train_here(*words)
    if newest_is_gone:
        shutil.rmtree(first.output_dir / first.checkpoints[-1])
    before = content(first.output_dir)
    again = train_here(*words, resume=True)
    assert again == replace(first, checkpoints=first.checkpoints[: -1 if newest_is_gone else None])
    assert content(first.output_dir) == before


def test_a_complete_run_without_checkpoints_is_complete(train_here: Callable[..., Any]) -> None:
    first = train_here(*SHORT)
    assert train_here(*SHORT, resume=True) == first


@pytest.mark.parametrize("best", [False, True])
def test_a_run_that_lost_only_its_end_is_ended_without_another_step(
    best: bool, train_here: Callable[..., Any]
) -> None:
    words = (*THREE, "train.learning_rate=1e-2")
    if best:
        words += ("train.load_best_model_at_end=true", "train.eval_strategy=steps", "train.eval_steps=1")
    first = train_here(*words)
    before = load_file(first.output_dir / "model.safetensors")
    for name in ("run.json", "model.safetensors", "config.json"):
        (first.output_dir / name).unlink()
    again = train_here(*words, resume=True)
    assert (again.steps, again.best) == (3, first.best)
    assert again.metrics == pytest.approx(first.metrics)
    after = load_file(first.output_dir / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_complete_run_goes_on_where_more_steps_are_asked_for(train_here: Callable[..., Any]) -> None:
    train_here(*THREE)
    assert train_here(*EVERY_STEP, "train.max_steps=4", resume=True).steps == 4


def test_the_record_of_an_earlier_run_is_none_of_the_one_that_replaces_it(
    train_here: Callable[..., Any], here: Path
) -> None:
    train_here(*THREE)
    bad = ("train.learning_rate=1e30", "train.warmup_steps=0", "train.logging_steps=1")
    with pytest.raises(NonFiniteLoss):
        train_here(*THREE, *bad, force=True)
    assert not (here / "out/run.json").exists()


def break_checkpoint(folder: Path, name: str) -> None:
    """Take a file away, or cut it short where the name begins with a minus."""
    file = folder / name.removeprefix("-")
    file.write_bytes(file.read_bytes()[:20]) if name.startswith("-") else file.unlink()


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "-trainer_state.json", "-rng_state.pth", "-scheduler.pt"]
)
def test_a_checkpoint_that_trainer_cannot_read_is_passed_over(
    name: str, train_here: Callable[..., Any], here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dstool.ds_config.options import Options
    from dstool.init_config import init_config

    init_config(Options(optimizer="none", scheduler="none"))
    train_here(*THREE)
    (here / "out/run.json").unlink()
    break_checkpoint(here / "out/checkpoint-3", name)
    named = f"train.resume_from_checkpoint={here / 'out/checkpoint-3'}"
    with pytest.raises(CheckpointError, match=f"checkpoint-3/{name.removeprefix('-')} is") as caught:
        train_here(*THREE, named)
    assert "dstool consolidate" in str(caught.value.hint)
    caplog.set_level("INFO", "dstool")
    assert train_here(*THREE, resume=True).steps == 3
    assert f"{name.removeprefix('-')} is" in caplog.text
    assert "resuming from out/checkpoint-2" in caplog.text


def test_a_checkpoint_to_resume_from_may_be_named_as_in_the_run(
    train_here: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    train_here(*THREE)
    caplog.set_level("INFO", "dstool")
    word = "train.resume_from_checkpoint=checkpoint-2"
    assert train_here(*EVERY_STEP, "train.max_steps=4", word).steps == 4
    assert "resuming from out/checkpoint-2" in caplog.text
    with pytest.raises(CheckpointError, match="out/checkpoint-9 does not exist"):
        train_here(*THREE, "train.resume_from_checkpoint=checkpoint-9")


def test_K19_another_number_of_ranks_cannot_resume(
    trained: Path, here: Path, train_here: Callable[..., Any]
) -> None:
    with pytest.raises(CheckpointError, match="was written by 2 ranks, and this run has 1") as caught:
        train_here(f"train.output_dir={trained / 'out'}", resume=True)
    assert "--num-gpus 2" in str(caught.value.hint)


def test_K20_another_stage_cannot_resume(train_here: Callable[..., Any], here: Path) -> None:
    train_here("train.max_steps=1", stage=0)
    (here / "ds_config.json").unlink()
    (here / "dstool.yaml").unlink()
    with pytest.raises(CheckpointError, match="is of ZeRO stage 0, and this run of stage 2"):
        train_here(resume=True, stage=2)


@pytest.mark.parametrize("keeps", ["nothing", "the models only"])
def test_K25_weights_alone_are_no_checkpoint_to_resume_from(
    keeps: str, train_here: Callable[..., Any], here: Path
) -> None:
    train_here(
        *(SHORT if keeps == "nothing" else (*EVERY_STEP, "train.max_steps=1", "train.save_only_model=true"))
    )
    holds = "out" if keeps == "nothing" else "out/checkpoint-1"
    with pytest.raises(
        CheckpointError, match=rf"^{holds} holds model\.safetensors and no state of DeepSpeed"
    ) as caught:
        train_here(resume=True)
    assert f": dstool train model.name={holds} train.output_dir=DIR" in str(caught.value.hint)
    with pytest.raises(CheckpointError, match="to go on from"):
        train_here(f"train.resume_from_checkpoint={holds}")


def test_a_run_that_is_there_is_not_touched_without_force(train_here: Callable[..., Any], here: Path) -> None:
    first = train_here("train.max_steps=3", "train.save_strategy=steps", "train.save_steps=1")
    assert first.checkpoints == ("checkpoint-1", "checkpoint-2", "checkpoint-3")
    with pytest.raises(ConfigError, match="out exists and is not empty"):
        train_here(*SHORT)
    again = train_here("train.max_steps=1", force=True)
    assert again.checkpoints == ("checkpoint-1",)


def test_a_loss_that_is_no_number_ends_the_run(train_here: Callable[..., Any]) -> None:
    with pytest.raises(NonFiniteLoss, match="the loss is") as caught:
        train_here("train.learning_rate=1e30", "train.logging_steps=1", "train.warmup_steps=0")
    assert "learning_rate" in str(caught.value.hint)


@pytest.mark.parametrize("word", ["train.logging_strategy=no", "train.logging_nan_inf_filter=true"])
def test_a_loss_that_is_no_number_is_found_without_a_step_that_logs(
    word: str, train_here: Callable[..., Any], here: Path
) -> None:
    words = ("train.learning_rate=1e30", "train.warmup_steps=0", "train.max_steps=5", word)
    with pytest.raises(NonFiniteLoss, match=r"loss is nan at step 5"):
        train_here(*words, "train.save_first_step=false", "train.save_strategy=no")
    assert not (here / "out/run.json").exists()
    assert not (here / "out/model.safetensors").exists()


def test_a_run_shorter_than_the_steps_between_logs_says_its_loss(train_here: Callable[..., Any]) -> None:
    losses = Losses()
    result = train_here(*SHORT, callbacks=[losses])
    assert losses.values == [pytest.approx(result.train_loss)]


def test_an_output_folder_that_cannot_be_made(
    write: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    write("file", "in the way")
    with pytest.raises(ConfigError, match="file"):
        train_here("train.output_dir=file/out")


@pytest.mark.parametrize("stage", STAGES)
def test_fp32_weights_are_left_where_asked_for(stage: int, train_here: Callable[..., Any]) -> None:
    bf16 = stage > 0
    result = train_here(
        *("train.save_fp32=true", f"train.bf16={str(bf16).lower()}", "train.max_steps=6"),
        *("train.save_first_step=false", "train.save_strategy=no"),
        stage=stage,
    )
    exact, final = (
        load_file(folder / "model.safetensors") for folder in (result.output_dir / "fp32", result.output_dir)
    )
    assert exact.keys() == final.keys()
    assert {value.dtype for value in exact.values()} == {torch.float32}
    assert {value.dtype for value in final.values()} == {torch.bfloat16 if bf16 else torch.float32}
    assert all(torch.equal(exact[name].to(final[name].dtype), final[name]) for name in exact)
    assert any((exact[name] != exact[name].bfloat16().float()).any() for name in exact)
    assert json.loads((result.output_dir / "fp32/config.json").read_text())["dtype"] == "float32"
    assert not list(result.output_dir.glob(".tmp*"))


def test_fp32_weights_that_deepspeed_does_not_keep_are_refused(
    train_here: Callable[..., Any], here: Path
) -> None:
    with pytest.raises(ConfigError, match="save_fp32 at ZeRO stage 0 in bf16"):
        train_here("train.save_fp32=true", "train.bf16=true", stage=0)
    assert not (here / "out").exists()


class KeepsModel(TrainerCallback):
    """Keeps the model that is trained."""

    model: Any = None

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Take it."""
        self.model = model


def test_saving_fp32_weights_leaves_the_live_model_as_it_is(train_here: Callable[..., Any]) -> None:
    kept = KeepsModel()
    train_here("train.save_fp32=true", "train.bf16=true", *SHORT, callbacks=[kept])
    assert str(kept.model.config.dtype).endswith("bfloat16")


def test_all_weights_have_the_permissions_of_the_umask(train_here: Callable[..., Any], here: Path) -> None:
    before = os.umask(0o027)
    try:
        train_here(*THREE)
    finally:
        os.umask(before)
    files = [path for path in (here / "out").rglob("*") if path.is_file() and path.suffix != ".py"]
    assert len([path for path in files if path.name == "model.safetensors"]) == 4
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: "0o640" for path in files
    }


def test_no_secret_is_written_beside_the_weights(train_here: Callable[..., Any], here: Path) -> None:
    train_here(*SHORT, "train.hub_token=hf_XYZ", "train.hub_model_id=me/mine")
    for name in ("dstool.yaml", "run.json"):
        assert "hf_XYZ" not in (here / "out" / name).read_text()
    assert "me/mine" in (here / "out/dstool.yaml").read_text()


# --- failures of files and connections -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "strategy", "warned"), [(10**6, "epoch", True), (10**6, "no", False), (10, "epoch", False)]
)
def test_K28_a_disk_without_room_for_checkpoints_is_told_of_before_the_first_step(
    width: int, strategy: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer of a million by a million, of which no weight is made, has 16 TB of checkpoint."""
    layer = torch.nn.Linear(width, width, bias=False, device="meta")
    arguments = {"save_strategy": strategy, "save_total_limit": 2, "use_cpu": True}
    args = TrainingArguments(str(tmp_path / "run/out"), **arguments)
    with caplog.at_level("WARNING", "dstool"):
        train_module._warn_of_little_room(args, layer)
    assert ("takes about 16.0 TB and 3 are there" in caplog.text) is warned


def test_K28_a_disk_that_is_full_ends_the_run_in_one_line(train_here: Callable[..., Any]) -> None:
    """The system refuses to write files beyond a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(RunFailed, match="a file could not be written") as caught:
            train_here(*THREE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "df -h" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "x/y"),
            "a file could not be written: x/y: No space",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x/y"),
            "x/y: No such file or directory",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "x/y"), "x/y: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), "out: Too many open files"),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "a file could not be written: out",
        ),
        (RuntimeError("PytorchStreamWriter failed writing file data/2"), "a file could not be written: out"),
        (ConnectionRefusedError(111, "Connection refused"), "a connection failed: ConnectionRefusedError"),
        (TimeoutError("timed out"), "a connection failed: TimeoutError: timed out"),
        (OSError("503 Server Error"), "a connection failed: OSError: 503 Server Error"),
        (ConnectionResetError(104, "Connection reset by peer"), None),
        (RuntimeError("expected scalar type Float"), None),
        (SafetensorError("invalid header"), None),
    ],
)
def test_a_failure_is_named_after_what_failed(error: Exception, said: str | None) -> None:
    found = train_module._failure_of_a_file(error, SimpleNamespace(output_dir="out"))  # type: ignore[arg-type]
    assert (found and found.message[: len(said or "")]) == said
    assert found is None or found.hint


def test_the_run_file_beside_the_weights_trains_the_same_again(
    train_here: Callable[..., Any], reviews: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train_here(reviews("pos", "neg"), *SHORT, "train.output_dir=first")
    kept = result.output_dir / "dstool.yaml"
    head = kept.read_text().partition("model:")[0]
    assert all(f"# {name} " in head for name in ("dstool", "torch", "deepspeed", "transformers"))
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    from dstool.train import train

    again = train(load(kept, words=["train.output_dir=again"]).config)
    assert (again.steps, again.train_loss) == (result.steps, pytest.approx(result.train_loss))
