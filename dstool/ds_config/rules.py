"""What is wrong with a DeepSpeed JSON in itself: names, types, values, "auto", and keys its stage ignores.

The rules are those of deepspeed 0.19.8, transformers 5.24 and accelerate 1.15; what each key takes is in the
table of `keys`. A rule yields a `Raw` for everything that it finds, and `check` gives it its place.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from dstool.ds_config import keys, read
from dstool.ds_config.build import AUTO
from dstool.ds_config.glossary import MEANT
from dstool.ds_config.looks import Look, Raw, Rule, Severity, add, delete, nearest, put, renamed, replace
from dstool.ds_config.read import show
from dstool.ds_config.source import Edit

# --- what `reconcile` refuses ------------------------------------------------------------------------------

_REFUSED: Final = MappingProxyType(
    {
        "wrong-type": ("DeepSpeed stops, or computes with something else", "write it as the type expected"),
        "wrong-value": ("DeepSpeed stops after the model has loaded", "choose one of the values"),
        "unknown-key": ("DeepSpeed ignores it without a word", "correct the name, or delete it"),
        "wrong-block": ("DeepSpeed ignores it at the top level", "move it into zero_optimization"),
        "removed-key": ("DeepSpeed refuses the whole file", "delete it"),
        "offload-stage": (
            "DeepSpeed accepts it and offloads nothing",
            "raise the stage, or delete the block",
        ),
        "nvme-without-path": ("DeepSpeed stops when it first writes there", ""),
        "both-precisions": ("DeepSpeed stops after the model has loaded", 'set one of the two to "auto"'),
        "silent-winner": ("the run file's choice has no effect", "delete one of the two"),
        "mismatch": ("Trainer refuses the pair after the model has loaded", 'set it to "auto" in the JSON'),
    }
)


_WARM_UP: Final = ("scheduler", "params", "warmup_num_steps")
# deepspeed 0.19.8 runtime/lr_schedules.py; a warm-up of 1 step it takes for one of 2.
_NO_WARM_UP: Final = (
    "DeepSpeed stops after the model has loaded: ValueError, warmup_num_steps must be a positive integer"
)

# What to write where the type alone does not say it.
_FORMS: Final[Mapping[tuple[str, ...], str]] = MappingProxyType(
    {
        ("bf16",): 'write {"enabled": true}',
        ("fp16",): 'write {"enabled": true}',
        ("optimizer",): 'write {"type": "AdamW", "params": {"lr": "auto"}}',
        ("optimizer", "params", "betas"): 'write [0.9, 0.999], or "auto" in place of the list',
        _WARM_UP: 'write 1 or more, or "auto"',
        ("gradient_accumulation_steps",): 'write a whole number above 0, or "auto"',
        ("zero_optimization",): 'write {"stage": 2}, or another stage',
        ("zero_optimization", "offload_optimizer"): 'write {"device": "cpu"}',
        ("zero_optimization", "offload_param"): 'write {"device": "cpu"}',
    }
)


def refused(look: Look) -> Iterator[Raw]:
    """Everything that stops `dstool train`, in the words of `read.reconcile`."""
    problems = [_in_place(look, each) for each in read.problems(look.ds, look.around.train or {})]
    meant = {each.path[-1]: each.meant for each in problems if each.meant}
    for each in problems:
        consequence, mend = _REFUSED[each.rule]
        problem, dotted = each.words, ".".join(each.path)
        edits: tuple[Edit, ...] = ()
        if each.rule == "removed-key":
            mend = f"delete it: {keys.removed().get(dotted, 'nothing replaces it')}"
            edits = delete(look, each.path) if _is_off(look.get(*each.path)) else ()
        elif each.rule == "nvme-without-path":
            mend = put(look, (*each.path[:-1], "nvme_path"), '"/local_nvme"')
        elif each.path == (_ZERO,) and isinstance(look.get(_ZERO), bool):
            consequence, mend, edits = _old_zero(look)
        elif each.rule == "wrong-type":
            mend = _FORMS.get(each.path, mend)
            if each.path == _WARM_UP and not isinstance(look.get(*_WARM_UP), bool):
                consequence = _NO_WARM_UP
            edits = _plain_value(look, each.path, keys.keys().get(dotted))
        elif each.rule == "unknown-key":
            problem = problem + _elsewhere(each.path[-1], problem)
            if each.meant:
                mend = renamed(look, each.path, meant)
            elif problem != each.words:
                mend = "move it where it is read, or delete it"
            if inside := keys.keys().get(dotted):
                problem = f"{dotted} is a path, and no key"
                mend = f"write {inside.name} into the block {inside.block}"
        elif each.rule == "wrong-value":
            edits = _plain_value(look, each.path, keys.keys().get(dotted))
        yield Raw(each.rule, each.path, problem, consequence, mend, edits, meant=_home(each))


def _home(problem: read.Problem) -> tuple[str, ...] | None:
    """Where the entry of a wrong name or place belongs."""
    if problem.rule == "wrong-block":
        return (_ZERO, *problem.path)
    return (*problem.path[:-1], problem.meant) if problem.meant else None


def _in_place(look: Look, problem: read.Problem) -> read.Problem:
    """The problem where it stands: `reconcile` speaks of bf16 by the name that it is read under."""
    if problem.path[0] == "bf16" and not look.has("bf16") and look.has("bfloat16"):
        return dataclasses.replace(problem, path=("bfloat16", *problem.path[1:]))
    return problem


_ZERO: Final = "zero_optimization"


def _old_zero(look: Look) -> tuple[str, str, tuple[Edit, ...]]:
    """What happens to the old form, true or false, and its mend (deepspeed 0.19.8 runtime/zero/config.py)."""
    stage = int(look.get(_ZERO))
    told = f"DeepSpeed by itself takes it for stage {stage}, accelerate stops with a traceback"
    edits = () if look.has("allgather_size") else replace(look, (_ZERO,), {"stage": stage})
    return told, f'write {{"stage": {stage}}}', edits


def _elsewhere(name: str, said: str) -> str:
    """Where a key of that name would be read, unless a better guess has been made."""
    if "did you mean" in said:
        return ""
    if name == "gradient_accumulation_dtype":
        return ", data_types.grad_accum_dtype is read"
    blocks = [key.block for key in keys.keys().values() if key.name == name and key.block]
    return f", it is read in {' and '.join(blocks[:2])}" if blocks and name != "enabled" else ""


def _is_off(value: Any) -> bool:
    """A block that is there and turned off."""
    return (
        value in (None, False) or value == {} or (isinstance(value, dict) and value.get("enabled") is False)
    )


# --- names -------------------------------------------------------------------------------------------------


def unknown(look: Look) -> Iterator[Raw]:
    """Keys below the top level that their block does not have."""
    for path, block in _blocks(look.ds, ()):
        known = keys.keys().get(".".join(path))
        if known is None or known.unknown not in ("error", "ignored"):
            continue
        names = [key.name for key in keys.keys().values() if key.block == known.path]
        meant: dict[str, str | None] = {}
        for name in [name for name in block if name not in names]:
            here = (*path, name)
            if ".".join(here) in keys.removed() or here == ("zero_optimization", "aio"):
                continue
            if known.unknown == "ignored" and name.startswith(("_", "//")):
                continue
            known_as = MEANT.get(".".join(here), "").rpartition(".")[2]
            meant[name] = known_as or nearest(name, names)
        for name in meant:
            yield _unknown(look, (*path, name), meant, strict=known.unknown == "error")


def _unknown(look: Look, here: tuple[str, ...], meant: Mapping[str, str | None], *, strict: bool) -> Raw:
    *above, name = here
    problem = f"{name} is no key of {'.'.join(above)}"
    consequence = "DeepSpeed refuses the whole file" if strict else "DeepSpeed ignores it without a word"
    elsewhere = _top_level(name) or _elsewhere(name, "")
    edits: tuple[Edit, ...] = ()
    if (old := (*above, str(meant[name]))) in _NEW_NAMES:
        problem, mend = f"{problem}, did you mean {_NEW_NAMES[old][-1]}?", _new_form(look, here, old)
        edits = _renewed(look, here, old)
    elif meant[name]:
        problem, mend = f"{problem}, did you mean {meant[name]}?", renamed(look, here, meant)
    elif elsewhere:
        problem, mend = problem + elsewhere, "move it where it is read, or delete it"
    else:
        mend = f"delete it; dstool explain {'.'.join(above)} lists the names"
    severity: Severity = "error" if strict else "warning"
    right = meant[name]
    home = (*above, right) if right else None
    return Raw("unknown-key", here, problem, consequence, mend, edits, severity, home)


def _top_level(name: str) -> str:
    return ", it belongs at the top level" if name in read.TOP_LEVEL_KEYS else ""


def _blocks(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every object with its path, the top level aside; lists are not looked into."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield (*path, name), value
            yield from _blocks(value, (*path, name))


def nested_aio(look: Look) -> Iterator[Raw]:
    """`aio` inside zero_optimization, as many published files have it."""
    path = ("zero_optimization", "aio")
    if not look.has(*path):
        return
    edits: tuple[Edit, ...] = ()
    if not look.has("aio") and path in look.source.places:
        place = look.source.places[path]
        block = look.source.text[place.start : place.end].replace("\n  ", "\n")
        edits = (look.source.deletion(path), look.source.addition((), f'"aio": {block}'))
    yield Raw(
        "aio-in-zero",
        path,
        "aio belongs at the top level, not in zero_optimization",
        "DeepSpeed refuses the whole file: Extra inputs are not permitted",
        "move aio to the top level",
        edits,
        meant=("aio",),
    )


_NEW_NAMES: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        ("bfloat16",): ("bf16",),
        ("zero_optimization", "stage3_gather_fp16_weights_on_model_save"): (
            "zero_optimization",
            "stage3_gather_16bit_weights_on_model_save",
        ),
        ("zero_optimization", "cpu_offload"): ("zero_optimization", "offload_optimizer"),
        ("zero_optimization", "cpu_offload_param"): ("zero_optimization", "offload_param"),
    }
)


def old_names(look: Look) -> Iterator[Raw]:
    """Keys with a newer name, and both names at once."""
    for key in (key for key in keys.keys().values() if key.deprecated):
        old = tuple(key.path.split("."))
        if not look.has(*old):
            continue
        new = _NEW_NAMES.get(old)
        if new is None:
            words = f"{key.name} is an old name, {key.deprecated}"
            yield Raw(
                "old-name", old, words, "a later DeepSpeed refuses it", str(key.deprecated), (), "warning"
            )
        elif look.has(*new):
            yield _both_names(look, old, new)
        else:
            words = f"{key.name} is an old name, it is {new[-1]} today"
            told, severity = _of_old(look, old)
            mend = _new_form(look, old, old)
            yield Raw("old-name", old, words, told, mend, _renewed(look, old, old), severity)


def _of_old(look: Look, old: tuple[str, ...]) -> tuple[str, Severity]:
    """What happens to what stands under an old name.

    accelerate 1.15 asks for offload_optimizer alone before it makes the optimizer, and DeepSpeed then refuses
    one of torch (runtime/engine.py `_configure_optimizer`).
    """
    own = isinstance(look.get("optimizer"), dict) or look.get("zero_force_ds_cpu_optimizer") is False
    if old[-1] == "cpu_offload" and look.get(*old) is True and not own and look.stage != 0:
        return (
            "a Trainer's own optimizer is refused for it (dstool train reads it as offload_optimizer)",
            "error",
        )
    told = "a Trainer does not look at it" if old == ("bfloat16",) else "a later DeepSpeed refuses it"
    return told, "warning"


def _new_form(look: Look, at: tuple[str, ...], old: tuple[str, ...]) -> str:
    """The mend of the entry at `at`, whose key is the old name `old`, or is taken for it."""
    new = _NEW_NAMES[old]
    if look.has(*new):
        return f"delete it, as {new[-1]} is there too"
    if not old[-1].startswith("cpu_offload"):
        return f"call it {new[-1]}"
    return f'write "{new[-1]}": {{"device": "cpu"}} in its place' if look.get(*at) is True else "delete it"


def _both_names(look: Look, old: tuple[str, ...], new: tuple[str, ...]) -> Raw:
    words = f"{old[-1]} and {new[-1]} are two names of one key, and both are there"
    if old == ("bfloat16",):
        told, edits = "only bf16 is read", delete(look, old)
        return Raw("both-names", old, words, told, f"delete {old[-1]}", edits, "warning")
    return Raw("both-names", old, words, "DeepSpeed refuses the pair", f"delete {old[-1]}")


def _renewed(look: Look, at: tuple[str, ...], old: tuple[str, ...]) -> tuple[Edit, ...]:
    """The old entry under its new name, with the same meaning; nothing where that is not certain."""
    value, new = look.get(*at), _NEW_NAMES[old]
    if at not in look.source.places or look.has(*new) or (at != old and look.has(*old)):
        return ()
    if not old[-1].startswith("cpu_offload"):
        return (look.source.renaming(at, new[-1]),) if at == old else ()
    if value is False or value is None:
        return delete(look, at)
    if value is not True or (look.stage or 0) < (3 if old[-1] == "cpu_offload_param" else 1):
        return ()  # where nothing is offloaded, its new name would be refused
    return (look.source.renaming(at, new[-1]), *replace(look, at, {"device": "cpu"}))


# --- values ------------------------------------------------------------------------------------------------


_REFUSES: Final = "DeepSpeed refuses the file after the model has loaded"


def values(look: Look) -> Iterator[Raw]:
    """Values of a type that the key does not take, or beyond its limits."""
    for path, value in _leaves(look.ds, ()):
        key = keys.keys().get(".".join(path))
        if key is None or value == AUTO or (value is None and "object" in key.types):
            continue
        if value is None and key.path in _NEVER_NULL:
            words = f"{key.path} is null, which is not the same as left out"
            yield Raw("wrong-type", path, words, _REFUSES, "delete it", delete(look, path))
        elif problem := _wrong_type(key, value, strict=_is_strict(key)):
            told = "DeepSpeed refuses the file, or takes it for something else"
            fraction = isinstance(value, float) and "int" in key.types
            mend = f"write {int(value)}" if fraction else f"write {_expected(key)}"
            yield Raw("wrong-type", path, problem, told, mend, _plain_value(look, path, key))
        elif problem := _beyond(key, value):
            edits = _older_dtype(look, path, value) or _in_its_case(look, path, key)
            told = _TAKEN.get(key.path, "DeepSpeed refuses it")
            meant = _choice(key, value)
            mend = f'write "{meant}"' if meant in (key.choices or ()) else _limits(key)
            yield Raw("wrong-value", path, problem, told, mend, edits)


# The blocks that may be null, beside those whose types say so: deepspeed 0.19.8 looks whether they are.
_MAY_BE_NULL: Final = frozenset(
    {
        "aio",
        "autotuning.model_info",
        "bf16",
        "checkpoint.writer",
        "expert_parallel",
        "optimizer.params",
        "scheduler.params",
        "zero_optimization.leaf_module",
    }
)


def null_blocks(look: Look) -> Iterator[Raw]:
    """Blocks that are null, in which DeepSpeed looks for keys at once."""
    told = "DeepSpeed stops with a traceback, after the model has loaded"
    for path, value in _leaves(look.ds, ()):
        key = keys.keys().get(".".join(path))
        if value is not None or key is None or "object" not in key.types or "null" in key.types:
            continue
        if key.path in _MAY_BE_NULL and not (
            key.path == "scheduler.params" and look.get("scheduler", "type")
        ):
            continue
        words = f"{key.path} is null where a block is expected"
        if path == ("zero_optimization",):  # without it a stage has to be chosen
            yield Raw("null-block", path, words, told, 'write {"stage": 2}, or another stage')
        else:
            yield Raw("null-block", path, words, told, "delete the key", delete(look, path))


def null_params(look: Look) -> Iterator[Raw]:
    """Parameters that are null, which DeepSpeed hands on as they are: no default takes their place."""
    filled = read.filled_params(look.ds)
    scheduler = keys.schedulers().get(str(look.get("scheduler", "type")))
    needs = {f"scheduler.params.{name}" for name in scheduler.needs} if scheduler else set()
    for block in ("optimizer", "scheduler"):
        params = look.get(block, "params")
        nulls = [name for name, value in params.items() if value is None] if isinstance(params, dict) else []
        for name in nulls:
            key = keys.keys().get(f"{block}.params.{name}")
            if key and "null" not in key.types and key.path not in needs:  # of these `scheduler_params` tells
                yield from _null_param(look, key, fills=name in filled.get(block, ()))


def _null_param(look: Look, key: keys.Key, *, fills: bool) -> Iterator[Raw]:
    path = tuple(key.path.split("."))
    if {"int", "float", "list"} & set(key.types):
        words = f"{key.path} is null, {_expected(key)} is expected"
        told = "DeepSpeed stops with a traceback, after the model has loaded"
        mend, edits = ('set it to "auto"', replace(look, path, AUTO)) if fills else ("delete the key", ())
        yield Raw("null-param", path, words, told, mend, edits)
    elif key.default is True:
        words = f"{key.path} is null, which counts as false"
        yield Raw("null-param", path, words, "what is on by default is off", "delete it", (), "warning")


# The keys of which DeepSpeed takes a wrong value too, and what it then does.
_TAKEN: Final = MappingProxyType(
    {
        "autotuning.tuner_type": "DeepSpeed takes gridsearch instead",
        "gradient_clipping": "DeepSpeed does not clip",
        "scheduler.params.warmup_type": "DeepSpeed takes log instead",
        "tensor_parallel.preset_model": "DeepSpeed goes on without a preset",
    }
)


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key with its value, blocks as well."""
    for name, value in node.items():
        yield (*path, name), value
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))


