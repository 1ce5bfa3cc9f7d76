"""What DeepSpeed refuses though each value has the right type: pairs that contradict, items of lists.

The sources are the validators of deepspeed 0.19.8: runtime/config.py `_do_error_check`,
runtime/zero/config.py, runtime/zenflow, compile/config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from dstool.ds_config.build import AUTO
from dstool.ds_config.looks import Look, Raw, Rule, count, put
from dstool.ds_config.read import show

_ZERO: Final = "zero_optimization"
_WHOLE: Final = "DeepSpeed refuses the whole file, after the model has loaded"


def partial(look: Look) -> Iterator[Raw]:
    """A part of the optimizer offloaded, which stage 3 alone does; the device does not matter."""
    path = (_ZERO, "offload_optimizer", "ratio")
    ratio = look.get(*path)
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if number and 0 <= ratio < 1 and look.stage in (0, 1, 2):
        words = f"offload_optimizer.ratio {show(ratio)} needs stage 3, the stage is {look.stage}"
        yield Raw("contradiction", path, words, _WHOLE, "delete it, or set it to 1.0, or use stage 3")


def norm(look: Look) -> Iterator[Raw]:
    """The norm of the gradients left out, which stages 1 and 2 alone do."""
    path = (_ZERO, "compute_grad_norm")
    if look.get(*path) is False and look.stage in (0, 3):
        words = f"compute_grad_norm false needs stage 1 or 2, the stage is {look.stage}"
        yield Raw("contradiction", path, words, _WHOLE, "delete it, or use stage 2")


def halves(look: Look) -> Iterator[Raw]:
    """What ZeRO keeps in 16 bits: not at stage 0, and the optimizer's states not by themselves."""
    masters = {name: (name, f"{name}_master_weights_and_grads") for name in ("fp16", "bf16")}
    states = ("bf16", "bf16_optimizer_states")
    for path in (*masters.values(), states):
        if look.get(*path) is True and look.stage == 0:
            words = f"{'.'.join(path)} needs stage 1 or above, the stage is 0"
            yield Raw("contradiction", path, words, _WHOLE, "delete it, or use stage 2")
    if look.get(*states) is True and look.get(*masters["bf16"]) is not True and look.stage != 0:
        words = f"bf16.bf16_optimizer_states needs {'.'.join(masters['bf16'])}"
        yield Raw("contradiction", states, words, _WHOLE, put(look, masters["bf16"], "true"))


def zenflow(look: Look) -> Iterator[Raw]:
    """ZenFlow, which is a way to offload to the CPU."""
    path = (_ZERO, "zenflow")
    if (
        isinstance(look.get(*path), dict)
        and look.stage in (1, 2)
        and look.device("offload_optimizer") != "cpu"
    ):
        mend = put(look, (_ZERO, "offload_optimizer"), '{"device": "cpu"}') + ", or delete zenflow"
        words = "zenflow needs the optimizer offloaded to the CPU"
        yield Raw("contradiction", path, words, "DeepSpeed stops after the model has loaded", mend)


def intervals(look: Look) -> Iterator[Raw]:
    """When ZenFlow selects and updates (runtime/zenflow/engine_stage3.py `configure_zenflow`)."""
    path, told = (_ZERO, "zenflow"), "DeepSpeed stops after the model has loaded"
    strategy = look.get(*path, "select_strategy")
    select, update = (look.get(*path, name) for name in ("select_interval", "update_interval"))
    number = type(select) is int
    if look.stage not in (1, 2, 3):
        return
    if number and strategy in (None, AUTO):
        words = f"zenflow.select_interval {select} needs a select_strategy"
        mend = put(look, (*path, "select_strategy"), '"step"') + ", or delete it"
        yield Raw("contradiction", (*path, "select_interval"), words, told, mend)
    elif select in (None, AUTO) and strategy in ("step", "epoch"):
        words = f"zenflow.select_strategy {strategy} needs a select_interval"
        mend = put(look, (*path, "select_interval"), "a whole number") + ", or delete it"
        yield Raw("contradiction", (*path, "select_strategy"), words, told, mend)
    elif number and strategy == "step" and type(update) is int and 0 != select < update:
        words = f"zenflow.select_interval {select} is below update_interval {update}"
        yield Raw("contradiction", (*path, "select_interval"), words, told, f"write {update} or more")


def shared(look: Look) -> Iterator[Raw]:
    """Ranks that share one batch, of which there are too few."""
    ranks = look.around.world_size
    for path in (("sequence_parallel_size",), ("tensor_parallel", "autotp_size")):
        size = look.get(*path)
        if ranks and count(size) and ranks % size:
            words = f"{'.'.join(path)} is {size}, and {ranks} rank{'s' * (ranks > 1)} cannot be shared out so"
            told = "DeepSpeed stops after the model has loaded"
            yield Raw("contradiction", path, words, told, f"write a divisor of {ranks}, or delete it")


def direct(look: Look) -> Iterator[Raw]:
    """Files read straight into the GPU, where there is none."""
    path, machine = ("aio", "use_gds"), look.around.machine
    if look.get(*path) is True and machine is not None and not machine.gpu:
        words = "aio.use_gds needs a CUDA GPU, and this machine has none"
        yield Raw("no-device", path, words, _WHOLE, "set it to false, or check the file where the GPUs are")


# The lists whose items are looked at, with the items that may stand in them; None for any text.
_ITEMS: Final = MappingProxyType(
    {
        ("compile", "passes"): ("z1", "z3", "autosp", "autotp"),
        ("data_types", "keep_in_fp32_modules"): None,
        (_ZERO, "leaf_module", "classes"): None,
        (_ZERO, "leaf_module", "name_suffixes"): None,
        (_ZERO, "leaf_module", "names"): None,
    }
)
# The texts that may stand where something else is the rule.
_WORDS: Final = MappingProxyType(
    {
        ("data_types", "keep_in_fp32_modules"): "a list of texts",
        (_ZERO, "zenflow", "select_interval"): "a whole number",
        (_ZERO, "zenflow", "update_interval"): "a whole number",
    }
)


def items(look: Look) -> Iterator[Raw]:
    """Items that their list does not take, and texts where only "auto" is one."""
    for path, allowed in _ITEMS.items():
        value, dotted = look.get(*path), ".".join(path)
        wrong = [each for each in value if not isinstance(each, str)] if isinstance(value, list) else []
        if allowed and isinstance(value, list):
            wrong = [each for each in value if each not in allowed]
        if wrong:
            expected = f"one of {', '.join(allowed)}" if allowed else "a text in quotes"
            words = f"{dotted} has {show(wrong[0])}, each must be {expected}"
            yield Raw("wrong-value", path, words, _WHOLE, f"write {expected} in its place, or delete the key")
    for path, expected in _WORDS.items():
        value = look.get(*path)
        if isinstance(value, str) and value != "auto":
            words = f"{'.'.join(path)} is {show(value)}, {expected} is expected"
            yield Raw("wrong-value", path, words, _WHOLE, f"write {expected}, or delete the key")


RULES: Final[tuple[Rule, ...]] = (partial, norm, halves, zenflow, intervals, shared, direct, items)
