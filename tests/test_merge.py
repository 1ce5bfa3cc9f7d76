"""A folder that plain Transformers loads, and what is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dstool.config import load
from dstool.consolidate import consolidate
from dstool.errors import CheckpointError, ConfigError, DstoolError, ModelError
from dstool.infer import infer
from dstool.merge import merge

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
AUTO = {
    "bert": transformers.AutoModelForSequenceClassification,
    "gpt2": transformers.AutoModelForCausalLM,
    "llama": transformers.AutoModelForCausalLM,
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    """The folder of a Llama with tied weights, to break."""
    return tiny("llama", tie_word_embeddings=True)


def names(folder: Path) -> list[str]:
    """Every file and folder below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def edit_config(folder: Path, **values: Any) -> None:
    """Set values in config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let `change` alter the tensors of model.safetensors."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_whole(folder: Path, auto: Any, dtype: Any = "auto") -> Any:
    """The model in `folder`, loaded by plain Transformers without a key missing or left over."""
    model, info = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def logits(folder: Path, auto: Any) -> torch.Tensor:
    """What the model in `folder` computes, in fp32."""
    with torch.no_grad():
        found: torch.Tensor = load_whole(folder, auto, torch.float32)(torch.arange(40).view(2, 20)).logits
    return found


def refusal(error: type[DstoolError], *arguments: Any, **options: Any) -> DstoolError:
    """What `merge` raises: one line, what to do, and no word of a temporary folder."""
    with pytest.raises(error) as caught:
        merge(*arguments, **options)
    assert "\n" not in caught.value.message
    assert ".tmp-" not in caught.value.message
    assert caught.value.hint
    return caught.value


# --- what is written -------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("source", ["out", "out/checkpoint-16", "out/checkpoint-16/global_step16"])
@pytest.mark.parametrize("stage", [None, 2])
def test_a_classifier_of_a_run_keeps_its_labels_and_computes_what_trainer_saved(
    source: str, stage: int | None, trained: Path, here: Path
) -> None:
    result = merge(trained / source, here / "merged", zero_stage=stage)
    assert (result.output_dir, result.source) == (here / "merged", trained / source)
    assert (result.architecture, result.dtype) == ("BertForSequenceClassification", "fp32")
    auto = AUTO["bert"]
    torch.testing.assert_close(logits(result.output_dir, auto), logits(trained / "out", auto))
    assert load_whole(result.output_dir, auto).config.id2label == {0: "negative", 1: "positive"}
    assert transformers.AutoTokenizer.from_pretrained(result.output_dir)("a lamp")["input_ids"]
    assert not set(names(result.output_dir)) & {"zero_to_fp32.py", "training_args.bin", "run.json"}


@pytest.mark.distributed
def test_a_consolidated_folder_is_a_source(trained: Path, here: Path) -> None:
    gathered = consolidate(trained / "out/checkpoint-1", here / "weights", file_format="bin")
    merge(gathered.output_dir, here / "merged")
    auto = AUTO["bert"]
    torch.testing.assert_close(logits(here / "merged", auto), logits(trained / "out/checkpoint-1", auto))


@pytest.mark.distributed
def test_the_config_of_the_run_serves_a_checkpoint_without_one(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained / "out", here / "out")
    (here / "out/checkpoint-1/config.json").unlink()
    monkeypatch.chdir(here / "out/checkpoint-1")
    assert merge(Path(), here / "merged").architecture == "BertForSequenceClassification"
    (here / "out/config.json").unlink()
    found = refusal(ModelError, here / "out/checkpoint-1", here / "other")
    assert "has a config.json" in found.message


@pytest.mark.parametrize("size", ["5GB", "40KB"])
@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt2", False)]
)
def test_M07_the_head_is_kept_where_it_is_not_the_embedding(
    kind: str, tied: bool, size: str, tiny: Callable[..., Path], here: Path
) -> None:
    source = tiny(kind, tie_word_embeddings=tied)
    result = merge(source, here / "merged", max_shard_size=size)
    torch.testing.assert_close(logits(here / "merged", AUTO[kind]), logits(source, AUTO[kind]))
    state: dict[str, torch.Tensor] = {}
    for file in (here / "merged").glob("*.safetensors"):
        state.update(load_file(file))
    assert (HEAD in state) is not tied
    assert (len(result.files) > 2) is (size != "5GB")
    if size != "5GB":
        index = json.loads((here / "merged/model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == state.keys()
        assert all((here / "merged" / name).is_file() for name in index["weight_map"].values())


def test_M07_a_tied_head_that_was_stored_twice_is_stored_once(model: Path, here: Path) -> None:
    edit_weights(model, lambda state: state.update({HEAD: state[EMBEDDING].clone()}))
    merge(model, here / "merged")
    assert HEAD not in load_file(here / "merged/model.safetensors")
    torch.testing.assert_close(logits(here / "merged", AUTO["llama"]), logits(model, AUTO["llama"]))


def test_M07_a_head_that_differs_is_never_dropped(model: Path, here: Path) -> None:
    edit_weights(model, lambda state: state.update({HEAD: state[EMBEDDING] + 1}))
    merge(model, here / "merged")
    assert HEAD in load_file(here / "merged/model.safetensors")


def test_M04_the_chat_template_and_the_generation_config_come_along(model: Path, here: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0.7}))
    merge(model, here / "merged")
    turns = [{"role": "user", "content": "램프?"}, {"role": "assistant", "content": "a warm light"}]
    one, other = (
        transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False)
        for folder in (model, here / "merged")
    )
    assert one == other == "<user>램프?<end><assistant>a warm light<end>"
    settings = transformers.GenerationConfig.from_pretrained(here / "merged")
    assert (settings.do_sample, settings.top_p) == (True, 0.7)


@pytest.mark.parametrize("trained_in", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_M08_the_config_says_the_dtype_that_the_weights_have(
    dtype: Any, trained_in: str, model: Path, here: Path
) -> None:
    """The weights of the source are fp32 masters, whatever its config says that the model was trained in."""
    edit_config(model, dtype=trained_in)
    result = merge(model, here / "merged", dtype=dtype)
    (stored,) = {value.dtype for value in load_file(here / "merged/model.safetensors").values()}
    assert json.loads((here / "merged/config.json").read_text())["dtype"] == str(stored)[6:]
    assert load_whole(here / "merged", AUTO["llama"]).dtype == stored
    wanted = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    assert result.dtype == wanted[str(stored)[6:]] == (dtype or wanted[trained_in])


def test_a_merged_sharded_model_answers(model: Path, here: Path) -> None:
    merge(model, here / "merged", max_shard_size="40KB")
    config = load(words=["infer.max_new_tokens=4"], required=False).config
    one, other = (infer(["a lamp"], config, model=folder) for folder in (here / "merged", model))
    assert one.predictions == other.predictions


def test_M05_rows_beyond_the_tokens_of_the_tokenizer_are_kept(model: Path, here: Path) -> None:
    padded = AUTO["llama"].from_pretrained(model)
    padded.resize_token_embeddings(320)
    padded.save_pretrained(model)
    merge(model, here / "merged")
    assert load_whole(here / "merged", AUTO["llama"]).get_input_embeddings().num_embeddings == 320


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.distributed
def test_another_stage_than_the_checkpoints_is_refused(trained: Path, here: Path) -> None:
    found = refusal(CheckpointError, trained / "out", here / "merged", zero_stage=3)
    assert "is of ZeRO stage 2, not 3" in found.message
    assert found.hint == "--zero-stage 2"
    assert names(here) == []


def test_a_stage_of_a_folder_without_a_checkpoint_is_refused(model: Path, here: Path) -> None:
    assert "no ZeRO state" in refusal(CheckpointError, model, here / "merged", zero_stage=2).message


def add_tokens(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new1>", "<new2>"])
    tokenizer.save_pretrained(folder)


def lose_a_shard(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def swap_weights(name: str, content: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_text(content)

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "M01 weights of size 0": (
        lambda folder: edit_weights(folder, lambda state: state.update({EMBEDDING: torch.empty(0)})),
        "model.embed_tokens.weight is empty, shape [0]: it was saved while ZeRO-3 had it partitioned",
    ),
    "M05 vocab_size beyond the rows": (
        lambda folder: edit_config(folder, vocab_size=512),
        "model.embed_tokens.weight is of shape [300, 32], ",
    ),
    "M05 tokens beyond the rows": (
        add_tokens,
        "the tokenizer has 302 tokens, the model's vocab_size is 300",
    ),
    "M11 a shard of the index": (
        lose_a_shard,
        "model-00002-of-00003.safetensors is missing, and model.safetensors.index.json names it",
    ),
    "an index of nothing": (
        swap_weights("model.safetensors.index.json", "{}"),
        "is no index of weight files",
    ),
    "an index cut short": (swap_weights("model.safetensors.index.json", "{"), "is no index of weight files"),
    "a file cut short": (cut, "model.safetensors: cannot be read"),
    "a bin file of something else": (
        swap_weights("pytorch_model.bin", "x"),
        "pytorch_model.bin: cannot be read",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds config.json and no weights beside it: model.safetensors is missing",
    ),
    "no weights of an adapter": (
        lambda folder: (folder / "model.safetensors").rename(folder / "adapter_config.json"),
        "holds adapter_config.json and no weights beside it: adapter_model.safetensors is missing",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "a config cut short": (
        lambda folder: (folder / "config.json").write_text("{"),
        "the config cannot be loaded",
    ),
    "a config of another type": (
        lambda folder: edit_config(folder, hidden_size="wide"),
        "config.json: its values make no model",
    ),
    "an architecture for no task": (
        lambda folder: edit_config(folder, architectures=["LlamaModel"]),
        "holds LlamaModel, which is for none of the tasks",
    ),
    "a tokenizer cut short": (
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        "the tokenizer cannot be loaded",
    ),
    "a weight missing": (
        lambda folder: edit_weights(folder, lambda state: state.pop("model.norm.weight")),
        "1 missing keys among its weights, model.norm.weight is one",
    ),
    "a weight left over": (
        lambda folder: edit_weights(folder, lambda state: state.update({"odd": torch.ones(2)})),
        "1 unexpected keys among its weights, odd is one",
    ),
    "no folder": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_and_nothing_written(case: str, model: Path, here: Path) -> None:
    change, said = BROKEN[case]
    change(model)
    found = refusal(DstoolError, model, here / "a/merged")
    assert said in found.message
    assert found.exit_code == 3
    assert names(here) == []


def test_M01_the_hint_points_at_the_shards(model: Path, here: Path) -> None:
    BROKEN["M01 weights of size 0"][0](model)
    assert "dstool consolidate checkpoint-N" in str(refusal(CheckpointError, model, here / "merged").hint)


@pytest.mark.parametrize("said", ["max_shard_size 'big' is no size", "make no model"])
def test_a_failure_with_force_leaves_what_was_there(said: str, model: Path, here: Path) -> None:
    (here / "merged").mkdir()
    (here / "merged/config.json").write_text("mine")
    size = "big" if "big" in said else "5GB"
    if size == "5GB":
        edit_config(model, num_hidden_layers="two")
    assert said in refusal(DstoolError, model, here / "merged", max_shard_size=size, force=True).message
    assert names(here) == ["merged", "merged/config.json"]


def test_force_replaces_nothing_but_a_model(model: Path, here: Path) -> None:
    run = Path(shutil.copytree(model, here / "other-run"))
    (run / "run.json").write_text("{}")
    found = refusal(ConfigError, model, run, force=True)
    assert found.message.startswith(f"{run / 'run.json'} is nothing that dstool wrote")
    mine = here / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("# Mine\n")
    assert f"{mine / 'README.md'} is nothing" in refusal(ConfigError, model, mine, force=True).message
    assert "current folder" in refusal(ConfigError, model, Path(), force=True).message
    assert (run / "model.safetensors").is_file()


def test_a_folder_that_exists_is_left_alone_and_replaced_whole_by_force(model: Path, here: Path) -> None:
    merge(model, here / "merged", max_shard_size="40KB")
    before = names(here)
    assert "--force" in str(refusal(ConfigError, model, here / "merged").hint)
    assert names(here) == before
    merge(model, here / "merged", force=True)
    merge(model, here / "fresh")
    assert names(here / "merged") == names(here / "fresh")


def test_a_checkpoint_is_never_replaced_by_a_model(trained: Path, here: Path) -> None:
    run = Path(shutil.copytree(trained / "out", here / "out"))
    before = names(here)
    error = refusal(ConfigError, run, run / "checkpoint-16", force=True)
    assert "holds a ZeRO checkpoint" in str(error)
    for place in ("checkpoint-16/merged", "checkpoint-1/global_step1/merged"):
        assert "lies in the checkpoint" in str(refusal(ConfigError, run, run / place))
    assert names(here) == before


# --- the precision of a run's weights --------------------------------------------------------------------


@pytest.fixture
def sixteen_bits(train_here: Callable[..., Any]) -> Callable[..., Path]:
    """The folder of a run in bf16, with a checkpoint after each of its two or three steps."""

    def make(*words: str) -> Path:
        saving = ("train.save_strategy=steps", "train.save_steps=1", "train.save_first_step=false")
        words = ("train.bf16=true", "train.max_steps=3", "train.learning_rate=1e-2", *saving, *words)
        return Path(train_here(*words).output_dir)

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder with one file."""
    return dict(load_file(folder / "model.safetensors"))


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [None, 2])
def test_fp32_of_a_run_in_16_bits_is_that_of_its_masters(
    stage: int | None, sixteen_bits: Callable[..., Path], here: Path
) -> None:
    run = sixteen_bits()
    merge(run, here / "rounded", zero_stage=stage)
    assert all(torch.equal(value, weights(run)[name]) for name, value in weights(here / "rounded").items())
    merge(run, here / "exact", dtype="fp32", zero_stage=stage)
    masters = weights(consolidate(run / "checkpoint-3", here / "masters").output_dir)
    exact = weights(here / "exact")
    assert all(torch.equal(exact[name], masters[name]) for name in exact)
    assert any((value != value.bfloat16().float()).any() for value in exact.values())


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [None, 2])
def test_weights_that_stay_rounded_are_warned_of(
    stage: int | None,
    sixteen_bits: Callable[..., Path],
    here: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A checkpoint of another step than the final weights gives nothing, whatever --zero-stage says."""
    run = sixteen_bits()
    shutil.rmtree(run / "checkpoint-3")
    caplog.set_level("INFO", "dstool")
    merge(run, here / "merged", dtype="fp32", zero_stage=stage)
    assert "written as fp32 they stay rounded" in caplog.text
    assert all(
        torch.equal(value.bfloat16(), weights(run)[name]) for name, value in weights(here / "merged").items()
    )


@pytest.mark.distributed
def test_the_masters_of_the_best_model_are_those_of_its_checkpoint(
    sixteen_bits: Callable[..., Path], here: Path
) -> None:
    run = sixteen_bits("train.load_best_model_at_end=true", "train.eval_strategy=steps", "train.eval_steps=1")
    record = json.loads((run / "run.json").read_text())
    merge(run, here / "exact", dtype="fp32")
    masters = weights(consolidate(run / record["best"], here / "masters").output_dir)
    assert all(torch.equal(value, masters[name]) for name, value in weights(here / "exact").items())


@pytest.mark.parametrize("above", [".", "..", "../../"])
def test_an_output_that_is_or_holds_the_input_is_refused_even_with_force(
    above: str, model: Path, here: Path
) -> None:
    source = Path(shutil.copytree(model, here / "runs/one"))
    before = names(here)
    assert "is the input folder, or holds it" in str(refusal(ConfigError, source, source / above, force=True))
    assert names(here) == before
