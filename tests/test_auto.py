"""`init-config --auto`: the stage and offload that plan recommends, for a given model and machine."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstool.cli import app, out
from dstool.config import load


@pytest.fixture(autouse=True)
def _json_is_off(here):
    yield
    out.as_json = False


def init(*arguments):
    return command("init-config", "--auto", *arguments)


def command(*words):
    return CliRunner().invoke(app, words)


SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


@pytest.fixture
def large(here):
    """The config of a model with 6.7 billion parameters."""
    (here / "large").mkdir()
    (here / "large" / "config.json").write_text(json.dumps(SIZES))
    return "large"


def zero():
    return json.loads(Path("ds_config.json").read_text())["zero_optimization"]


def test_a_model_that_fits_is_trained_at_the_fastest_stage(tiny):
    model = str(tiny("llama"))
    assert init("--model", model, "--gpus", "2", "--gpu-memory", "80GB").exit_code == 0
    planned = CliRunner().invoke(
        app, ["plan", "--model", model, "--gpus", "2", "--gpu-memory", "80GB", "--json"]
    )
    result = json.loads(planned.stdout)
    assert (zero()["stage"], "offload_optimizer" in zero()) == (result["stage"], result["offload"] != "none")
    assert zero()["stage"] == 1
    assert model in Path("dstool.yaml").read_text()


def test_the_model_of_the_run_file_is_planned_for(tiny):
    Path("dstool.yaml").write_text(
        f"model: {{name: {tiny('gpt2')}, task: causal-lm}}\ntrain: {{warmup_steps: 1}}\n"
    )
    assert init("--gpus", "1", "--gpu-memory", "80GB").exit_code == 0
    assert zero()["stage"] == 1


ONE = ("--gpus", "1", "--gpu-memory", "40GB", "--cpu-memory", "512GB", "--micro-batch", "1")


@pytest.mark.skipif(not shutil.which("g++"), reason="DeepSpeed compiles the optimizer that is offloaded")
def test_a_model_that_needs_offload_gets_it(large):
    done = init("--model", large, *ONE)
    assert done.exit_code == 0, done.output
    assert "offload_optimizer" in zero()


@pytest.mark.parametrize(
    ("words", "of_plan"),
    [
        (("--nodes", "4"), ()),
        (("--seq-len", "32768"), ()),
        (("--lora",), ()),
        (("--activation-checkpointing",), ("--gradient-checkpointing",)),
        (("--cpu-memory", "100GB", "--nvme-space", "2TB"), ()),
        (("--optimizer", "SGD"), ()),
        (("--accumulation", "4"), ("train.gradient_accumulation_steps=4",)),
    ],
    ids=str,
)
def test_it_takes_what_plan_recommends_for_the_same_words(words, of_plan, large):
    """What would not run on this machine does not matter here: plan says what is chosen, and so does it."""
    machine = ("--gpus", "2", "--gpu-memory", "80GB", "--cpu-memory", "512GB", "--micro-batch", "4")
    planned = json.loads(command("plan", "--model", large, *machine, *(of_plan or words), "--json").stdout)
    done = init("--model", large, *machine, *words)
    if planned["stage"] is None:
        assert "fits at no stage" in done.stderr
        return
    offload = "" if planned["offload"] == "none" else f" with offload to {planned['offload']}"
    assert f"large: stage {planned['stage']}{offload} is the fastest that fits" in done.stderr


@pytest.mark.parametrize(("kind", "task"), [("llama", "causal-lm"), ("bert", "text-classification")])
def test_the_new_run_file_is_for_the_task_that_was_planned(kind, task, tiny):
    assert init("--model", str(tiny(kind)), "--gpus", "1").exit_code == 0
    assert load().config.model.task == task


def test_with_lora_the_new_run_file_trains_an_adapter(tiny):
    assert init("--model", str(tiny("llama")), "--lora", "--gpus", "1").exit_code == 0
    assert load().config.lora.target_modules == "all-linear"


def test_with_lora_a_run_file_that_stays_must_have_it(tiny):
    text = f"model: {{name: {tiny('gpt2')}, task: causal-lm}}\ntrain: {{warmup_steps: 1}}\n"
    Path("dstool.yaml").write_text(text)
    done = init("--lora", "--gpus", "1")
    assert (done.exit_code, "lora: {target_modules: all-linear}" in done.stderr) == (2, True)
    Path("dstool.yaml").write_text(text + "lora: {target_modules: all-linear}\n")
    assert init("--lora", "--gpus", "1").exit_code == 0


@pytest.mark.parametrize(
    ("own", "said"),
    [("", "still has no data.block_size"), ("data: {block_size: 128}\n", "keeps data.block_size: 128")],
)
def test_the_length_of_a_run_file_that_stays_is_told_of_and_kept_by_the_next_command(own, said, tiny):
    text = f"model: {{name: {tiny('gpt2')}, task: causal-lm}}\ntrain: {{warmup_steps: 1}}\n{own}"
    Path("dstool.yaml").write_text(text)
    done = init("--gpus", "1", "--seq-len", "64", "--force")
    assert (
        f"dstool.yaml {said}; for the length that was planned for: dstool train data.block_size=64"
        in done.stderr
    )
    assert done.stdout.endswith("dstool train deepspeed=ds_config.json data.block_size=64\n")
    assert Path("dstool.yaml").read_text() == text


@pytest.mark.parametrize("words", [(), ("--seq-len", "64")], ids=str)
def test_a_length_that_is_the_run_files_own_is_not_told_of(words, tiny):
    Path("dstool.yaml").write_text(
        f"model: {{name: {tiny('gpt2')}, task: causal-lm}}\ndata: {{block_size: 64}}\n"
        "train: {warmup_steps: 1}\ndeepspeed: ds_config.json\n"
    )
    done = init("--gpus", "1", *words)
    assert "for the length" not in done.stderr
    assert done.stdout.endswith("  dstool train\n")


@pytest.mark.parametrize(
    "words",
    [("--gpus", "2"), ("--gpu-memory", "80GB"), ("--nodes", "0"), ("--seq-len", "9"), ("--lora",)],
    ids=str,
)
def test_what_is_for_auto_alone_is_refused_without_it(words, here):
    done = command("init-config", "--model", "m", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"try: dstool init-config --auto --model m {' '.join(words)}" in done.stderr
    assert not Path("ds_config.json").exists()


def test_in_an_empty_folder_a_model_is_asked_for(here):
    done = init()
    assert done.exit_code == 2
    assert "--auto needs to know the model" in done.stderr
    assert "dstool init-config --auto --model " in done.stderr


def test_the_json_can_be_printed_for_a_model(tiny):
    done = init("--model", str(tiny("llama")), "--gpus", "2", "--output", "-")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["zero_optimization"]["stage"] == 1
    assert not list(Path().iterdir())


@pytest.mark.parametrize("flag", ["--gpu-memory", "--cpu-memory"])
def test_a_size_without_a_unit_is_refused(flag, tiny):
    done = init("--model", str(tiny("llama")), flag, "80")
    assert done.exit_code == 2
    assert f"try: {flag} 80GB" in done.stderr


@pytest.mark.parametrize(
    "words",
    [("--stage", "2"), ("--offload", "cpu"), ("--offload-param", "cpu"), ("--preset", "zero2")],
    ids=str,
)
def test_what_it_is_to_choose_cannot_be_given(words, tiny):
    done = init("--model", str(tiny("llama")), *words)
    assert done.exit_code == 2
    assert f"{words[0]} says otherwise" in done.stderr
    assert not Path("ds_config.json").exists()


def test_what_fits_nowhere_is_refused_and_nothing_written(tiny):
    done = init("--model", str(tiny("llama")), "--gpus", "1", "--gpu-memory", "1MB", "--lora")
    assert done.exit_code == 2
    assert not Path("ds_config.json").exists()
    assert re.search(
        r"fits at no stage: stage [23].* comes nearest and lacks [0-9.]+ GB on the GPU", done.stderr
    )


@pytest.mark.parametrize("run_file", ["", "deepspeed: gone.json\nmodel: {task: text-classification}\n"])
def test_the_hint_where_nothing_fits_shows_the_whole_plan(run_file, large):
    if run_file:
        Path("dstool.yaml").write_text(run_file)
    done = init("--model", large, "--gpus", "1", "--gpu-memory", "4 GB", "--cpu-memory", "8GB", "--lora")
    hint = done.stderr.partition("try: dstool ")[2]
    shown = command(*shlex.split(hint))
    assert shown.exit_code == 0, shown.output
    lacks = re.search(r"comes nearest and lacks .*", done.stderr)[0]
    assert lacks in shown.stdout
