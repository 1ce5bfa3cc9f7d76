"""What is wrong with a DeepSpeed JSON for a run: contradictions, batch, optimizer, scheduler, machine.

The rules are those of deepspeed 0.19.8 (runtime/engine.py, runtime/lr_schedules.py, runtime/zero).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from dstool.ds_config import keys, read
from dstool.ds_config.build import AUTO
from dstool.ds_config.looks import Look, Machine, Raw, Rule, add, count, first, put, renamed, replace
from dstool.ds_config.read import show
from dstool.ds_config.source import Edit
from dstool.errors import ConfigError

# --- contradictions ----------------------------------------------------------------------------------------


def scattered(look: Look) -> Iterator[Raw]:
    """Settings that reduce_scatter, which is on unless it is turned off, does not go with."""
    if look.stage not in (2, 3) or look.get("zero_optimization", "reduce_scatter") is False:
        return
    mend = "set zero_optimization.reduce_scatter to false, or delete the key"
    if look.get("prescale_gradients") is True:
        words = "prescale_gradients does not go with reduce_scatter"
        yield Raw("contradiction", ("prescale_gradients",), words, _ASSERTS, mend)
    factor = look.get("gradient_predivide_factor")
    if isinstance(factor, int | float) and factor != 1:
        words = f"gradient_predivide_factor {show(factor)} does not go with reduce_scatter"
        yield Raw("contradiction", ("gradient_predivide_factor",), words, _ASSERTS, mend)
    if look.stage == 3 and str(look.get("optimizer", "type")).lower() == "muon":
        words = "Muon at stage 3 does not go with reduce_scatter"
        mend = "set zero_optimization.reduce_scatter to false, or use stage 2"
        yield Raw("contradiction", ("optimizer", "type"), words, _ASSERTS, mend)


_ASSERTS: Final = "DeepSpeed stops after the model has loaded"


def summed(look: Look) -> Iterator[Raw]:
    """Gradients that are summed, which stage 3 cannot."""
    if look.stage == 3 and str(look.get("gradient_allreduce_op")).lower() == "sum":
        words = "gradient_allreduce_op sum does not go with stage 3"
        yield Raw("contradiction", ("gradient_allreduce_op",), words, _ASSERTS, 'set it to "mean"')


def comm_dtype(look: Look) -> Iterator[Raw]:
    """Stage 1 with bf16 communication and accumulation."""
    steps = first(look.get("gradient_accumulation_steps"), (look.around.train or {}).get(_STEPS))
    dtype = str(look.get("communication_data_type")).lower()
    if look.stage == 1 and dtype == "bf16" and isinstance(steps, int) and steps > 1:
        words = f"communication_data_type bf16 at stage 1 with {steps} accumulation steps"
        told = "the backward pass can stop on a dtype that does not match"
        path = ("communication_data_type",)
        yield Raw("contradiction", path, words, told, "delete it, or use stage 2", (), "warning")


def checkpointing(look: Look) -> Iterator[Raw]:
    """DeepSpeed's own activation checkpointing, which models of Transformers never call."""
    path = ("activation_checkpointing",)
    if look.get(*path):
        words = "activation_checkpointing does nothing for a model of Transformers"
        mend = "delete it, and set train.gradient_checkpointing in the run file"
        yield Raw(
            "unread-key",
            path,
            words,
            "activations take the memory that they always took",
            mend,
            (),
            "warning",
        )


# --- the run file ------------------------------------------------------------------------------------------

# The least that makes sense of each; Trainer takes what is below, and dies of it once all is loaded.
_LEAST: Final = MappingProxyType(
    {
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0,
        "weight_decay": 0,
        "warmup_steps": 0,
        "max_grad_norm": 0,
    }
)