# Outside of pydantic's blocks, the keys that DeepSpeed computes with at once, null or not: with null at each
# key of the table in turn, `DeepSpeedConfig` refuses these.
_NEVER_NULL: Final = frozenset(
    {
        "autotuning.exps_dir",
        "autotuning.results_dir",
        "checkpoint.parallel_write.pipeline_stage",
        "checkpoint.tag_validation",
        "data_types.keep_in_fp32_modules",
        "flops_profiler.enabled",
        "gradient_allreduce_op",
        "tensor_parallel.dtype",
        "torch_autocast.dtype",
        "torch_autocast.lower_precision_safe_modules",
        "wall_clock_breakdown",
    }
)


def _is_strict(key: keys.Key) -> bool:
    """Whether null counts as a value; elsewhere it is the same as leaving the key out."""
    block = keys.keys().get(key.block)
    return key.path in _NEVER_NULL or (block is not None and block.unknown == "error")


def _wrong_type(key: keys.Key, value: Any, *, strict: bool) -> str:
    if value is None:
        fits = key.path not in _NEVER_NULL and ("null" in key.types or not strict)
    else:
        fits = any(_fits(kind, value) for kind in key.types)
    return "" if fits else f"{key.path} is {show(value)}, {_expected(key)} is expected"


def _fits(kind: str, value: Any) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind == "float":
        return isinstance(value, int | float)
    return {"str": str, "list": list, "object": dict}.get(kind, _Never) is type(value)


