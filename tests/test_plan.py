"""What a plan says, held against the tensors of real runs, and what it makes of odd models and machines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from dstool import cli, models
from dstool.config import Config, LoraSection, ModelSection, load
from dstool.ds_config import memory
from dstool.ds_config.build import build
from dstool.ds_config.options import Options as JsonOptions
from dstool.errors import ConfigError, ModelError
from dstool.plan import Asked, Options, PlanResult, next_lines, plan, show

GB = 1_000_000_000
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
}
LAYERS = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
}
SMALL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 129,
}


def scratch(values: Mapping[str, Any], **flags: Any) -> Config:
    """The config of a run that trains a language model of these sizes."""
    flags = {name.replace("__", "."): value for name, value in flags.items()}
    model = {"model.task": "causal-lm", "model.from_scratch": dict(values)}
    return load(flags={**model, **flags}, required=False).config


def planned(
    values: Mapping[str, Any], *, flags: Mapping[str, Any] | None = None, **options: Any
) -> PlanResult:
    """The plan for it, on GPUs of 80 GB and hosts of 512 GB unless `options` say otherwise."""
    machine = {"gpus": 8, "gpu_memory": "80GB", "cpu_memory": "512GB", **options}
    return plan(scratch(values, **(flags or {})), Options(**machine))


def of(result: PlanResult, stage: int, offload: str = "none") -> Any:
    return next(each for each in result.choices if (each.stage, each.offload) == (stage, offload))


# --- the live tensors ----------------------------------------------------------------------------------


def cases() -> dict[str, dict[str, Any]]:
    """The flags of every run that is weighed, by name."""
    found: dict[str, dict[str, Any]] = {}
    for lora in ("full", "lora"):
        for precision in ("bf16", "fp32"):
            for stage in (0, 1, 2, 3):
                found[f"{lora}-{precision}-{stage}"] = case(stage, precision, lora=lora == "lora")
    for stage in (1, 2, 3):
        found[f"fp32-accumulation-{stage}"] = case(stage, "bf16", data_types={"grad_accum_dtype": "fp32"})
    found["offload-2"], found["offload-3"] = (case(stage, "bf16", offload="cpu") for stage in (2, 3))
    found["own-optimizer-2"] = case(2, "bf16", optimizer="none")
    return found


def case(
    stage: Any,
    precision: Any,
    *,
    lora: bool = False,
    offload: Any = "none",
    optimizer: Any = "AdamW",
    **ds: Any,
) -> dict[str, Any]:
    options = JsonOptions(stage=stage, precision=precision, offload=offload, optimizer=optimizer)
    flags: dict[str, Any] = {"deepspeed": {**build(options), **ds}, "train.bf16": precision == "bf16"}
    return {**flags, "lora": {"r": 4, "target_modules": "all-linear"}} if lora else flags


@pytest.fixture(scope="module")
def live(
    tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, command: Callable[..., Any]
) -> tuple[Path, dict[str, list[dict[str, int]]]]:
    """The model that was trained, and for each case what the tensors of each rank weighed."""
    folder = tmp_path_factory.mktemp("live")
    sizes = {name: value for name, value in SMALL.items() if name not in {"model_type", "vocab_size"}}
    model = tiny("llama", tie_word_embeddings=True, **sizes)
    (folder / "cases.json").write_text(json.dumps(list(cases().values())))
    script = Path(__file__).with_name("live_memory.py")
    command("deepspeed", "--num_gpus", "2", str(script), str(model), "cases.json", "found", cwd=folder)
    ranks = [json.loads((folder / f"found.{rank}").read_text()) for rank in (0, 1)]
    return model, {name: [rank[index] for rank in ranks] for index, name in enumerate(cases())}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_the_bytes_are_those_of_the_live_tensors(name: str, live: Any) -> None:
    """Weights, gradients and optimizer on the fullest of two ranks, each and together, within 3%."""
    model, weighed = live
    flags = {"model.name": str(model), "model.task": "causal-lm", "data.block_size": 32, **cases()[name]}
    flags["train.per_device_train_batch_size"] = 2
    result = plan(load(flags=flags, required=False).config, Options(gpus=2))
    zero = cases()[name]["deepspeed"]["zero_optimization"]
    found = of(result, zero["stage"], "cpu" if "offload_optimizer" in zero else "none")
    # On the CPU, what is offloaded lies in the same memory.
    said = {kind: getattr(found.gpu, kind) + getattr(found.host, kind) // 2 for kind in vars(found.gpu)}
    kinds = ("weights", "gradients", "optimizer")
    there = {kind: max(rank[kind] for rank in weighed[name]) for kind in (*kinds, "others")}
    assert {kind: said[kind] for kind in kinds} == pytest.approx(
        {kind: there[kind] for kind in kinds}, rel=0.03
    )
    assert sum(said[kind] for kind in kinds) == pytest.approx(sum(there[kind] for kind in kinds), rel=0.03)
    if zero["stage"] == 1:
        waiting = max(rank["waiting"] for rank in weighed[name])
        assert waiting <= 1.03 * (said["gradients"] + said["buffers"] + said["activations"])
    assert there["others"] <= 1.03 * said["buffers"] + 4096, "there is a kind of tensor that the plan forgot"


# --- models ----------------------------------------------------------------------------------------------


def test_a_large_model_on_one_machine() -> None:
    result = planned(LLAMA_8B, seq_len=2048, micro_batch=1, gradient_checkpointing=True)
    assert result.parameters == result.trained == 8_030_261_248
    assert of(result, 0).gpu.weights == pytest.approx(2 * result.parameters, rel=1e-6)
    assert of(result, 0).gpu.optimizer == 12 * result.parameters
    assert of(result, 2).gpu.optimizer == pytest.approx(12 * result.parameters / 8, rel=1e-6)
    assert of(result, 3).gpu.weights == pytest.approx(2 * result.parameters / 8, rel=0.01)
    assert not of(result, 0).fits
    assert (result.stage, result.offload) == (1, "none")
    assert of(result, 3, "nvme").nvme_bytes == pytest.approx(18 * result.parameters, rel=0.01)
    assert result.later.consolidate_disk == 4 * result.parameters


def test_less_memory_means_a_slower_choice_and_never_a_faster_one() -> None:
    found = []
    for size in (200, 80, 40, 24, 16, 10, 8, 6):
        options = {
            "gpu_memory": f"{size}GB",
            "seq_len": 512,
            "micro_batch": 1,
            "gradient_checkpointing": True,
        }
        result = planned(LLAMA_8B, cpu_memory="1TB", **options)
        found.append((result.stage, result.offload))
    order = [memory.BY_SPEED.index(each) if each[0] is not None else 99 for each in found]  # type: ignore[arg-type]
    assert order == sorted(order)
    assert found[0] == (1, "none")
    assert set(found) >= {(1, "none"), (2, "cpu"), (3, "cpu")}


def test_without_host_memory_the_last_resort_is_nvme() -> None:
    options = {"gpus": 2, "gpu_memory": "24GB", "seq_len": 512, "micro_batch": 1}
    wide = planned({**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192}, cpu_memory="800GB", **options)
    assert (wide.stage, wide.offload) == (3, "nvme")
    assert of(wide, 3, "cpu").lacks.keys() == {"host"}
    short = planned(
        {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192},
        cpu_memory="800GB",
        nvme_space="10GB",
        **options,
    )
    assert short.stage is None
    assert of(short, 3, "nvme").lacks.keys() == {"nvme"}


def test_tied_weights_are_counted_once() -> None:
    tied, apart = (planned({**SMALL, "tie_word_embeddings": tie}).parameters for tie in (True, False))
    assert apart - tied == 300 * 64


def test_all_experts_are_held_and_few_compute() -> None:
    sizes = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("mixtral", **{k: v for k, v in sizes.items() if k != "model_type"})
    )
    result = planned(sizes)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    dense, more = (planned({**sizes, "num_experts_per_tok": count}) for count in (1, 4))
    assert of(dense, 2).gpu.activations < of(result, 2).gpu.activations < of(more, 2).gpu.activations


def test_frozen_parameters_cost_their_weights_alone() -> None:
    result = planned(LLAMA_8B, flags={"lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}})
    adapter = 32 * 8 * ((4096 + 4096) + (4096 + 1024))
    assert result.trained == adapter
    assert of(result, 2).gpu.optimizer == pytest.approx(12 * adapter / 8, rel=0.01)
    assert of(result, 2).gpu.weights == pytest.approx(2 * (8_030_261_248 + adapter), rel=1e-6)


def test_quantised_weights(tiny: Callable[..., Path], here: Path) -> None:
    folder = tiny("llama")
    path = folder / "config.json"
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    flags = {"model.name": str(folder), "model.task": "causal-lm"}
    with pytest.raises(ModelError, match="quantised to 4 bits") as caught:
        plan(load(flags=flags, required=False).config)
    assert "--lora" in str(caught.value.hint)
    on_file = plan(load(flags={**flags, "lora": {}}, required=False).config, Options(gpus=1))
    adapter = of(on_file, 0).gpu.gradients
    size = (folder / "model.safetensors").stat().st_size
    assert of(on_file, 0).gpu.weights == pytest.approx(size + adapter, rel=0.01)
    (folder / "model.safetensors").unlink()
    estimated = plan(load(flags={**flags, "lora": {}}, required=False).config, Options(gpus=1))
    assert of(estimated, 0).gpu.weights < size / 2


def test_an_unknown_architecture_is_taken_from_its_files(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    config = load(flags={"model.name": str(folder), "model.task": "causal-lm"}, required=False).config
    whole = plan(config)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "brand-new"}))
    files = plan(config)
    assert files.parameters == whole.parameters
    assert of(files, 3).gpu.optimizer == of(whole, 3).gpu.optimizer
    assert of(files, 2).gpu.activations == of(whole, 2).gpu.activations
    with pytest.raises(ModelError, match="where an adapter would go"):
        plan(config.model_copy(update={"lora": LoraSection()}))
    (folder / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        plan(config)


def test_no_weight_is_read(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    result = plan(load(flags={"model.name": str(folder), "model.task": "causal-lm"}, required=False).config)
    assert result.parameters > 0
    assert torch.get_default_device().type == "cpu"


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="nowhere/to/be") as caught:
        plan(load(flags={"model.name": "./nowhere/to/be"}, required=False).config)
    assert caught.value.hint == "set --model FOLDER_OR_HUB_NAME"


NO_HEADS = {"hidden_size": 100, "num_attention_heads": 7}


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    [
        ({"model_type": "vit"}, "of type vit, of which Transformers has none for", "name a text model"),
        (
            {"model_type": "new9"},
            f"Transformers {transformers.__version__} knows no",
            "pip install --upgrade",
        ),
        ({}, "has no model_type", "name a folder that"),
        ([], "has no model_type", "name a folder that"),
        ({"model_type": "gpt2", "n_embd": -5}, "config.json: its values make no model: ", "correct them"),
        ({"model_type": "llama", **NO_HEADS}, "config.json: its values make no model: ", "correct them"),
    ],
    ids=str,
)
def test_a_config_of_no_model_that_can_be_planned(values: Any, said: str, hint: str, here: Path) -> None:
    (here / "m").mkdir()
    (here / "m/config.json").write_text(json.dumps(values))
    config = load(flags={"model.name": str(here / "m"), "model.task": "causal-lm"}, required=False).config
    with pytest.raises(ModelError) as caught:
        plan(config)
    assert said in caught.value.message
    assert str(caught.value.hint).startswith(hint)


def test_sizes_in_the_run_file_that_make_no_model() -> None:
    with pytest.raises(ModelError, match="its values make no model"):
        planned({"model_type": "gpt2", "n_embd": -5})
    with pytest.raises(ModelError, match="knows no model_type new9"):
        planned({"model_type": "new9"})


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * GB),
        ("80 GB", 80 * GB),
        ("80g", 80 * GB),
        ("80GiB", 80 * 1024**3),
        ("80gib", 80 * 1024**3),
        ("1.5TB", 1500 * GB),
        ("512MB", GB * 512 // 1000),
        ("1000B", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert memory.parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-80GB", "0", "0GB", "80 i", "eighty", "1e3GB"])
def test_what_is_no_size_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory") as caught:
        plan(scratch(SMALL), Options(gpu_memory=text))
    assert "--gpu-memory 80GB" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["gpu_memory", "cpu_memory", "nvme_space"])
def test_a_size_without_a_unit_is_asked_for_one(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} 80: of which unit") as caught:
        plan(scratch(SMALL), Options(**{name: "80"}))  # type: ignore[arg-type]
    assert str(caught.value.hint).startswith(f"{flag} 80GB")


@pytest.mark.parametrize("name", ["gpus", "nodes", "micro_batch", "seq_len"])
@pytest.mark.parametrize("value", [0, -1])
def test_none_of_something_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} {value}: must be 1 or more"):
        plan(scratch(SMALL), Options(**{name: value}))  # type: ignore[arg-type]


def test_more_ranks_than_elements() -> None:
    result = planned(SMALL, gpus=8, nodes=4000)
    assert of(result, 2).gpu.gradients > 0
    assert of(result, 3).gpu.optimizer > 0


def test_the_settings_of_the_run_file_are_taken() -> None:
    ds = build(JsonOptions(stage=2, precision="auto", optimizer="Adagrad"))
    ds["zero_optimization"]["reduce_bucket_size"] = 1000
    flags = {
        "deepspeed": ds,
        "train__fp16": True,
        "train__per_device_train_batch_size": 3,
        "train__gradient_accumulation_steps": 4,
        "train__gradient_checkpointing": True,
        "data__block_size": 99,
    }
    setup = planned(SMALL, flags=flags).setup
    assert (setup.precision, setup.state_bytes, setup.reduce_bucket_size) == ("fp16", 4, 1000)
    assert (setup.micro_batch, setup.seq_len, setup.accumulates, setup.checkpointing) == (3, 99, True, True)
    over = planned(SMALL, flags=flags, micro_batch=5, precision="fp32", optimizer="AdamW").setup
    assert (over.micro_batch, over.precision, over.state_bytes) == (5, "fp32", 8)


def test_whole_gradients_are_kept_at_stage_1_and_beside_the_activations_where_they_accumulate() -> None:
    once, more = (
        planned(LLAMA_8B, micro_batch=1, seq_len=512, flags={"train__gradient_accumulation_steps": n})
        for n in (1, 4)
    )
    whole = 2 * once.parameters
    for result in (once, more):
        gpu = of(result, 1).gpu
        assert gpu.gradients + gpu.buffers + gpu.activations >= whole
    assert of(more, 1).gpu.gradients + of(more, 1).gpu.buffers >= whole
    assert of(more, 1).gpu_bytes > of(once, 1).gpu_bytes > of(once, 2).gpu_bytes
    assert of(more, 2) == of(once, 2)


def test_activations_grow_with_the_tokens_and_shrink_by_checkpointing() -> None:
    one, two = (of(planned(LLAMA_8B, micro_batch=n, seq_len=512), 2).gpu.activations for n in (1, 2))
    few = of(planned(LLAMA_8B, micro_batch=1, seq_len=512, gradient_checkpointing=True), 2).gpu.activations
    assert two == 2 * one
    assert few < one / 3


def test_the_activations_of_the_paper() -> None:
    """34 sbh for each layer of a plain transformer, and 5 as^2b for the scores (Korthikanti et al., 4.1)."""
    plain = {"hidden_size": 1024, "layers": 24, "heads": 16, "key_value_heads": 16, "intermediate_size": 4096}
    setup = memory.Setup(micro_batch=4, seq_len=2048)
    base = 4 * 2048 * 1024
    more = memory.MORE_THAN_THE_PAPER
    found = memory.activations(memory.ModelShape((), (), **plain), setup)
    assert found == pytest.approx(more * (24 * 34 + 4) * base)
    found = memory.activations(memory.ModelShape((), (), attention_matrix=True, **plain), setup)
    assert found == pytest.approx(more * (24 * (34 * base + 5 * 16 * 2048**2 * 4) + 4 * base))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "bert", "gpt2"])
def test_the_activations_are_those_that_a_forward_pass_keeps(kind: str, precision: Any) -> None:
    """Dropout of attention is off: on the CPU it would keep the matrix of scores; kernels of GPUs do not."""
    sizes: dict[str, Any] = (
        {**LAYERS, "num_key_value_heads": 4} if kind in {"llama", "qwen2"} else dict(LAYERS)
    )
    section = ModelSection(
        task="text-classification",
        from_scratch={"model_type": kind, **sizes, "attention_probs_dropout_prob": 0.0, "attn_pdrop": 0.0},
    )
    config = models._fresh_config(section)
    config.pad_token_id = 0
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(models.DTYPES[precision])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.randint(1, 100, (4, 128))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(input_ids=ids, labels=torch.zeros(4, dtype=torch.long))
    there = sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)
    setup = memory.Setup(precision=precision, micro_batch=4, seq_len=128)
    assert memory.activations(models.shape_of(section, None), setup) == pytest.approx(there, rel=0.2)


# --- what is shown ------------------------------------------------------------------------------------------


def test_where_nothing_fits_it_says_by_how_much_and_what_would_help() -> None:
    result = planned(LLAMA_8B, gpus=1, gpu_memory="4GB", cpu_memory="32GB", micro_batch=4)
    assert (result.stage, result.offload) == (None, None)
    *_, nothing, help_line = show(result, Asked(Config())).splitlines()
    assert nothing.startswith("nothing fits; stage 3")
    assert "GB on the GPU" in nothing
    assert all(word in help_line for word in ("--lora", "--micro-batch 2", "--gpus 2"))


def test_the_recommendation_can_be_typed() -> None:
    lines = show(
        planned(LLAMA_8B, gpus=2, gpu_memory="40GB", micro_batch=1, seq_len=512), Asked(Config())
    ).splitlines()
    assert lines[-2].startswith("next: dstool init-config --stage ")
    assert sum("fits, the fastest" in line for line in lines) == 1


def run(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(cli.app, ["plan", *words])
    assert done.exit_code == code, done.output
    return done


def test_plan_alone_works_in_the_folder_of_a_run(here: Path) -> None:
    CliRunner().invoke(cli.app, ["init-config", "--stage", "2"])
    shown = run().stdout
    assert "bert: 554,626 parameters" in shown
    assert "assumed: 80.0 GB on each GPU" in shown or torch.cuda.is_available()
    assert "recommended: stage 1" in shown


def test_json_is_one_object_in_bytes(here: Path, tiny: Callable[..., Path]) -> None:
    found = json.loads(
        run("--model", str(tiny("llama")), "--gpus", "2", "--gpu-memory", "80GiB", "--json").stdout
    )
    assert found["limits"]["gpu"] == 80 * 1024**3
    assert (found["stage"], found["offload"]) == (1, "none")
    assert len(found["choices"]) == len(memory.CHOICES)
    assert found["choices"][0]["gpu"].keys() == {
        "weights",
        "gradients",
        "optimizer",
        "buffers",
        "activations",
    }


def test_a_model_named_alone_is_planned_for_what_it_is_for(here: Path, tiny: Callable[..., Path]) -> None:
    plain = json.loads(run("--model", str(tiny("llama")), "--json").stdout)
    lora = json.loads(run("--model", str(tiny("llama")), "--lora", "--json").stdout)
    assert plain["trained"] == plain["parameters"]
    assert lora["trained"] < plain["trained"] < lora["parameters"]


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("--model", "./gone"), "gone", 3),
        (("--model", "m", "--gpus", "0"), "--gpus 0: must be 1 or more", 2),
        ((), "no dstool.yaml", 2),
    ],
)
def test_failures_are_two_lines(words: tuple[str, ...], said: str, code: int, tiny: Any, here: Path) -> None:
    (here / "m").symlink_to(tiny("llama"))
    done = run(*words, code=code)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
    assert not done.stdout


@pytest.mark.parametrize("words", [(), ("model.task=causal-lm",)], ids=str)
def test_a_model_for_the_other_task_alone_says_what_to_type(words: tuple[str, ...], here: Path) -> None:
    (here / "t5").mkdir()
    kind = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64}
    (here / "t5" / "config.json").write_text(json.dumps(kind))
    lines = run("--model", "t5", *words, code=3).stderr.splitlines()
    assert lines == [
        "error: t5: Transformers has no such model for causal-lm, only for text-classification",
        "try: dstool plan --model t5 model.task=text-classification "
        "(with init-config --auto: --task text-classification)",
    ]
    run("--model", "t5", "model.task=text-classification")


@pytest.mark.parametrize(
    ("optimizer", "state"), [("AdamW", 8), ("SGD", 4), ("Lion", 4), ("Muon", 4), ("FusedAdam", 8)]
)
def test_the_state_is_that_of_the_optimizer_as_init_config_writes_it(optimizer, state):
    assert plan(scratch(SMALL), Options(optimizer=optimizer)).setup.state_bytes == state


@pytest.mark.parametrize(("momentum", "state"), [(0.9, 4), (0.0, 0)])
def test_sgd_has_a_state_with_momentum_alone(momentum, state):
    params = {"lr": "auto", "momentum": momentum}
    ds = {**build(JsonOptions(optimizer="SGD")), "optimizer": {"type": "SGD", "params": params}}
    assert plan(scratch(SMALL, deepspeed=ds)).setup.state_bytes == state


def test_the_next_command_says_all_that_was_planned(tiny: Callable[..., Path], here: Path) -> None:
    model = str(tiny("llama"))
    words = (
        "--precision",
        "fp32",
        "--micro-batch",
        "2",
        "--optimizer",
        "Adagrad",
        "--gradient-checkpointing",
    )
    *_, next_line, then = run("--model", model, *words, "--lora").stdout.splitlines()
    done = CliRunner().invoke(cli.app, shlex.split(next_line)[2:])
    assert done.exit_code == 0, done.output
    written = json.loads(Path("ds_config.json").read_text())
    assert (written["optimizer"]["type"], written["train_micro_batch_size_per_gpu"]) == ("Adagrad", 2)
    config = load(words=shlex.split(then)[3:]).config
    assert (config.model.name, config.model.task) == (model, "causal-lm")
    assert config.train.arguments()["gradient_checkpointing"] is True
    assert config.lora is not None


HERE = {"deepspeed": "ds_config.json"}


@pytest.mark.parametrize(
    ("asked", "options", "train"),
    [
        (Asked(scratch({}, **HERE)), "", None),
        (
            Asked(scratch({}, **HERE), Options(seq_len=64, micro_batch=2)),
            " --micro-batch 2",
            "data.block_size=64",
        ),
        (Asked(scratch({}, **HERE), words=("train.run_name=a b",)), "", "'train.run_name=a b'"),
        (Asked(scratch({}, **HERE), adds_lora=True), "", "lora.target_modules=all-linear"),
        (Asked(scratch({}, **HERE), run_file=Path("b.yaml")), "", "--config b.yaml"),
        (Asked(scratch({})), "", "deepspeed=ds_config.json"),
        (Asked(scratch({}, deepspeed={}), words=("deepspeed={}",)), "", "deepspeed=ds_config.json"),
        (Asked(scratch({}), model="org/m"), " --model org/m --task causal-lm", None),
        (
            Asked(Config(), Options(gradient_checkpointing=True, seq_len=9, precision="fp32"), model="m"),
            " --model m --task text-classification --precision fp32 --activation-checkpointing",
            "data.max_length=9",
        ),
    ],
)
def test_next_is_what_init_config_takes_and_then_what_train_takes(
    asked: Asked, options: str, train: str | None, here: Path
) -> None:
    Path("ds_config.json").write_text("{}")
    assert next_lines(planned(SMALL), asked) == [
        f"next: dstool init-config --stage 1{options} --force",
        *([f"then: dstool train {train}"] if train else []),
    ]


def test_force_is_for_what_is_there_and_has_to_be_another(here: Path) -> None:
    config, result = scratch({}), planned(SMALL)
    Path("dstool.yaml").touch()
    for asked in (Asked(config, model="m"), Asked(config, Options(gradient_checkpointing=True))):
        assert next_lines(result, asked)[0].endswith(" --force")
    assert next_lines(result, Asked(config))[0] == "next: dstool init-config --stage 1"


def test_nothing_comes_next_where_nothing_fits() -> None:
    result = planned(LLAMA_8B, gpus=1, gpu_memory="4GB", cpu_memory="32GB")
    assert next_lines(result, Asked(Config())) == []


def test_what_init_config_refuses_is_said_in_its_words(here: Path) -> None:
    CliRunner().invoke(cli.app, ["init-config", "--stage", "2"])
    said = run("--optimizer", "OneBitAdam").stdout
    stage = said.partition("init-config --stage ")[2][0]
    command = ["init-config", "--stage", stage, "--optimizer", "OneBitAdam", "--force"]
    refused = CliRunner().invoke(cli.app, command)
    assert refused.exit_code != 0
    message = refused.stderr.splitlines()[0].removeprefix("error: ")
    assert f"init-config refuses that here: {message}" in said


def test_what_lora_and_the_length_were_taken_for_is_said(caplog):
    result = planned(LLAMA_8B, flags={"lora": {"target_modules": "all-linear"}}, seq_len=200_000)
    assert any(words.startswith("LoRA of rank ") for words in result.assumed)
    assert "the model is made for" in caplog.text


def test_the_next_command_keeps_the_words_the_length_and_what_the_json_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "architectures": ["GPT2LMHeadModel"]}
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps({"model_type": "gpt2", **size}))
    machine = ["--gpus", "1", "--gpu-memory", "80GB", "--cpu-memory", "64GB"]
    run, auto = CliRunner().invoke, ["init-config", "--auto", "--model", "m", *machine]
    assert run(cli.app, [*auto, "--seq-len", "256"]).exit_code == 0
    assert "block_size: 256" in Path("dstool.yaml").read_text()
    written = ["init-config", "--force", "--stage", "1", "--optimizer", "SGD", "--micro-batch", "1"]
    assert run(cli.app, written).exit_code == 0
    shown = run(cli.app, ["plan", *machine, "--seq-len", "512", "train.seed=7"]).output
    assert "--micro-batch 1 --optimizer SGD --force" in shown
    assert "then: dstool train train.seed=7 data.block_size=512" in shown