def arguments(look: Look) -> Iterator[Raw]:
    """Numbers of the run file with which nothing can be trained."""
    for name, least in _LEAST.items():
        value = (look.around.train or {}).get(name)
        if isinstance(value, int | float) and not value >= least:
            words = f"train.{name} is {value}, and must be {least} or more"
            clips = name == "max_grad_norm"
            told = "DeepSpeed does not clip" if clips else "the run stops after the model has loaded"
            yield Raw("run-file", (), words, told, f"set train.{name} to {least} or more in the run file")


def finds_batch(look: Look) -> Iterator[Raw]:
    """A batch size that is to be found out, which Trainer does not do at stage 3 (trainer.py, 5.24)."""
    if look.stage == 3 and (look.around.train or {}).get("auto_find_batch_size") is True:
        words = "train.auto_find_batch_size does not go with stage 3"
        told = "Trainer stops after the model has loaded"
        mend = "use stage 2, or take train.auto_find_batch_size out of the run file"
        yield Raw("contradiction", ("zero_optimization", "stage"), words, told, mend)


# --- the batch ---------------------------------------------------------------------------------------------

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def left_out(look: Look) -> Iterator[Raw]:
    """Keys that Trainer fills in only where they are there."""
    misnamed = look.misnamed()  # whose finding tells of it
    if look.get("gradient_clipping") is None and "gradient_clipping" not in misnamed:
        words = "gradient_clipping is left out"
        told = "DeepSpeed clips at 1.0 from 0.19.3 on and not at all before, whatever max_grad_norm says"
        yield _left_out(look, words, told, "gradient_clipping")
    if {_TOTAL, _MICRO} & misnamed:
        return
    if look.get(_TOTAL) is None and look.get(_MICRO) is None:
        words = f"{_TOTAL} and {_MICRO} are left out"
        told = "a Trainer stops: one of them needs to be provided (dstool train fills them in)"
        yield _left_out(look, words, told, _TOTAL, _MICRO, _STEPS)
    elif look.get(_STEPS) is None and look.get(_TOTAL) is not None:
        told = "the batch is wrong as soon as the run accumulates (dstool train fills it in)"
        yield _left_out(look, f"{_STEPS} is left out", told, _STEPS)


def _left_out(look: Look, words: str, told: str, *names: str) -> Raw:
    missing = [name for name in names if not look.has(name)]
    edits = add(look, (), **dict.fromkeys(missing, AUTO))
    for name in names:
        edits += replace(look, (name,), AUTO) if look.has(name) and look.get(name) is None else ()
    mend = ", ".join(put(look, (name,), '"auto"') for name in names)
    return Raw("left-out", (), words, told, mend, edits, "warning")


def batch(look: Look) -> Iterator[Raw]:
    """train_batch_size is micro batch * accumulation * ranks."""
    total, train = look.get(_TOTAL), look.around.train
    given = (total, look.get(_MICRO), look.get(_STEPS))
    if not count(total) or any(value not in (None, AUTO) and not count(value) for value in given):
        return
    arguments = dict(train or {})
    micro = first(given[1], arguments.get("per_device_train_batch_size"))
    steps = first(given[2], arguments.get(_STEPS))
    told = "DeepSpeed stops after the model has loaded"
    mend = f'set {_TOTAL} to "auto"'
    ranks = look.around.world_size
    if ranks is not None and ranks > 0:
        try:
            read.fit_batch({_TOTAL: total, _MICRO: micro, _STEPS: steps}, ranks, {})
        except ConfigError as error:
            yield Raw("batch", (_TOTAL,), error.message, told, str(error.hint))
        return
    known = {name: value for name, value in ((_MICRO, micro), (_STEPS, steps)) if count(value)}
    if total % math.prod(known.values()):
        words = f"{_TOTAL} is {total}, no multiple of "
        words += " * ".join(f"{name} {value}" for name, value in known.items())
        yield Raw("batch", (_TOTAL,), words, told, mend)
    elif len(known) == 2:
        words = f"{_TOTAL} is pinned to {total}, which fits one number of ranks only"
        told = "with another number of ranks DeepSpeed stops after the model has loaded"
        yield Raw("pinned", (_TOTAL,), words, told, mend, (), "warning")


