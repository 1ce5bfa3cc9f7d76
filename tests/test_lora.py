"""The `lora:` section: an adapter trained at each stage, put to work, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file

from dstool.config import load
from dstool.consolidate import consolidate
from dstool.errors import ConfigError, ModelError
from dstool.infer import infer
from dstool.merge import merge

pytestmark = pytest.mark.distributed

LABELS = {0: "bad", 1: "fair", 2: "good"}
TEXTS = ("splendid, warm", "it leaks and it broke", "no reply, no refund")
STEPS = ("train.max_steps=4", "train.learning_rate=1e-2", "train.warmup_steps=0")


@pytest.fixture
def words(tiny: Callable[..., Path], write: Callable[..., Path]) -> tuple[str, ...]:
    """What trains an adapter of a tiny encoder on a few rows of three classes."""
    names = list(LABELS.values())
    write(
        "reviews.csv", "text,label", *(f"{name} thing number {n},{name}" for n in range(8) for name in names)
    )
    model = ("model.from_scratch=null", f"model.name={tiny('bert')}")
    return (*model, "data.train=reviews.csv", "lora.r=4", *STEPS)


@pytest.fixture
def adapter(words: tuple[str, ...], train_here: Callable[..., Any]) -> Path:
    """The folder of such a run, with a checkpoint."""
    return Path(train_here(*words).output_dir)


def refused(kind: type[Exception], train_here: Callable[..., Any], *words: str) -> Any:
    with pytest.raises(kind) as caught:
        train_here(*words)
    return caught.value


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_adapter_is_trained_at_every_stage_and_infer_runs_it(
    stage: int, bf16: bool, words: tuple[str, ...], train_here: Callable[..., Any], caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "dstool")
    targets = ("lora.target_modules=all-linear", "train.gradient_checkpointing=true", f"train.bf16={bf16}")
    folder = train_here(*words, *targets, stage=stage).output_dir
    state = load_file(folder / "adapter_model.safetensors")
    down = [value for name, value in state.items() if "lora_A" in name]
    up = [value for name, value in state.items() if "lora_B" in name]
    assert len(down) == len(up) == 2 * 6 + 1  # six linear layers in each block, and the pooler
    assert all(value.shape[0] == 4 and value.numel() for value in down)
    assert all(value.any() for value in up), "a part of the adapter learned nothing"
    trained = sum(value.numel() for value in state.values())
    assert f"LoRA: {trained:,} of " in caplog.text
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    result = infer(TEXTS, load(words=["infer.dtype=fp32"]).config, model=folder)
    for each in result.predictions:
        with torch.no_grad():
            logits = loaded.float()(**tokenizer(each.text, return_tensors="pt")).logits[0]
        best = logits.softmax(-1).max(-1)
        assert (each.label, each.probability) == (
            LABELS[int(best.indices)],
            pytest.approx(float(best.values)),
        )


def test_a_language_model_gets_an_adapter_and_infer_finds_it(
    tiny: Callable[..., Path], language_words: tuple[str, ...], train_here: Callable[..., Any]
) -> None:
    words = (
        *language_words,
        f"model.name={tiny('llama')}",
        "lora.target_modules=[q_proj, down_proj]",
        *STEPS,
    )
    folder = train_here(*words).output_dir
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    found = infer(["line 3"], load(words=["infer.max_new_tokens=2"]).config)
    assert found.model == folder
    assert found.predictions[0].generated is not None


def test_a_run_with_an_adapter_goes_on_from_its_checkpoint(
    words: tuple[str, ...], train_here: Callable[..., Any], adapter: Path
) -> None:
    assert train_here(*words, "train.max_steps=6", resume=True).steps == 6


def test_an_adapter_and_a_whole_model_do_not_lie_in_one_folder(
    words: tuple[str, ...], train_here: Callable[..., Any], adapter: Path
) -> None:
    train_here(*words, "lora=null", force=True)
    assert (adapter / "model.safetensors").is_file()
    assert not list(adapter.glob("adapter*"))
    train_here(*words, force=True)
    assert (adapter / "adapter_config.json").is_file()
    assert not list(adapter.glob("model*"))


@pytest.mark.parametrize("source", [".", "checkpoint-1"])
def test_m02_an_adapter_is_folded_into_its_base_as_peft_does_it(
    source: str, adapter: Path, here: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    result = merge(adapter / source, here / "merged", dtype="fp32")
    loaded = AutoModelForSequenceClassification.from_pretrained(here / "merged")
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    labels = loaded.config.num_labels
    whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    expected = PeftModel.from_pretrained(whole, adapter / source).merge_and_unload().state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.float(), rtol=1e-5, atol=1e-5)
    assert result.tensors >= len(expected) - 1
    assert not list((here / "merged").glob("adapter*"))
    assert infer(TEXTS, load().config, model=here / "merged").predictions


def test_an_adapter_of_a_tied_language_model_is_folded_from_the_run_and_from_its_checkpoint(
    tiny: Callable[..., Path], language_words: tuple[str, ...], train_here: Callable[..., Any], here: Path
) -> None:
    from peft import PeftModel

    base, auto = tiny("llama", tie_word_embeddings=True), transformers.AutoModelForCausalLM
    words = (*language_words, f"model.name={base}", "lora.target_modules=all-linear", *STEPS)
    run = train_here(*words, stage=3).output_dir
    ids = torch.arange(12)[None]
    plain = auto.from_pretrained(base)
    before = plain(ids).logits
    expected = PeftModel.from_pretrained(plain, run).eval()(ids).logits
    assert (expected - before).abs().max() > 0.01
    for source in (run, run / "checkpoint-4"):
        merge(source, here / "merged", dtype="fp32", force=True)
        found = auto.from_pretrained(here / "merged").eval()(ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_an_adapter_can_be_kept(adapter: Path, here: Path) -> None:
    merge(adapter, here / "kept", keep_adapter=True, dtype="bf16")
    names = load_file(here / "kept/adapter_model.safetensors")
    assert names.keys() == load_file(adapter / "adapter_model.safetensors").keys()
    assert {value.dtype for value in names.values()} == {torch.bfloat16}
    assert infer(TEXTS, load().config, model=here / "kept").predictions


def test_a_kept_adapter_names_the_base_model_that_is_given(adapter: Path, here: Path) -> None:
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    Path("base").symlink_to(base)
    merge(adapter, here / "kept", keep_adapter=True, base_model="base")
    assert json.loads((here / "kept/adapter_config.json").read_text())["base_model_name_or_path"] == "base"


def test_an_adapter_of_a_model_that_is_here_alone_is_not_pushed(
    adapter: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # test_card.py has a hub; this needs none
    monkeypatch.setattr("dstool.hub.check", lambda repo, *, private: None)
    with pytest.raises(ConfigError, match="which is here alone"):
        merge(adapter, here / "kept", keep_adapter=True, push_to_hub="org/m")
    assert not (here / "kept").exists()


@pytest.mark.parametrize("kept", [True, False])
def test_the_card_of_an_adapter(kept: bool, adapter: Path, here: Path) -> None:
    """What peft saves beside a checkpoint names the base model's folder on this machine."""
    assert str(here.parent) in (adapter / "checkpoint-4/README.md").read_text()
    merge(adapter / "checkpoint-4", here / "merged", keep_adapter=kept)
    card = ModelCard.load(here / "merged/README.md")
    assert (card.data.library_name, card.data.tags) == (
        "peft" if kept else "transformers",
        ["deepspeed", "lora"],
    )
    assert str(here.parent) not in card.content
    assert "| LoRA | r 4, alpha 8 |" in card.text
    snippet = card.text.split("```python\n")[1].split("```")[0]
    exec(compile(snippet, "card", "exec"), {})


