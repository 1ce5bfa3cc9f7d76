"""What DeepSpeed itself refuses is an error of the check, and mends stay apart from each other."""

import json

import pytest
from common import OWN

from dstool.ds_config import keys, source
from dstool.ds_config.check import check, fix, refusal
from dstool.ds_config.looks import Circumstances, Machine
from dstool.ds_config.read import reconcile

ZERO = "zero_optimization"
NOWHERE = Circumstances()
CPU = {"offload_optimizer": {"device": "cpu"}}
HALF = {"offload_optimizer": {"device": "none", "ratio": 0.5}}
STATES = {"bf16_optimizer_states": True}
MASTERS = {"bf16_master_weights_and_grads": True}


def text_of(zero=None, **more):
    return json.dumps({**OWN, ZERO: {"stage": 2, **(zero or {})}, **more}, indent=2)


def found(text, around=NOWHERE):
    return check(source.parse(text), around)


def errors(text, around=NOWHERE):
    return {each.path: each for each in found(text, around) if each.severity == "error"}


def refused(config):
    """Whether DeepSpeed's own reader refuses the file."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig({"train_batch_size": 1, **json.loads(json.dumps(config))})
    except Exception:
        return True
    return False


def at(path, value):
    """The object that has `value` at the dotted `path`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


ALL_KEYS = [
    path
    for path in list(keys.keys())
    # Of parameters others tell, and DeepSpeed refuses a batch size of null only where there is no other.
    if not path.startswith(("optimizer.", "scheduler.")) and path != "train_batch_size"
]


def test_null_is_refused_at_the_keys_where_deepspeed_refuses_it():
    """A sweep of the whole table against DeepSpeed itself."""
    for path in ALL_KEYS:
        config = at(path, None)
        for block in ("bf16", "fp16", "torch_autocast"):
            if path.startswith(f"{block}."):
                config[block].setdefault("enabled", True)
        if path.startswith(f"{ZERO}."):
            config[ZERO].setdefault("stage", 3)
        assert (path in errors(json.dumps(config))) is refused(config), path


@pytest.mark.parametrize(
    ("config", "path"),
    [
        *(({ZERO: {"stage": stage, **HALF}}, f"{ZERO}.offload_optimizer.ratio") for stage in (0, 1, 2)),
        *(
            ({ZERO: {"stage": stage, "compute_grad_norm": False}}, f"{ZERO}.compute_grad_norm")
            for stage in (0, 3)
        ),
        ({ZERO: {"stage": 2}, "bf16": {"enabled": True, **STATES}}, "bf16.bf16_optimizer_states"),
        ({ZERO: {"stage": 0}, "bf16": {"enabled": True, **MASTERS}}, "bf16.bf16_master_weights_and_grads"),
        (at("data_types.keep_in_fp32_modules", "abc"), "data_types.keep_in_fp32_modules"),
        (at("data_types.keep_in_fp32_modules", [1]), "data_types.keep_in_fp32_modules"),
        (at("compile.passes", ["a"]), "compile.passes"),
        (at("compile.passes", [["z1"]]), "compile.passes"),
        ({ZERO: {"stage": 2, **CPU, "zenflow": {"select_interval": "a"}}}, f"{ZERO}.zenflow.select_interval"),
        ({ZERO: {"stage": 2, **CPU, "zenflow": {"update_interval": "a"}}}, f"{ZERO}.zenflow.update_interval"),
        *(
            ({ZERO: {"stage": 3, "leaf_module": {name: [1]}}}, f"{ZERO}.leaf_module.{name}")
            for name in ("classes", "names", "name_suffixes")
        ),
    ],
    ids=str,
)
def test_what_deepspeed_refuses_is_one_error(config, path):
    assert refused(config)
    assert list(errors(json.dumps(config))) == [path]
    assert [each.path for each in found(json.dumps(config))].count(path) == 1


@pytest.mark.parametrize(
    "config",
    [
        {ZERO: {"stage": 3, **HALF}},
        {ZERO: {"stage": 1, "compute_grad_norm": False}},
        {ZERO: {"stage": 2}, "bf16": {"enabled": True, **STATES, **MASTERS}},
        at("compile.passes", ["z1", "autosp"]),
        {ZERO: {"stage": 1, **CPU, "zenflow": {"topk_ratio": 0.1}}},
        {
            ZERO: {"stage": 1, "cpu_offload": True, "zenflow": {"topk_ratio": 0.1}},
            "optimizer": {"type": "Adam"},
        },
    ],
    ids=str,
)
def test_what_deepspeed_takes_is_no_error(config):
    assert not refused(config)
    assert not errors(json.dumps(config))


def test_zenflow_needs_the_optimizer_on_the_cpu():
    """The engine refuses it (runtime/zenflow/zenflow_stage_1_and_2.py)."""
    assert list(errors(text_of({"zenflow": {"topk_ratio": 0.1}}))) == [f"{ZERO}.zenflow"]


def test_ranks_that_cannot_be_shared_out():
    text = text_of(sequence_parallel_size=4, tensor_parallel={"autotp_size": 2})
    assert set(errors(text, Circumstances(world_size=1))) == {
        "sequence_parallel_size",
        "tensor_parallel.autotp_size",
    }
    assert not errors(text, Circumstances(world_size=8))


def test_gds_needs_a_gpu():
    text = text_of(aio={"use_gds": True})
    assert errors(text, Circumstances(machine=Machine(gpu=False)))["aio.use_gds"].rule == "no-device"
    assert not errors(text, Circumstances(machine=Machine()))