# --- the optimizer -----------------------------------------------------------------------------------------

_OWN: Final = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
_TORCH: Final = ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_CANNOT: Final = ("LBFGS", "SparseAdam")
_GONE: Final = ("onebitadam", "zerooneadam", "onebitlamb")
_MEANT: Final = MappingProxyType(
    {
        "fusedadam": "AdamW",
        "cpuadam": "AdamW",
        "deepspeedcpuadam": "AdamW",
        "fusedlamb": "Lamb",
        "fusedlion": "Lion",
        "adamw8bit": "AdamW",
        "adamw_hf": "AdamW",
        "adamw_torch": "AdamW",
        "adamw_torch_fused": "AdamW",
        "adamw_apex_fused": "AdamW",
        "lion_32bit": "Lion",
    }
)
_ALIASES: Final = MappingProxyType(
    {
        "learning_rate": "lr",
        "adam_epsilon": "eps",
        "epsilon": "eps",
        "wd": "weight_decay",
        "adam_beta1": "betas",
        "adam_beta2": "betas",
        "beta1": "betas",
        "beta2": "betas",
    }
)
_TYPE: Final = ("optimizer", "type")


def optimizer(look: Look) -> Iterator[Raw]:
    """The name of the optimizer."""
    block = look.get("optimizer")
    if not isinstance(block, dict):
        return
    name = block.get("type")
    told = "DeepSpeed stops after the model has loaded"
    if name is None:
        yield Raw("no-type", ("optimizer",), "the optimizer has no type", told, put(look, _TYPE, '"AdamW"'))
    elif not isinstance(name, str) or name.lower() in _OWN:
        return
    elif name in _CANNOT:
        yield Raw("optimizer", _TYPE, f"{name} does not train with DeepSpeed", told, 'write "AdamW"')
    elif name.lower() in _GONE:
        if not _has_one_bit(look.around.machine):
            words = f"{name} is gone from DeepSpeed, 0.19.6 is the last that has it"
            if look.around.machine and look.around.machine.deepspeed:
                words += f", and {look.around.machine.deepspeed} is installed"
            yield Raw("optimizer", _TYPE, words, told, "pip install deepspeed==0.19.6, or take AdamW")
    elif name not in _TORCH:
        known = {each.lower(): each for each in (*_TORCH, *keys.optimizers())}
        close = difflib.get_close_matches(name.lower(), known, 1, cutoff=0.6)
        meant = _MEANT.get(name.lower()) or (known[close[0]] if close else None)
        words = f"{name} is no optimizer of DeepSpeed" + (f", did you mean {meant}?" if meant else "")
        yield Raw("optimizer", _TYPE, words, told, f'write "{meant or "AdamW"}"')


def _has_one_bit(machine: Machine | None) -> bool:
    """Whether the DeepSpeed that is installed is one of those up to 0.19.6."""
    if machine is None or not machine.deepspeed:
        return False
    numbers = re.findall(r"\d+", machine.deepspeed)[:3]
    return [int(each) for each in numbers] <= [0, 19, 6]


def adagrad(look: Look) -> Iterator[Raw]:
    """ZeRO makes Adagrad anew, and Trainer's scheduler goes on moving the old one (zero/stage3.py and
    stage_1_and_2.py `initialize_optimizer_states`).
    """
    train = look.around.train or {}
    own = str(train.get("lr_scheduler_type", "linear"))
    still = own == "constant" or look.around.train is None
    if str(look.get(*_TYPE)).lower() != "adagrad" or look.stage == 0 or look.offloads or still:
        return
    if not isinstance(look.get("scheduler"), dict):
        words = f"Adagrad at stage {look.stage} does not follow Trainer's own scheduler ({own})"
        told = "the learning rate stays what it was in the first step"
        mend = "add a scheduler such as WarmupDecayLR, or offload the optimizer to the CPU"
        yield Raw("contradiction", _TYPE, words, told, mend)


