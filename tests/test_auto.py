"""`init-config --auto`: the stage and offload that plan recommends, for a given model and machine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstool.cli import app, out


@pytest.fixture(autouse=True)
def _json_is_off(here):
    yield
    out.as_json = False


def init(*arguments):
    return CliRunner().invoke(app, ["init-config", "--auto", *arguments])


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


def test_a_model_that_needs_offload_gets_it(here):
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
    folder = here / "large"
    folder.mkdir()
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32}
    (folder / "config.json").write_text(json.dumps({**kind, **sizes}))
    done = init("--model", "large", "--gpus", "1", "--gpu-memory", "40GB", "--micro-batch", "1")
    assert done.exit_code in (0, 2), done.output  # 2: less host memory here than it takes
    if done.exit_code == 0:
        assert "offload_optimizer" in zero()


@pytest.mark.parametrize("words", [("--stage", "2"), ("--offload", "cpu"), ("--preset", "zero2")], ids=str)
def test_what_it_is_to_choose_cannot_be_given(words, tiny):
    done = init("--model", str(tiny("llama")), *words)
    assert done.exit_code == 2
    assert not Path("ds_config.json").exists()


def test_what_fits_nowhere_is_refused_and_nothing_written(tiny):
    done = init("--model", str(tiny("llama")), "--gpus", "1", "--gpu-memory", "1MB")
    assert done.exit_code == 2
    assert not Path("ds_config.json").exists()