@pytest.mark.parametrize("params", [None, 1, "x", [1]])
def test_parameters_that_are_no_block_hold_up_no_other_mend(params):
    scheduler = {"type": "WarmupDecayLR", "params": params}
    fixed = fix(text_of(wall_clock_breakdown="false", scheduler=scheduler), NOWHERE)
    after = json.loads(fixed.text)
    assert after["wall_clock_breakdown"] is False
    left = {"total_num_steps": "auto"} if params is None else params
    assert after["scheduler"]["params"] == left
    assert not [each for each in found(fixed.text) if each.edit]


def test_an_edit_that_spoils_the_file_holds_up_no_other(monkeypatch):
    from dstool.ds_config import rules
    from dstool.ds_config.looks import Raw

    def spoils(look):
        edits = (source.Edit(0, 1, "]"),)
        yield Raw("wrong-type", (ZERO,), "a fault of the check's own", "none", "none", edits)

    monkeypatch.setattr(rules, "RULES", (spoils, *rules.RULES))
    fixed = fix(text_of(wall_clock_breakdown="false"), NOWHERE)
    assert json.loads(fixed.text)["wall_clock_breakdown"] is False


def test_the_old_name_of_offloading_is_an_error_without_an_optimizer_of_deepspeeds():
    text = text_of({"cpu_offload": True})
    (one,) = found(text)
    assert (one.severity, one.rule, one.path) == ("error", "old-name", f"{ZERO}.cpu_offload")
    assert '"offload_optimizer": {"device": "cpu"}' in one.mend
    adam = {"type": "AdamW", "params": {"lr": "auto"}}
    assert not errors(text_of({"cpu_offload": True}, optimizer=adam))


def test_a_run_reads_the_old_name_of_offloading_as_the_new():
    findings = found(text_of({"cpu_offload": True}))
    assert refusal(findings, json_name="ds_config.json", run_name="dstool.yaml", places=True) is None
    made = reconcile(json.loads(text_of({"cpu_offload": True})), {})
    assert made.ds[ZERO]["offload_optimizer"] == {"device": "cpu"}
    assert "cpu_offload" not in made.ds[ZERO]


@pytest.mark.parametrize(("name", "stage"), [("cpu_offload", 0), ("cpu_offload_param", 2)])
def test_the_old_names_offload_at_the_stages_of_the_new(name, stage):
    text = text_of({"stage": stage, name: True})
    (one,) = found(text)
    assert (one.rule, one.path, one.severity) == ("offload-stage", f"{ZERO}.{name}", "error")


def test_the_rules_of_offloading_see_the_old_name():
    lamb = {"type": "Lamb", "params": {"lr": "auto"}}
    text = text_of({"cpu_offload": True}, optimizer=lamb, zero_allow_untested_optimizer=True)
    assert "offloaded" in errors(text)["optimizer.type"].problem


def test_a_misspelt_key_is_not_added_beside_itself():
    config = {ZERO: {"stage": 2}, "gradient_clip": 1.0}
    fixed = json.loads(fix(json.dumps(config), NOWHERE).text)
    assert "gradient_clipping" not in fixed
    (one,) = [each for each in found(json.dumps(fixed)) if each.path == "gradient_clip"]
    assert one.mend == "call it gradient_clipping, or delete it"


def test_a_misspelt_parameter_is_not_added_beside_itself():
    params = {"total_num_step": 9, "warmup_num_steps": 2}
    text = text_of(scheduler={"type": "WarmupDecayLR", "params": params})
    assert json.loads(fix(text, NOWHERE).text)["scheduler"]["params"] == params


@pytest.mark.parametrize("name", ["cpu_offload_params", "cpu_offload_param"])
def test_an_older_name_is_mended_at_once(name):
    text = text_of({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, name: True})
    (one,) = found(text)
    assert one.mend == 'write "offload_param": {"device": "cpu"} in its place'
    assert json.loads(fix(text, NOWHERE).text)[ZERO]["offload_param"] == {"device": "cpu"}
    assert not found(fix(text, NOWHERE).text)


@pytest.mark.parametrize(
    ("more", "path", "form"),
    [
        ({"bf16": True}, "bf16", '{"enabled": true}'),
        ({"optimizer": "AdamW"}, "optimizer", '{"type": "AdamW"'),
        ({ZERO: 2}, ZERO, '{"stage": 2}'),
        ({ZERO: {"stage": 2, "offload_optimizer": "cpu"}}, f"{ZERO}.offload_optimizer", '{"device": "cpu"}'),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps", "a whole number above 0"),
        ({"fp16": "auto"}, "fp16", '{"enabled": true}'),
        ({"zero_hpz_partition_size": 2}, "zero_hpz_partition_size", "move it where it is read"),
        ({"lr": 0.1}, "lr", "move it where it is read"),
    ],
    ids=str,
)
def test_a_mend_shows_the_form(more, path, form):
    (one,) = [each for each in found(text_of(**more)) if each.path == path]
    assert form in one.mend


@pytest.mark.parametrize("name", ["postscale_gradients", "gradient_accumulation_dtype"])
def test_a_key_that_only_looks_alike_is_not_guessed(name):
    assert "did you mean" not in errors(text_of(**{name: True}))[name].problem


def test_a_key_in_capitals_is_guessed():
    assert "did you mean bf16?" in errors(text_of(BF16={"enabled": True}))["BF16"].problem


def test_the_old_name_of_bf16_has_its_own_place():
    text = text_of(bfloat16={"enabled": "true"})
    assert list(errors(text)) == ["bfloat16.enabled"]