class _Never:
    """The type of no value."""


_KINDS: Final = MappingProxyType(
    {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "str": "a text in quotes",
        "list": "a list [ ... ]",
        "object": "an object { ... }",
        "null": "null",
    }
)


def _expected(key: keys.Key) -> str:
    return " or ".join(_KINDS[kind] for kind in key.types)


def _plain_value(look: Look, path: tuple[str, ...], key: keys.Key | None) -> tuple[Edit, ...]:
    """The number or boolean that a text or a 0 or 1 stands for, where nothing else can be meant."""
    value = look.get(*path)
    if key is None or path not in look.source.places:
        return ()
    meant: Any = None
    if isinstance(value, str) and "bool" in key.types:
        meant = {"true": True, "false": False}.get(value.strip().lower())
    elif isinstance(value, str):
        meant = _number(value, key)
    elif isinstance(value, float) and "int" in key.types and value.is_integer() and abs(value) < 2**53:
        meant = int(value)
    elif isinstance(value, int) and not isinstance(value, bool) and "bool" in key.types:
        meant = {0: False, 1: True}.get(value)
    fits = meant is not None and not _wrong_type(key, meant, strict=True) and not _beyond(key, meant)
    return replace(look, path, meant) if fits else ()


def _number(text: str, key: keys.Key) -> int | float | None:
    """The number in `text`, when JSON has it so too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2**63:
        return None
    return value if {"int", "float"} & set(key.types) else None


def _beyond(key: keys.Key, value: Any) -> str:
    if isinstance(value, bool | None | dict | list):
        return ""
    said = _choice(key, value) if key.any_case else value
    if key.choices is not None and said not in key.choices:
        close = difflib.get_close_matches(str(_choice(key, said)), [str(each) for each in key.choices], 1)
        guess = f", did you mean {close[0]}?" if close and isinstance(said, str) else ""
        return f"{key.path} is {show(value)}, not one of {', '.join(map(str, key.choices))}{guess}"
    if isinstance(value, str):
        return ""
    low = (key.minimum is not None and value < key.minimum) or (key.above is not None and value <= key.above)
    high = (key.maximum is not None and value > key.maximum) or (key.below is not None and value >= key.below)
    return f"{key.path} is {show(value)}, it must be {_limits(key)}" if low or high else ""


def _choice(key: keys.Key, value: Any) -> Any:
    """The choice that `value` is in small or capital letters; `value` where it is none."""
    folded = {str(each).lower(): each for each in key.choices or ()}
    return folded.get(value.lower(), value) if isinstance(value, str) else value


def _limits(key: keys.Key) -> str:
    if key.choices is not None:
        return f"one of {', '.join(map(str, key.choices))}"
    limits = [
        f"{words} {limit}"
        for words, limit in (
            ("at least", key.minimum),
            ("above", key.above),
            ("at most", key.maximum),
            ("below", key.below),
        )
        if limit is not None
    ]
    return " and ".join(limits)


# The keys for which DeepSpeed refuses a choice in another case as soon as it reads the file. Of the others
# some are taken for something else, which may be what runs today.
_OF_ONE_CASE: Final = frozenset(
    {
        "tensor_parallel.vocab_parallel_ce_backend",
        "torch_autocast.dtype",
        "weight_quantization.q_type",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
        "zero_optimization.zenflow.select_strategy",
    }
)


def _in_its_case(look: Look, path: tuple[str, ...], key: keys.Key) -> tuple[Edit, ...]:
    """The choice that is written in another case."""
    meant = _choice(key, look.get(*path))
    return replace(look, path, meant) if key.path in _OF_ONE_CASE and meant in (key.choices or ()) else ()


def _older_dtype(look: Look, path: tuple[str, ...], value: Any) -> tuple[Edit, ...]:
    """The names that bf16 had as a type of communication."""
    if path[-1].endswith("communication_data_type") and value in ("bfp16", "bfloat16"):
        return replace(look, path, "bf16")
    return ()


def impossible(look: Look) -> Iterator[Raw]:
    """Numbers that the table has no limit for and that nothing can be done with."""
    numbers = {
        ("optimizer", "params", "lr"): "below 0",
        ("optimizer", "params", "weight_decay"): "below 0",
        ("optimizer", "params", "eps"): "below 0",
    }
    for path, words in numbers.items():
        value = look.get(*path)
        if _fits("float", value) and value < 0:
            dotted = ".".join(path)
            told = "the run diverges or stops at its first step"
            yield Raw("wrong-value", path, f"{dotted} is {show(value)}, {words}", told, "write 0 or more")
    betas = look.get("optimizer", "params", "betas")
    if isinstance(betas, list) and any(_fits("float", each) and not 0 <= each < 1 for each in betas):
        words = f"optimizer.params.betas is {show(betas)}, each must be from 0 to below 1"
        mend = 'write "betas": [0.9, 0.999], or "auto"'
        yield Raw("wrong-value", ("optimizer", "params", "betas"), words, "the optimizer refuses them", mend)


# --- auto --------------------------------------------------------------------------------------------------

_BY_HIDDEN_SIZE: Final = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
# The classes of transformers 5.24 whose config has no hidden size where Trainer looks for it.
_NO_HIDDEN_SIZE: Final = frozenset(
    (
        "bark",
        "blt",
        "colpali",
        "colqwen2",
        "dia",
        "efficientnet",
        "encoder-decoder",
        "musicgen",
        "musicgen_melody",
        "parakeet_ctc",
        "parakeet_encoder",
        "perceiver",
        "pi0",
        "qwen2_5_omni",
        "qwen3_omni_moe",
        "rag",
        "sam",
        "sam2",
        "sam2_video",
        "sam3",
        "sam_hq",
        "speech-encoder-decoder",
        "t5gemma",
        "t5gemma2",
        "timm_wrapper",
        "vision-encoder-decoder",
    )
)


def auto(look: Look) -> Iterator[Raw]:
    """ "auto" where nobody puts a value in its place."""
    for path, value in _leaves(look.ds, ()):
        key = keys.keys().get(".".join(path))
        if value != AUTO or (key is not None and key.auto in ("trainer", "accelerate")):
            continue
        words = f'{".".join(path)} is "auto", which nobody fills in'
        told = "accelerate stops after the model has loaded: not found in kwargs"
        default = f", {show(key.default)} is the default" if key and key.default not in (None, AUTO) else ""
        yield Raw("auto-unfilled", path, words, told, f"write a value, or delete the key{default}")


# What accelerate 1.15 writes for each (utils/dataclasses.py, `DeepSpeedPlugin`), and what then runs.
_CHOSEN: Final = MappingProxyType(
    {
        ("zero_optimization", "stage"): ("2", "a Trainer runs at stage 2, DeepSpeed by itself at stage 0"),
        ("zero_optimization", "offload_optimizer", "device"): ("none", "nothing is offloaded"),
        ("zero_optimization", "offload_param", "device"): ("none", "nothing is offloaded"),
    }
)


def auto_chosen(look: Look) -> Iterator[Raw]:
    """ "auto" that is no choice by what the run needs: always the same takes its place."""
    for path, (value, told) in _CHOSEN.items():
        if look.get(*path) == AUTO:
            words = f'{".".join(path)} is "auto", which always becomes {value}'
            mend = f"write what is meant, such as {'2' if value == '2' else chr(34) + 'cpu' + chr(34)}"
            yield Raw("auto-chosen", path, words, told, mend, (), "warning")


def auto_by_hidden_size(look: Look) -> Iterator[Raw]:
    """The sizes that Trainer computes from the model's hidden size, for a model that has none."""
    config = look.around.model_config
    if config is None:
        return
    kind = config.get("model_type")
    text_only = "text_config" in config and not {"hidden_size", "hidden_sizes"} & set(config)
    for name in _BY_HIDDEN_SIZE:
        path = ("zero_optimization", name)
        if look.get(*path) != AUTO:
            continue
        if kind in _NO_HIDDEN_SIZE:
            words = f'{".".join(path)} is "auto", and a {kind} model has no hidden size to compute it from'
        elif text_only and look.stage != 3 and name != _BY_HIDDEN_SIZE[0]:
            words = f'{".".join(path)} is "auto", which is filled in at stage 3 only for a {kind} model'
        else:
            continue
        default = keys.keys()[".".join(path)].default
        told = "Trainer stops after the model has loaded"
        edits = replace(look, path, default)
        yield Raw("auto-unfilled", path, words, told, f"write a number, such as {default}", edits)