# accelerate 1.15 utils/deepspeed.py `map_pytorch_optim_to_deepspeed`: what each of these becomes is the same
# optimizer; any other becomes Adam.
_MAPPED: Final = (
    "adamw_torch",
    "adamw_apex_fused",
    "adamw_anyprecision",
    "adagrad",
    "lion_32bit",
    "paged_lion_32bit",
)


def replaced(look: Look) -> Iterator[Raw]:
    """An optimizer of Trainer's own that accelerate puts DeepSpeed's Adam in the place of."""
    optim = str((look.around.train or {}).get("optim", "adamw_torch"))
    kept = optim.startswith(_MAPPED) or look.get("zero_force_ds_cpu_optimizer") is False
    if not look.offloads or look.stage == 0 or kept or isinstance(look.get("optimizer"), dict):
        return
    path = ("zero_optimization", "offload_optimizer", "device")
    words = f"with the optimizer off the device, Adam silently takes the place of train.optim {optim}"
    told = "the run trains with another optimizer than it says"
    yield Raw("contradiction", path, words, told, put(look, ("zero_force_ds_cpu_optimizer",), "false"))


def lamb(look: Look) -> Iterator[Raw]:
    """What FusedLamb, a GPU kernel, does not go with (runtime/engine.py)."""
    if str(look.get(*_TYPE)).lower() != "lamb":
        return
    told = "DeepSpeed stops after the model has loaded"
    if look.offloads:
        words = "Lamb runs on the GPU alone, and its state is offloaded here"
        yield Raw("contradiction", _TYPE, words, told, "take AdamW, or no offload")
    if count(look.get("fp16", "loss_scale")):
        words = f"Lamb needs dynamic loss scaling, and fp16.loss_scale is {look.get('fp16', 'loss_scale')}"
        yield Raw("contradiction", ("fp16", "loss_scale"), words, told, "set fp16.loss_scale to 0")


_OF_MUP: Final = ("muadam", "muadamw", "musgd")


def mup(look: Look) -> Iterator[Raw]:
    """The optimizers that DeepSpeed imports from the package mup, once it makes them (runtime/engine.py)."""
    name, machine = look.get(*_TYPE), look.around.machine
    if machine is not None and not machine.mup and str(name).lower() in _OF_MUP:
        words = f"{name} needs the package mup, which is not installed"
        told = "DeepSpeed stops with a traceback, after the model has loaded"
        yield Raw("optimizer", _TYPE, words, told, "pip install mup, or take AdamW")


def amsgrad(look: Look) -> Iterator[Raw]:
    """A variant of Adam that DeepSpeed's own optimizers have a name for and do not compute (ops/adam)."""
    name, path = str(look.get(*_TYPE)), ("optimizer", "params", "amsgrad")
    of_torch = look.get("optimizer", "params", "torch_adam") is True
    if look.get(*path) is not True or name.lower() not in ("adam", "adamw", "lamb"):
        return
    if name.lower() == "lamb" or not of_torch:
        of_torch_instead = put(look, ("optimizer", "params", "torch_adam"), "true")
        mend = "delete it" if name.lower() == "lamb" else f"delete it, or {of_torch_instead}"
        words = f"{name} of DeepSpeed does not support amsgrad"
        yield Raw("optimizer-param", path, words, "DeepSpeed stops after the model has loaded", mend)


def untested(look: Look) -> Iterator[Raw]:
    """An optimizer that ZeRO takes only when it is told to."""
    name = look.get(*_TYPE)
    asks = isinstance(name, str) and (name in _TORCH or name.lower() == "lamb")
    if asks and look.stage in (1, 2, 3) and look.get("zero_allow_untested_optimizer") is not True:
        words = f"{name} is untested with ZeRO, which has to be allowed"
        mend = put(look, ("zero_allow_untested_optimizer",), "true")
        yield Raw("untested-optimizer", _TYPE, words, "DeepSpeed stops after the model has loaded", mend)