def test_a_base_model_that_does_not_fit_is_named(
    adapter: Path, tiny: Callable[..., Path], here: Path
) -> None:
    with pytest.raises(ModelError, match="does not fit the base model"):
        merge(adapter, here / "merged", base_model=str(tiny("bert", hidden_size=16)))
    assert not (here / "merged").exists()


def test_k14_a_checkpoint_of_an_adapter_becomes_the_adapter(adapter: Path) -> None:
    result = consolidate(adapter / "checkpoint-1")
    assert result.files == ("adapter_model.safetensors",)
    final = load_file(adapter / "checkpoint-1/adapter_model.safetensors")
    found = load_file(result.output_dir / "adapter_model.safetensors")
    assert found.keys() == final.keys()
    assert all(torch.equal(found[name].to(final[name].dtype), final[name]) for name in final)
    assert infer(TEXTS, load().config, model=result.output_dir).predictions


def test_an_adapter_without_its_base_model_is_refused(
    words: tuple[str, ...], train_here: Callable[..., Any], adapter: Path, here: Path
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "./gone"}))
    with pytest.raises(ModelError, match=r"\./gone"):
        infer(TEXTS, load().config, model=adapter)


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save", "exclude_modules"])
def test_a_module_that_the_model_has_not_is_refused_with_some_that_it_has(
    key: str, words: tuple[str, ...], train_here: Callable[..., Any], here: Path
) -> None:
    found = refused(ConfigError, train_here, *words, f"lora.{key}=[query, q_proj]")
    assert f"lora.{key}: BertForSequenceClassification has no module 'q_proj'" in found.message
    assert "query" in found.message
    assert not (here / "out").exists()


def test_a_module_of_a_kind_without_adapters_is_refused(
    words: tuple[str, ...], train_here: Callable[..., Any]
) -> None:
    found = refused(ConfigError, train_here, *words, "lora.target_modules=[LayerNorm]")
    assert "not supported" in found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lora.r=0", "lora.r: should be greater than 0, not 0"),
        ("lora.r=-4", "lora.r: should be greater than 0, not -4"),
        ("lora.lora_dropout=1", "lora.lora_dropout: should be less than 1, not 1"),
        ("lora.rank=4", "lora.rank: unknown key"),
        ("lora.lora_alfa=4", "did you mean lora_alpha?"),
        ("lora_alpha=4", "it belongs in lora:"),
        ("lora.target_modules=query", "lora.target_modules: should be"),
    ],
)
def test_a_key_that_cannot_be_used(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(words=[word], required=False)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("model.name=null", "model.from_scratch={model_type: bert}"), "model.from_scratch would be lost"),
        (("train.save_fp32=true",), "train.save_fp32 with lora"),
    ],
)
def test_what_would_leave_no_usable_adapter_is_refused(
    more: tuple[str, ...], said: str, words: tuple[str, ...], train_here: Callable[..., Any], here: Path
) -> None:
    assert said in refused(ConfigError, train_here, *words, *more).message
    assert not (here / "out").exists()
