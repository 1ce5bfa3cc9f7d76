"""The words of findings and refusals: each says what is so, and its mend can be followed."""

import json
import math

import pytest
from common import AUTO, OWN

from dstool.ds_config import source
from dstool.ds_config.check import check, fix
from dstool.ds_config.looks import Circumstances
from dstool.ds_config.options import Options, refuse
from dstool.errors import ConfigError

FINE = {**OWN, "zero_optimization": {"stage": 2}}


def found(**keys):
    return check(source.parse(json.dumps({**FINE, **keys}, indent=2)), Circumstances())


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["lr", "clip", "warmup"])
def test_a_number_that_is_not_finite_is_called_that(name, value):
    with pytest.raises(ConfigError, match="must be a finite number"):
        refuse(Options(**{name: value}))


def test_a_number_below_0_is_called_that():
    with pytest.raises(ConfigError, match="must be 0 or more"):
        refuse(Options(lr=-1.0))


def test_a_misspelt_key_that_belongs_nowhere_else_is_not_to_be_moved():
    for block in ({"wandb": {"enabled": False, "nme": "x"}}, {"compile": {"enabled": True}}):
        for finding in found(**block):
            assert "move it" not in finding.mend, finding


def test_bfp16_is_bf16():
    (finding,) = [each for each in found(bfp16={"enabled": True}) if each.path == "bfp16"]
    assert "did you mean bf16?" in finding.problem


def test_a_scheduler_of_torch_is_fine_at_stage_0_in_fp32():
    block = {"type": "CosineAnnealingLR", "params": {"T_max": 10}}
    zero = {"stage": 0}
    assert not [each for each in found(scheduler=block, zero_optimization=zero) if each.rule == "scheduler"]
    half = found(scheduler=block, zero_optimization=zero, bf16={"enabled": True})
    assert [each for each in half if each.rule == "scheduler"]
    assert [each for each in found(scheduler=block) if each.rule == "scheduler"]


def test_torch_adam_takes_what_torch_takes():
    params = {"lr": AUTO, "fused": True}
    told = found(optimizer={"type": "AdamW", "params": {**params, "torch_adam": True}})
    assert not [each for each in told if each.rule == "optimizer-param"]
    told = found(optimizer={"type": "AdamW", "params": params})
    assert [each for each in told if each.rule == "optimizer-param"]


def test_the_mend_of_betas_is_not_the_problem_again():
    told = found(optimizer={"type": "AdamW", "params": {"lr": AUTO, "betas": [0.9, 1.0]}})
    (finding,) = [each for each in told if each.path == "optimizer.params.betas"]
    assert finding.mend != finding.problem


def test_auto_is_not_said_to_be_left_out_where_it_stands():
    name = "stage3_gather_16bit_weights_on_model_save"
    (finding,) = [
        each for each in found(zero_optimization={"stage": 3, name: AUTO}) if "gathered" in each.rule
    ]
    assert '"auto", which counts as left out' in finding.problem


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_fix_keeps_the_line_ends(end):
    text = json.dumps({**FINE, "gradient_clipping": None, "zero_optimization": {}}, indent=2)
    mended = fix(text.replace("\n", end), Circumstances()).text
    assert mended.count(end) == mended.count("\n") > 0
    assert mended.count("\r") == (mended.count("\n") if end == "\r\n" else 0)


def test_an_old_name_with_auto_is_one_finding():
    (one,) = found(bfloat16={"enabled": AUTO})
    assert (one.rule, one.path) == ("old-name", "bfloat16")


def mends(**keys):
    return [each.mend for each in found(**keys) if each.rule in ("unknown-key", "scheduler-param")]


def test_a_misspelt_key_whose_right_name_is_taken_is_to_be_deleted():
    delete = "delete it, as stage is there too"
    assert mends(zero_optimization={"stage": 2, "stagee": 3, "stge": 1}) == [delete, delete]
    assert mends(gradient_clip=1.0) == ["delete it, as gradient_clipping is there too"]


