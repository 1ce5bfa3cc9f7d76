"""What `build` writes, byte for byte, and that DeepSpeed itself takes it.

After a wanted change, rewrite the files and read the diff:
    DSTOOL_REWRITE_GOLDEN=1 python -m pytest tests/ds_config/test_build.py
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstool.ds_config import keys
from dstool.ds_config.build import AUTO, build, dumps
from dstool.ds_config.options import Options
from dstool.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
NVME = {"stage": 3, "offload": "nvme", "nvme_path": "/local_nvme"}

CASES = {
    "stage0": Options(stage=0),
    "stage1": Options(stage=1),
    "stage2": Options(stage=2),
    "stage3": Options(stage=3),
    "stage1_cpu": Options(stage=1, offload="cpu"),
    "stage2_cpu": Options(stage=2, offload="cpu"),
    "stage3_cpu": Options(stage=3, offload="cpu"),
    "stage3_nvme": Options(**NVME),
    "stage2_bf16_adam_decay": Options(precision="bf16", optimizer="Adam", scheduler="WarmupDecayLR"),
    "stage3_fp16_adagrad_cosine": Options(
        stage=3, precision="fp16", optimizer="Adagrad", scheduler="WarmupCosineLR"
    ),
    "stage1_fp32_trainers_own": Options(stage=1, precision="fp32", optimizer="none", scheduler="none"),
    "stage2_sgd_cpu_constant": Options(stage=2, offload="cpu", optimizer="SGD", scheduler="ConstantLR"),
    "stage3_sgd": Options(stage=3, optimizer="SGD"),
    "stage3_muon_onecycle": Options(stage=3, optimizer="Muon", scheduler="OneCycle", lr=1e-3),
    "stage2_lion_cpu_range_test": Options(
        stage=2, offload="cpu", optimizer="Lion", scheduler="LRRangeTest", lr=1e-6
    ),
    "stage2_lamb_fp16": Options(stage=2, optimizer="Lamb", precision="fp16"),
    "stage2_fused_adam_cosine": Options(stage=2, optimizer="FusedAdam", scheduler="CosineAnnealingLR"),
    "stage0_one_bit_adam": Options(stage=0, optimizer="OneBitAdam"),
    "stage3_optimizer_cpu": Options(stage=3, offload_optimizer="cpu"),
    "stage3_param_cpu": Options(stage=3, offload_param="cpu"),
    "stage3_nvme_optimizer_cpu_param": Options(
        stage=3, offload_optimizer="nvme", offload_param="cpu", nvme_path="/local_nvme"
    ),
    "every_number": Options(
        stage=2,
        lr=2e-5,
        warmup=100,
        micro_batch=4,
        global_batch=64,
        accumulation=8,
        clip=0.5,
        communication_data_type="bf16",
        settings=(("zero_optimization.reduce_bucket_size", 100_000_000), ("comms_logger.enabled", True)),
    ),
}
by_case = pytest.mark.parametrize("name", CASES)

# Any "auto", with what Trainer would put there.
PLAUSIBLE = {
    "enabled": False,
    "lr": 5e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 5e-5,
    "warmup_num_steps": 10,
    "total_num_steps": 100,
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 3686,
    "stage3_param_persistence_threshold": 640,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
}


def resolved(node):
    if not isinstance(node, dict):
        return node
    return {key: PLAUSIBLE[key] if value == AUTO else resolved(value) for key, value in node.items()}


@by_case
def test_golden(name):
    path, text = GOLDEN / f"{name}.json", dumps(build(CASES[name]))
    if os.environ.get("DSTOOL_REWRITE_GOLDEN"):
        path.write_bytes(text.encode())
    assert text.encode() == path.read_bytes()


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


def test_nvme_holds_the_published_example():
    scaling = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
    expected = {
        "fp16": {"enabled": "auto", **scaling, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
            "overlap_comm": True,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    assert build(Options(**NVME)) == expected


@by_case
def test_c17_whole_numbers_are_json_integers(name):
    def walk(node, above=""):
        for key, value in node.items():
            yield above + key, value
            if isinstance(value, dict):
                yield from walk(value, f"{above}{key}.")

    table = keys.keys()
    whole = [
        value
        for path, value in walk(json.loads(dumps(build(CASES[name]))))
        if path in table and set(table[path].types) <= {"int", "null"} and value != AUTO
    ]
    assert whole
    assert {type(value) for value in whole} == {int}


@by_case
def test_c23_no_communication_data_type_and_c08_aio_only_at_the_top(name):
    config = build(CASES[name])
    assert ("communication_data_type" in config) == (name == "every_number")
    assert "aio" not in config["zero_optimization"]
    assert ("aio" in config) == CASES[name].nvme


def test_each_call_gives_a_config_of_its_own():
    build(Options(**NVME))["optimizer"]["params"]["lr"] = 1
    build(Options(**NVME))["aio"]["block_size"] = 1
    assert dumps(build(Options(**NVME))).encode() == (GOLDEN / "stage3_nvme.json").read_bytes()


def test_c40_dumps_refuses_infinity():
    with pytest.raises(ValueError, match="JSON compliant"):
        dumps({"steps_per_print": float("inf")})


def test_dumps_keeps_korean_text_readable():
    assert dumps({"_설명": "학습"}) == '{\n  "_설명": "학습"\n}\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(stage=0, offload="cpu"), "--offload cpu needs --stage 1, 2 or 3"),  # C19
        (Options(stage=0, offload="nvme", nvme_path="/n"), "nvme needs --stage 3: at stage 0"),
        (Options(stage=1, offload="nvme", nvme_path="/n"), "nvme needs --stage 3: at stage 1"),
        (Options(stage=2, offload="nvme", nvme_path="/n"), "nvme needs --stage 3: at stage 2"),  # C20
        (Options(stage=3, offload="nvme"), "--offload nvme needs --nvme-path"),
        (Options(stage=3, offload="nvme", nvme_path=""), "--offload nvme needs --nvme-path"),
        (Options(stage=3, offload="cpu", nvme_path="/n"), "--nvme-path /n means nothing with --offload cpu"),
        (Options(nvme_path="/n"), "--nvme-path /n means nothing with --offload none"),
        (Options(stage=4), "--stage 4: not one of 0, 1, 2, 3"),
        (Options(offload="disk"), "--offload disk: not one of none, cpu, nvme"),
        (Options(precision="fp8"), "--precision fp8: not one of auto, fp32, fp16, bf16"),
        (Options(optimizer="adamw_torch"), "--optimizer adamw_torch: not one of"),  # C32
        (Options(scheduler="CosineAnnealing"), "--scheduler CosineAnnealing: not one of"),  # C28
        (Options(offload_optimizer="nvme", nvme_path="/n"), "--offload-optimizer nvme needs --stage 3"),
        (Options(offload_param="cpu"), "--offload-param cpu needs --stage 3"),  # C19
        (Options(stage=3, offload_param="nvme"), "--offload nvme needs --nvme-path"),
        (Options(micro_batch=0), "--micro-batch 0: must be 1 or more"),
        (Options(accumulation=-1), "--accumulation -1: must be 1 or more"),
        (Options(global_batch=7, micro_batch=2), "--global-batch 7 is no multiple of --micro-batch"),
        (Options(lr=-1.0), "--lr -1.0: must be 0 or more"),
        (Options(lr=float("inf")), "--lr inf: must be a finite number"),
        (Options(clip=float("nan")), "--clip nan: must be a finite number"),
        (Options(warmup=2.5), "--warmup 2.5: steps are whole"),
        (Options(warmup=10, scheduler="OneCycle"), "OneCycle follows its own course and has no warm-up"),
        (
            Options(settings=(("gradient_clipping.x", 1),)),
            "--set gradient_clipping.x: gradient_",
        ),
    ],
)
def test_c19_c20_c28_c32_refusals(options, message):
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.fixture
def on_cpu(monkeypatch):
    for key, value in {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)


@by_case
def test_deepspeed_accepts(name, on_cpu):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = resolved(build(CASES[name]))
    if name == "every_number":
        config["gradient_accumulation_steps"] = 16  # with its 2 ranks the file says 8
    parsed = DeepSpeedConfig(json.loads(dumps(config)))

    assert int(parsed.zero_config.stage) == CASES[name].stage
    assert parsed.gradient_clipping == (0.5 if name == "every_number" else 1.0)
    assert parsed.float16_config.enabled == (CASES[name].precision == "fp16")
    assert parsed.bfloat16_config.enabled == (CASES[name].precision == "bf16")
    zero = parsed.zero_config.model_dump(by_alias=True)
    assert {key: zero[key] for key in config["zero_optimization"] if not key.startswith("offload")} == {
        key: value for key, value in config["zero_optimization"].items() if not key.startswith("offload")
    }
    if "aio" in config:
        assert {key: parsed.aio_config[key] for key in config["aio"]} == config["aio"]


@by_case
def test_c29_c32_optimizer_and_scheduler_take_their_params(name, on_cpu):
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import lr_schedules

    config = resolved(build(CASES[name]))
    if "optimizer" in config:
        params = config["optimizer"]["params"]
        adam_w_mode = params.pop("adam_w_mode", True)  # the engine takes it out (runtime/engine.py)
        assert adam_w_mode == (config["optimizer"]["type"] != "Adam")
        classes = {
            "Adam": (FusedAdam, DeepSpeedCPUAdam),
            "AdamW": (FusedAdam, DeepSpeedCPUAdam),
            "Adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
            "SGD": (torch.optim.SGD,),
            "Lamb": (FusedLamb,),
            "Lion": (FusedLion, DeepSpeedCPULion),
            "Muon": (),  # takes parameters out one by one; tests/test_optimizers.py trains with it
            "OneBitAdam": (),  # gone
        }
        for cls in classes[config["optimizer"]["type"]]:
            inspect.signature(cls).bind([], **params)
    if str(config.get("scheduler", {}).get("type")).startswith("Warmup"):
        cls = getattr(lr_schedules, config["scheduler"]["type"])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5e-5)
        scheduler = cls(optimizer, **config["scheduler"]["params"])
        for _ in range(12):
            scheduler.step()
        if name != "every_number":  # it warms up for longer
            assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-5, rel=0.05)


def test_light():
    heavy = ("torch", "deepspeed", "transformers", "pydantic", "yaml", "typer", "rich")
    code = (
        "import sys, dstool.ds_config.build, dstool.ds_config.read; "
        f"print(*[name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