# --- the stage ---------------------------------------------------------------------------------------------


def unread(look: Look) -> Iterator[Raw]:
    """Keys of zero_optimization that this stage does not read."""
    stage, silent = look.stage, ("offload_param", "offload_optimizer")
    block = look.get("zero_optimization")
    if stage is None or not isinstance(block, dict):
        return
    for path, _ in _leaves({"zero_optimization": block}, ()):
        key = keys.keys().get(".".join(path))
        if key is None or key.stages is None or stage in key.stages or key.deprecated:
            continue
        if path[-1] == "allgather_partitions":
            continue  # read at no stage any more, and in every published file
        if len(path) > 2 and not _read_at(".".join(path[:-1]), stage):
            continue  # said of the block
        if path[-1] in silent or (
            len(path) == 3 and path[1] in silent and path[2] in ("device", "nvme_path")
        ):
            continue  # `reconcile` refuses those that name a device
        where = f"at stage {' and '.join(map(str, key.stages))}" if key.stages else "at no stage"
        words = f"{key.path} is read {where} only, the stage is {stage}"
        told = "it has no effect"
        yield Raw("unread-key", path, words, told, "delete it", delete(look, path), "warning")


def _read_at(path: str, stage: int) -> bool:
    key = keys.keys().get(path)
    return key is None or key.stages is None or stage in key.stages