def test_of_two_misspelt_keys_one_is_to_be_kept():
    keep = "keep one of stagee, stge under the name stage, and delete the rest"
    assert mends(zero_optimization={"stagee": 3, "stge": 1}) == [keep, keep]
    assert mends(zero_optimization={"stagee": 3}) == ["call it stage, or delete it"]


def test_no_mend_is_promised_for_two_keys_of_one_name():
    block = {"type": "WarmupLR", "params": {"warmup_steps": 1, "num_warmup_steps": 2}}
    first, second = found(scheduler=block)
    keep = "keep one of warmup_steps, num_warmup_steps under the name warmup_num_steps, and delete the rest"
    assert (first.mend, second.mend) == (keep, keep)
    assert (first.edit, second.edit) == ((), ())


def test_a_long_value_is_cut():
    (finding,) = found(zero_optimization={"stage": 10**400})
    assert len(finding.problem) < 150


@pytest.mark.parametrize("betas", [[None, 0.9], ["auto", 0.9], [0.9]])
def test_two_numbers_are_not_only_two_of_something(betas):
    (finding,) = found(optimizer={"type": "AdamW", "params": {"lr": AUTO, "betas": betas}})
    assert finding.problem.endswith('two numbers or "auto" are expected')


def test_true_is_no_number_whatever_its_size():
    told = found(optimizer={"type": "AdamW", "params": {"lr": AUTO, "betas": [True, 0.9]}})
    assert [each.rule for each in told] == ["wrong-type"]


def test_what_is_no_number_is_not_called_null():
    text = json.dumps({**FINE, "zero_optimization": {"stage": 2, "reduce_bucket_size": math.inf}})
    assert [each.rule for each in check(source.parse(text), Circumstances())] == ["not-a-number"]


def test_a_path_in_the_place_of_a_key_is_to_be_written_as_a_block():
    told = found(**{"fp16.enabled": True, "optimizer.params.lr": 1.0})
    assert [each.mend for each in told] == [
        "write enabled into the block fp16",
        "write lr into the block optimizer.params",
    ]


def test_a_stage_with_a_point_is_that_stage():
    """DeepSpeed takes it (pydantic turns 2.0 into the member of the enumeration)."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2.0}}
    assert DeepSpeedConfig(config).zero_config.stage == 2
    (finding,) = found(zero_optimization={"stage": 2.0, "stage3_max_live_parameters": 1})
    assert finding.problem.endswith("the stage is 2")


def test_no_ranks_are_like_an_unknown_number_of_them():
    text = json.dumps({**FINE, "train_batch_size": 8})
    assert not check(source.parse(text), Circumstances(world_size=0))


@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_clipping": None},
        {"optimizer": {"type": None}},
        {"scheduler": {"type": None, "params": {}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": None, "cycle_max_lr": 0.1}}},
        {"optimizer": {"type": "SGD", "params": {"lr": AUTO}}, "zero_allow_untested_optimizer": False},
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": AUTO}},
    ],
)
def test_a_key_that_is_there_is_not_to_be_added(keys):
    (one,) = found(**keys)
    assert one.mend.startswith('set "')


@pytest.mark.parametrize("path", [None, "", AUTO])
def test_an_empty_path_is_to_be_set(path):
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": path}}
    told = [each.mend for each in found(zero_optimization=zero) if each.rule == "nvme-without-path"]
    assert told == ['set "nvme_path": "/local_nvme"']


def test_gathering_that_is_null_is_one_finding():
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": None}
    (one,) = found(zero_optimization=zero)
    assert one.rule == "wrong-type"


@pytest.mark.parametrize(("name", "stage"), [("cpu_offload", 0), ("cpu_offload_param", 2)])
def test_an_old_name_that_offloads_nothing_is_not_made_an_error(name, stage):
    text = json.dumps({**FINE, "zero_optimization": {"stage": stage, name: True}})
    assert fix(text, Circumstances()).text == text