# What torch's own Adam and AdamW take besides, which "torch_adam": true builds (runtime/engine.py).
_TORCH_ADAM: Final = frozenset(("capturable", "differentiable", "foreach", "fused", "maximize"))


def optimizer_params(look: Look) -> Iterator[Raw]:
    """Parameters that the named optimizer does not take."""
    name, params = look.get(*_TYPE), look.get("optimizer", "params")
    known = {**{each.lower(): each for each in keys.optimizers()}, **_MEANT}
    if not isinstance(name, str) or not isinstance(params, dict) or name.lower() not in known:
        return
    tables = keys.optimizers()[known[name.lower()]]
    takes = tables.offloaded if look.offloads else tables.takes
    if params.get("torch_adam") is True and known[name.lower()] in ("Adam", "AdamW"):
        takes = takes | _TORCH_ADAM
    meant = _meant(params, takes, _ALIASES)
    for given in meant:
        path = ("optimizer", "params", given)
        told = "DeepSpeed stops after the model has loaded: unexpected keyword argument"
        if given == "max_grad_norm":
            words, mend = "max_grad_norm is no parameter of an optimizer", "use gradient_clipping"
            yield Raw("optimizer-param", path, words, told, mend)
            continue
        where = " off the device" if look.offloads and given in tables.takes else ""
        words = f"{known[name.lower()]}{where} takes no {given}"
        yield _wrong_param(look, Raw("optimizer-param", path, words, told, ""), meant, _ALIASES)


def _meant(
    params: Mapping[str, Any], takes: frozenset[str], aliases: Mapping[str, str]
) -> dict[str, str | None]:
    """The parameters that are not taken, each with the one that it comes near to."""
    meant = {}
    for given in [given for given in params if given not in takes]:
        close = difflib.get_close_matches(given, sorted(takes), 1, cutoff=0.7)
        alias = aliases.get(given)
        meant[given] = alias if alias in takes else (close[0] if close else None)
    return meant


def _wrong_param(look: Look, raw: Raw, meant: Mapping[str, str | None], aliases: Mapping[str, str]) -> Raw:
    """A parameter that is not taken, renamed where its name can only mean one that is, and free."""
    *block, given = raw.at
    name, mend = meant[given], renamed(look, raw.at, meant)
    if name is None:
        return dataclasses.replace(raw, mend=mend)
    problem = f"{raw.problem}, did you mean {name}?"
    free = not look.has(*block, name)
    if name == "betas" and free:
        return dataclasses.replace(raw, problem=problem, mend='write "betas": [0.9, 0.999]')
    edits: tuple[Edit, ...] = ()
    alone = list(meant.values()).count(name) == 1
    if name == aliases.get(given) and free and alone and raw.at in look.source.places:
        edits = (look.source.renaming(raw.at, name),)
    return dataclasses.replace(raw, problem=problem, mend=mend, edits=edits)


# --- the scheduler -----------------------------------------------------------------------------------------

_TRAINERS: Final = MappingProxyType(
    {
        "linear": "WarmupDecayLR",
        "cosine": "WarmupCosineLR",
        "constant": None,
        "constant_with_warmup": "WarmupLR",
        "polynomial": None,
        "inverse_sqrt": None,
    }
)
# Those of torch, with what each cannot do without (torch 2.13, torch/optim/lr_scheduler.py).
_TORCH_SCHEDULERS: Final = MappingProxyType(
    {
        "ConstantLR": (),
        "CosineAnnealingLR": ("T_max",),
        "CosineAnnealingWarmRestarts": ("T_0",),
        "CyclicLR": ("base_lr", "max_lr"),
        "ExponentialLR": ("gamma",),
        "LambdaLR": ("lr_lambda",),
        "LinearLR": (),
        "MultiStepLR": ("milestones",),
        "MultiplicativeLR": ("lr_lambda",),
        "OneCycleLR": ("max_lr",),
        "PolynomialLR": (),
        "ReduceLROnPlateau": (),
        "SequentialLR": ("schedulers", "milestones"),
        "StepLR": ("step_size",),
    }
)
# What comes nearest to each of these among Trainer's own.
_NEAREST: Final = MappingProxyType(
    {
        "ConstantLR": "constant",
        "CosineAnnealingLR": "cosine",
        "CosineAnnealingWarmRestarts": "cosine_with_restarts",
        "OneCycleLR": "cosine",
        "PolynomialLR": "polynomial",
    }
)
_SCHEDULER_ALIASES: Final = MappingProxyType(
    {
        "warmup_steps": "warmup_num_steps",
        "num_warmup_steps": "warmup_num_steps",
        "max_steps": "total_num_steps",
        "total_steps": "total_num_steps",
        "num_training_steps": "total_num_steps",
    }
)