def no_stage(look: Look) -> Iterator[Raw]:
    """A file that names no ZeRO stage, not even where it is not read."""
    if read.misnames_stage(look.ds):
        return
    told = "nothing is partitioned: every rank holds everything"
    if look.get("zero_optimization") is None:
        if not look.has("zero_optimization"):
            words, told = "there is no zero_optimization block", "accelerate stops; dstool trains at stage 0"
            edits = add(look, (), zero_optimization={"stage": 0})
            mend = 'add "zero_optimization": {"stage": 0}, or another stage'
            yield Raw("no-stage", (), words, told, mend, edits, "warning")
    elif isinstance(look.get("zero_optimization"), dict) and not look.has("zero_optimization", "stage"):
        edits = add(look, ("zero_optimization",), stage=0)
        words = "zero_optimization names no stage, which is stage 0"
        mend = 'add "stage": 0, or another stage'
        yield Raw("no-stage", ("zero_optimization",), words, told, mend, edits, "warning")


_GATHER: Final = (
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)


def gather(look: Look) -> Iterator[Raw]:
    """Stage 3 without gathering: what Trainer saves is no model."""
    zero = ("zero_optimization",)
    values = [look.get(*zero, name) for name in _GATHER if look.has(*zero, name)]
    if look.stage == 3 and all(value == AUTO for value in values):  # of null `values` tells
        path = (*zero, _GATHER[0]) if look.has(*zero, _GATHER[0]) else zero
        told = "a Trainer saves no weights at the end, only the shards (dstool train sets it to true)"
        state = '"auto", which counts as left out' if values else "left out"
        words, mend = f"{_GATHER[0]} is {state}", put(look, (*zero, _GATHER[0]), "true")
        yield Raw("not-gathered", path, words, told, mend, (), "warning")


RULES: Final[tuple[Rule, ...]] = (
    refused,
    nested_aio,
    old_names,
    unknown,
    values,
    null_blocks,
    null_params,
    impossible,
    auto,
    auto_chosen,
    auto_by_hidden_size,
    unread,
    no_stage,
    gather,
)
