"""The words of findings and refusals: each says what is so, and its mend can be followed."""

import json
import math

import pytest

from dstool.ds_config import source
from dstool.ds_config.check import check
from dstool.ds_config.looks import Circumstances
from dstool.ds_config.options import Options, refuse
from dstool.errors import ConfigError

AUTO = "auto"
OWN = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_optimization": {"stage": 2},
}


def found(**keys):
    return check(source.parse(json.dumps({**OWN, **keys}, indent=2)), Circumstances())


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