def scheduler(look: Look) -> Iterator[Raw]:
    """The name of the scheduler."""
    block = look.get("scheduler")
    if not isinstance(block, dict):
        return
    name, path = block.get("type"), ("scheduler", "type")
    told = "DeepSpeed stops after the model has loaded"
    if name is None:
        yield Raw("no-type", ("scheduler",), "the scheduler has no type", told, put(look, path, '"WarmupLR"'))
    elif not isinstance(name, str) or name in keys.schedulers():
        return
    elif name in _TORCH_SCHEDULERS:
        yield from _of_torch(look, name)
    elif name in _TRAINERS:
        words = f"{name} is a scheduler of Trainer, not of DeepSpeed"
        mend = f"delete the block and set train.lr_scheduler_type {name}"
        mend += f', or write "{_TRAINERS[name]}"' if _TRAINERS[name] else ""
        yield Raw("scheduler", path, words, told, mend)
    else:
        known = {each.lower(): each for each in keys.schedulers()}
        close = difflib.get_close_matches(name.lower(), known, 1, cutoff=0.6)
        guess = f", did you mean {known[close[0]]}?" if close else ""
        words = f"{name} is no scheduler of DeepSpeed{guess}"
        edits = replace(look, path, known[name.lower()]) if name.lower() in known else ()
        mend = f'write "{known[close[0]]}"' if close else f"write one of {', '.join(known.values())}"
        yield Raw("scheduler", path, words, told, mend, edits)


def _of_torch(look: Look, name: str) -> Iterator[Raw]:
    """Where a scheduler of torch cannot be built: on an optimizer of DeepSpeed's, and by JSON alone.

    The sources are runtime/engine.py `_do_optimizer_sanity_check` and `_take_model_step`.
    """
    told, needs = _ASSERTS, _TORCH_SCHEDULERS[name]
    trainers = _NEAREST.get(name, "linear")
    mend = f"delete the scheduler block and set train.lr_scheduler_type to {trainers} in the run file"
    if look.stage != 0 or _is_half(look):
        words = f"{name} is a scheduler of torch, which DeepSpeed cannot build above stage 0 or in 16 bits"
    elif {"lr_lambda", "schedulers"} & set(needs):
        words = f"{name} takes what only Python can write"
    elif name == "ReduceLROnPlateau":
        words = f"DeepSpeed gives {name} the batch size for a loss"
        told = "the learning rate falls to nothing"
    else:
        yield from _no_params(look, name, needs)
        params = look.get("scheduler", "params")
        block = ("scheduler", "params") if isinstance(params, dict) else ("scheduler",)
        for each in [each for each in needs if look.get("scheduler", "params", each) is None]:
            mend = put(look, ("scheduler", "params", each), "...")
            yield Raw("scheduler-needs", block, f"{name} needs {each}", told, mend)
        return
    yield Raw("scheduler", ("scheduler", "type"), words, told, mend)


def _is_half(look: Look) -> bool:
    """Whether fp16 or bf16 is on, by the JSON or by the run file where that is asked."""
    train = look.around.train or {}
    values = {name: look.get(name, "enabled") for name in ("fp16", "bf16")}
    return any(value is True or (value == AUTO and bool(train.get(name))) for name, value in values.items())


def scheduler_params(look: Look) -> Iterator[Raw]:
    """Parameters that the named scheduler does not take, and those that it needs."""
    name, params = look.get("scheduler", "type"), look.get("scheduler", "params")
    if not isinstance(name, str) or name not in keys.schedulers():
        return
    yield from _no_params(look, name, keys.schedulers()[name].needs)
    table, given = keys.schedulers()[name], params if isinstance(params, dict) else {}
    told = "DeepSpeed stops after the model has loaded"
    meant = _meant(given, table.takes, _SCHEDULER_ALIASES)
    for each in meant:
        raw = Raw("scheduler-param", ("scheduler", "params", each), f"{name} takes no {each}", told, "")
        yield _wrong_param(look, raw, meant, _SCHEDULER_ALIASES)
    for each in sorted(each for each in table.needs if given.get(each) is None):
        block = ("scheduler", "params") if isinstance(params, dict) else ("scheduler",)
        fills = keys.keys()[f"scheduler.params.{each}"].auto == "trainer"
        if any(_SCHEDULER_ALIASES.get(name) == each for name in given):
            continue
        edits = _filled(look, each) if fills else ()
        mend = put(look, ("scheduler", "params", each), f'"{AUTO}"' if fills else "a number")
        yield Raw("scheduler-needs", block, f"{name} needs {each}", told, mend, edits)


def _no_params(look: Look, name: str, needs: Collection[str]) -> Iterator[Raw]:
    """A scheduler without the block of its parameters, which DeepSpeed unpacks unseen (runtime/engine.py)."""
    if not needs and not look.has("scheduler", "params"):
        words, edits = f"{name} needs params, which may be empty", add(look, ("scheduler",), params={})
        yield Raw("scheduler-needs", ("scheduler",), words, _ASSERTS, 'add "params": {}', edits)


def _filled(look: Look, name: str) -> tuple[Edit, ...]:
    """ "auto" for a parameter of the scheduler that is left out or null."""
    path = ("scheduler", "params", name)
    if look.has(*path):
        return replace(look, path, AUTO)
    if look.has("scheduler", "params"):
        whole = look.get("scheduler", "params") is None
        return replace(look, path[:-1], {name: AUTO}) if whole else add(look, path[:-1], **{name: AUTO})
    return add(look, ("scheduler",), params={name: AUTO})


def scheduler_steps(look: Look) -> Iterator[Raw]:
    """A pinned total, and steps at the beginning in which nothing is learnt."""
    total, train = look.get("scheduler", "params", "total_num_steps"), look.around.train
    path = ("scheduler", "params", "total_num_steps")
    if count(total) and train is not None and not train.get("max_steps"):
        words = f"total_num_steps is pinned to {total}"
        told = "Trainer refuses it unless the run has exactly as many steps"
        yield Raw("pinned", path, words, told, 'set it to "auto"', (), "warning")
    name = look.get("scheduler", "type")
    warms = str(name).startswith("Warmup")
    steps = look.get("scheduler", "params", "warmup_num_steps")
    if count(total) and count(steps) and steps > total and name in ("WarmupDecayLR", "WarmupCosineLR"):
        words = f"warmup_num_steps {steps} is above total_num_steps {total}"
        told = "the run ends before the learning rate has come to its peak"
        path = ("scheduler", "params", "warmup_num_steps")
        yield Raw("contradiction", path, words, told, f"write {total} or less", (), "warning")
    if train is not None and warms and steps in (None, AUTO) and not train.get("warmup_steps"):
        words = "the scheduler warms up, and the run file gives no train.warmup_steps"
        told = "the first two optimizer steps have a learning rate of 0"
        mend = "set train.warmup_steps, or delete the scheduler block"
        yield Raw("no-warmup", ("scheduler",), words, told, mend, (), "warning")


# --- the machine -------------------------------------------------------------------------------------------


def nvme_folder(look: Look) -> Iterator[Raw]:
    """The folder that is offloaded to."""
    machine = look.around.machine
    for block in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", block, "nvme_path")
        folder = look.get(*path)
        if machine is None or look.get(*path[:-1], "device") != "nvme" or not isinstance(folder, str):
            continue
        state = machine.folders.get(folder, "fine")
        mend = "name a folder on a local NVMe disk"
        if state in ("no folder", "unwritable"):
            said = "is no folder" if state == "no folder" else "cannot be written"
            told = "DeepSpeed stops when it first writes there"
            yield Raw("nvme-path", path, f"{folder} {said}", told, mend)
        elif state == "in memory":
            told = "what is offloaded stays in the memory that it was to leave"
            yield Raw("nvme-path", path, f"{folder} is on a file system in memory", told, mend, (), "warning")


def compiled(look: Look) -> Iterator[Raw]:
    """What DeepSpeed compiles for offloading."""
    machine = look.around.machine
    if machine is None or look.stage in (None, 0):
        return
    where = [
        ("zero_optimization", block, "device")
        for block in ("offload_optimizer", "offload_param")
        if look.device(block) in ("cpu", "nvme")
    ]
    nvme = [path for path in where if look.get(*path) == "nvme" and look.stage == 3]
    if nvme and not machine.libaio and "async_io" not in machine.built:
        told = "DeepSpeed cannot compile async_io, and the run stops"
        mend = "apt-get install libaio-dev (Debian, Ubuntu) or dnf install libaio-devel"
        yield Raw("no-libaio", nvme[0], "this machine lacks libaio's headers", told, mend, (), "warning")
    op = "cpu_adam" if look.offloads else "async_io"
    if where and (look.offloads or nvme) and not machine.compiler and op not in machine.built:
        told = f"DeepSpeed cannot compile {op}, and the run stops"
        mend = "apt-get install g++ python3-dev (Debian, Ubuntu), or set CXX to a C++ compiler"
        yield Raw("no-compiler", where[0], "this machine lacks a C++ compiler", told, mend, (), "warning")


def precision(look: Look) -> Iterator[Raw]:
    """A type that this machine does not train in."""
    machine, train = look.around.machine, look.around.train or {}
    if machine is None:
        return
    bf16 = look.get("bf16", "enabled")
    if not machine.bf16 and (bf16 is True or (bf16 == AUTO and train.get("bf16") is True)):
        told = "torch emulates bf16 there: slower than fp32, and refused by some of its kernels"
        words, mend = "a GPU of this machine is older than bf16 (compute capability 8.0)", "use fp16 or fp32"
        yield Raw("precision", ("bf16", "enabled"), words, told, mend, (), "warning")
    if machine.gpu:
        return
    enabled = look.get("fp16", "enabled")
    if enabled is True or (enabled == AUTO and train.get("fp16") is True):
        told = "the run stops: fp16 is not supported on the CPU"
        path = ("fp16", "enabled")
        yield Raw("precision", path, "this machine has no GPU", told, "use bf16 or fp32", (), "warning")
    name = str(look.get(*_TYPE)).lower()
    if name == "lamb" or (name == "lion" and not look.offloads):
        told = "the run stops: This op had not been implemented on CPU backend"
        words = f"{look.get(*_TYPE)} needs a GPU, and this machine has none"
        yield Raw("no-device", _TYPE, words, told, "take AdamW, or write the file where the GPUs are")


RULES: Final[tuple[Rule, ...]] = (
    scattered,
    summed,
    comm_dtype,
    checkpointing,
    arguments,
    finds_batch,
    left_out,
    batch,
    optimizer,
    adagrad,
    replaced,
    lamb,
    mup,
    amsgrad,
    untested,
    optimizer_params,
    scheduler,
    scheduler_params,
    scheduler_steps,
    nvme_folder,
    compiled,
    precision,
)
