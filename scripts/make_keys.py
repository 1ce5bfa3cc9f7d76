"""Write dstool/ds_config/keys.json: every key that the installed DeepSpeed reads from its JSON.

Blocks that are pydantic models say it themselves. The rest is read with `dict.get`: DeepSpeed's own parser is
run on a mapping that notes what it is asked for. What neither shows stands in the tables below, each with the
DeepSpeed file that it is from.

    python scripts/make_keys.py [PATH]
"""

from __future__ import annotations

import ast
import contextlib
import enum
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

TARGET: Final = Path(__file__).parent.parent / "dstool/ds_config/keys.json"
PACKAGES: Final = ("deepspeed", "torch", "transformers")
FIELDS: Final = (
    "type", "default", "minimum", "maximum", "above", "below", "choices", "any_case", "unknown", "auto",
    "deprecated", "stages",
)  # fmt: skip

# --- what introspection does not show -----------------------------------------------------------------

# Blocks that runtime/config.py and what it calls read with `dict.get`, and what becomes of a key that they
# do not know.
PLAIN_BLOCKS: Final = {
    "activation_checkpointing": "ignored",
    "aio": "ignored",
    "autotuning": "ignored",
    "autotuning.model_info": "ignored",
    "checkpoint": "ignored",
    "checkpoint.parallel_write": "ignored",
    "checkpoint.writer": "ignored",
    "data_efficiency": "ignored",
    "data_efficiency.data_routing": "kept",
    "data_efficiency.data_sampling": "kept",
    "data_types": "ignored",
    "expert_parallel": "ignored",
    "flops_profiler": "ignored",
    "optimizer": "ignored",
    "optimizer.params": "kept",
    "pipeline": "kept",
    "scheduler": "ignored",
    "scheduler.params": "kept",
    "timers": "ignored",
    "torch_autocast": "ignored",
}

# runtime/config.py, DtypeEnum.
DTYPES: Final = [
    f"{prefix}{name}"
    for names in (("fp32", "float32", "float"), ("fp16", "float16", "half"), ("bf16", "bfloat16"))
    for prefix, name in (("torch.", names[1]), *(("", name) for name in names))
]

# The keys below are looked up with `in` or `[]`, which the noting mapping cannot tell from a question.
BY_HAND: Final[dict[str, dict[str, Any]]] = {
    "allgather_size": {
        "type": "int",
        "default": 500_000_000,
    },  # runtime/zero/config.py, boolean zero_optimization
    "data_efficiency.enabled": {"type": "bool", "default": False},  # runtime/data_pipeline/config.py
    "data_efficiency.seed": {"type": "int", "default": 1234},
    "data_efficiency.data_sampling.enabled": {"type": "bool", "default": False},
    "data_efficiency.data_sampling.num_epochs": {"type": "int", "default": 1000},
    "data_efficiency.data_sampling.num_workers": {"type": "int", "default": 0},
    "data_efficiency.data_sampling.pin_memory": {"type": "bool", "default": False},
    "data_efficiency.data_sampling.curriculum_learning": {"type": "object", "unknown": "kept"},
    "data_efficiency.data_sampling.dynamic_batching": {"type": "object", "unknown": "kept"},
    "data_efficiency.data_routing.enabled": {"type": "bool", "default": False},
    "data_efficiency.data_routing.random_ltd": {"type": "object", "unknown": "kept"},
    "expert_parallel.load_balance_coeff": {
        "type": "null"
    },  # module_inject/auto_ep_config.py: only null is taken
    "expert_parallel.expert_w3": {"type": ["str", "null"]},
    "optimizer.type": {"type": "str"},  # runtime/config.py
    "optimizer.legacy_fusion": {"type": "bool", "default": False},
    "pipeline.use_reentrant": {"type": ["bool", "null"], "default": True},  # runtime/pipe/engine.py
    "scheduler.type": {"type": "str"},
    "sequence_parallel_size": {"type": "int", "minimum": 1},
    "torch_autocast.enabled": {"type": "bool", "default": False},
    "torch_autocast.dtype": {
        "type": "str",
        "choices": DTYPES,
    },
    "torch_autocast.lower_precision_safe_modules": {"type": "list"},
    "vocabulary_size": {"type": "int", "minimum": 1},
    # runtime/precision_config.py: read where there is no "bf16"
    "bfloat16": {"type": "object", "unknown": "error", "deprecated": "use bf16"},
}

# What runtime/config.py demands of keys whose default shows neither type nor limits.
DEMANDS: Final[dict[str, dict[str, Any]]] = {
    "autotuning.arg_mappings": {"type": ["object", "null"]},
    "autotuning.max_train_batch_size": {"type": ["int", "null"]},
    "autotuning.metric_path": {"type": ["str", "null"]},
    "autotuning.tuner_type": {"choices": ["gridsearch", "random", "model_based"]},  # autotuning/autotuner.py
    "autotuning.model_info_path": {"type": ["str", "null"]},
    "autotuning.model_info.num_params": {"type": ["int", "null"]},
    "autotuning.model_info.hidden_size": {"type": ["int", "null"]},
    "autotuning.model_info.num_layers": {"type": ["int", "null"]},
    "activation_checkpointing.number_checkpoints": {"type": ["int", "null"], "minimum": 1},
    "aio.block_size": {"minimum": 1},
    "aio.intra_op_parallelism": {"minimum": 1},
    "aio.queue_depth": {"minimum": 1},
    "checkpoint.checkpoint_serialization": {"type": "bool"},
    "checkpoint.tag_validation": {"choices": ["WARN", "IGNORE", "FAIL"], "any_case": True},
    "checkpoint.writer.type": {"choices": ["MOCK", "PYTHON", "FAST"], "any_case": True},
    "checkpoint.writer.data_parallel": {
        "type": ["str", "null"],
        "choices": ["REPLICA", "SOCKET", "MACHINE"],
        "any_case": True,
    },
    "communication_data_type": {
        "type": ["str", "null"],
        "choices": ["fp16", "bf16", "fp32"],
        "any_case": True,
    },
    "seq_parallel_communication_data_type": {"choices": ["fp16", "bf16", "fp32"], "any_case": True},
    "data_types.buffer_dtype": {"type": ["str", "null"], "choices": DTYPES},
    "data_types.grad_accum_dtype": {"type": ["str", "null"], "choices": DTYPES},
    "data_types.keep_in_fp32_modules": {"type": ["str", "list"], "auto": "deepspeed"},
    "data_types.param_dtype": {"type": ["str", "null"], "choices": DTYPES},
    "datastates_ckpt": {"type": ["bool", "object", "null"]},
    # module_inject/auto_ep_config.py and auto_ep_folding.py, where it is enabled
    "expert_parallel.autoep_size": {"minimum": 1},
    "expert_parallel.expert_tensor_parallel_size": {"choices": [1]},
    "expert_parallel.comm_max_tokens_per_rank": {"minimum": 0},
    "expert_parallel.comm_num_sm": {"minimum": 1},
    "expert_parallel.comm_qp_margin": {"minimum": 0},
    "expert_parallel.num_expert_groups": {"minimum": 1},
    "expert_parallel.num_limited_groups": {"minimum": 1},
    "flops_profiler.output_file": {"type": ["str", "null"]},
    "gradient_accumulation_steps": {"type": ["int", "null"], "minimum": 1},
    "gradient_allreduce_op": {"choices": ["mean", "sum"], "any_case": True},
    "gradient_clipping": {"minimum": 0},  # runtime/zero: clips above 0 only
    "gradient_predivide_factor": {"above": 0},  # runtime/zero/stage_1_and_2.py divides by it
    "log_level": {  # utils/logging.py
        "type": ["str", "null"],
        "choices": ["debug", "info", "warning", "error", "critical"],
        "any_case": True,
    },
    "optimizer.params.fp32_optimizer_states": {"type": ["bool", "null"]},  # runtime/engine.py
    "optimizer.params.ns_method": {"choices": ["gram", "standard"]},  # runtime/zero/muon/original_muon.py
    "pipeline.stages": {"type": ["int", "str"], "auto": "deepspeed"},
    # runtime/lr_schedules.py, whose annotations say None where it computes with the value
    "scheduler.params.cycle_max_lr": {"type": ["float", "list"]},
    "scheduler.params.cycle_min_lr": {"type": ["float", "list"]},
    "scheduler.params.lr_range_test_min_lr": {"type": ["float", "list"]},
    "scheduler.params.warmup_min_lr": {"type": ["float", "list"]},
    "scheduler.params.cycle_first_step_size": {"minimum": 1},
    "scheduler.params.cycle_second_step_size": {"minimum": 0},
    "scheduler.params.lr_range_test_step_size": {"minimum": 1},
    "scheduler.params.warmup_num_steps": {"minimum": 1},
    "scheduler.params.warmup_type": {"choices": ["log", "linear"]},
    "steps_per_print": {"type": ["int", "null"], "minimum": 1},
    # runtime/tensor_parallel/config.py: only a torch.dtype is taken, which JSON cannot write
    "tensor_parallel.dtype": {"type": "null"},
    "tensor_parallel.preset_model": {  # module_inject/autotp_config.py
        "choices": ["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"],
        "any_case": True,
    },
    "train_batch_size": {"type": ["int", "null"], "minimum": 1},
    "train_micro_batch_size_per_gpu": {"type": ["int", "null"], "minimum": 1},
    "zero_optimization.zenflow.select_strategy": {"choices": ["auto", "step", "epoch"], "auto": "deepspeed"},
    "zero_optimization.zenflow.select_interval": {"auto": "deepspeed"},
    "zero_optimization.zenflow.update_interval": {"minimum": 1, "auto": "deepspeed"},
    "fp16.loss_scale": {"minimum": 0},  # runtime/precision_config.py, validators
    "fp16.loss_scale_window": {"minimum": 1},
    "fp16.min_loss_scale": {"minimum": 1},
}

STAGE_3_ONLY: Final = (
    "cpu_offload_param",
    "enable_sanity_checks",
    "leaf_module",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "offload_optimizer.buffer_count",
    "offload_optimizer.cpuadam_cores_perc",
    "offload_optimizer.fast_init",
    "offload_optimizer.nvme_path",
    "offload_optimizer.pipeline_read",
    "offload_optimizer.pipeline_write",
    "offload_optimizer.ratio",
    "offload_optimizer.super_offload",
    "offload_param",
    "override_module_apply",
    "pipeline_loading_checkpoint",
    "save_muon_momentum_buffer_in_memory",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
)

# The stages at which runtime/engine.py hands a key of zero_optimization on (`_configure_zero_optimizer`; at
# stage 3 also runtime/zero/partition_parameters.py). A key that is not here is read at 1, 2 and 3.
STAGES: Final[dict[str, list[int]]] = {
    "stage": [0, 1, 2, 3],
    "allgather_partitions": [],  # accepted, and looked at nowhere (engine.py, no caller)
    "legacy_stage1": [],  # engine.py: true is refused
    "allgather_bucket_size": [1, 2],
    "use_multi_rank_bucket_allreduce": [1, 2],
    "compute_grad_norm": [1, 2],
    "elastic_checkpoint": [1, 2],
    "ignore_unused_parameters": [1, 2],
    "parameter_alignment": [1, 2],
    "round_robin_gradients": [1, 2],
    **{name: [3] for name in STAGE_3_ONLY},
}

# accelerate 1.10 to 1.15 utils/dataclasses.py, DeepSpeedPlugin, fills these where Trainer leaves "auto".
ACCELERATE_FILLS: Final = (
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)

# runtime/config.py refuses the key names it lists as removed; what to do instead, in our words.
REMOVED: Final = {
    "amp": "apex is gone: use fp16, bf16 or torch_autocast",
    "compression_training": "the compression library is gone; nothing replaces it",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "eigenvalue": "mixture-of-quantization is gone; nothing replaces it",
    "elasticity": "elastic training is gone: give the batch sizes themselves",
    "graph_harvesting": "graph capture is gone; nothing replaces it",
    "nebula": "Nebula checkpointing is gone: checkpoints are written as usual",
    "progressive_layer_drop": "dropping layers is gone; nothing replaces it",
    "quantize_training": "mixture-of-quantization is gone; nothing replaces it",
    "sparse_attention": "sparse attention is gone; nothing replaces it",
    "sparse_gradients": "embeddings built with sparse=True need no key now",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone; see zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": "MiCS is gone; see zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "LoCo is gone: zero_quantized_gradients works without it",
}

# runtime/engine.py `_configure_basic_optimizer`: the class behind each name on the device and offloaded.
OPTIMIZERS: Final = {
    "Adam": ("deepspeed.ops.adam:FusedAdam", "deepspeed.ops.adam:DeepSpeedCPUAdam"),
    "AdamW": ("deepspeed.ops.adam:FusedAdam", "deepspeed.ops.adam:DeepSpeedCPUAdam"),
    "Adagrad": ("torch.optim:Adagrad", "deepspeed.ops.adagrad:DeepSpeedCPUAdagrad"),
    "Lamb": ("deepspeed.ops.lamb:FusedLamb", "deepspeed.ops.lamb:FusedLamb"),
    "Lion": ("deepspeed.ops.lion:FusedLion", "deepspeed.ops.lion:DeepSpeedCPULion"),
    **{
        name: (f"torch.optim:{name}", f"torch.optim:{name}")
        for name in ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    },
}
# The same place: what is taken off before the class sees it, and what is never let through to it.
ADAM_EXTRA: Final = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach"}
NEVER: Final = {"params", "model_params", "self", "max_grad_norm", "adamw_mode"}
# `_muon_param_groups` builds its groups from these; the class has no signature of its own.
MUON: Final = [
    "lr", "muon_lr", "adam_lr", "momentum", "ns_method", "betas", "eps", "weight_decay", "per_head_muon",
    *sorted(ADAM_EXTRA),
]  # fmt: skip

PARAM_TYPES: Final[dict[str, Any]] = {
    "lr": "float",
    "betas": "list",
    "eps": ["float", "list"],
    "foreach": ["bool", "null"],
    "fused": ["bool", "null"],
}


# --- a mapping that notes what it is asked for ---------------------------------------------------------


class Asked(dict[str, Any]):
    """A block that answers every `get` with the default and keeps it in `noted`."""

    def __init__(self, blocks: Mapping[str, Any] | None = None) -> None:
        super().__init__(blocks or {})
        self.noted: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """The inner block called `key`, or else `default`."""
        if key in self:
            return self[key]
        self.noted[key] = default
        return default

    def __bool__(self) -> bool:
        """An empty one is still a block: some parsers skip what is false."""
        return True

    def __copy__(self) -> dict[str, Any]:
        """A plain copy; what its reader does with it is not noted."""
        return dict(self)


def asked_keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """What DeepSpeed's parser asks for outside its pydantic models, by path."""
    from deepspeed.runtime import config as source

    blocks = {path: Asked() for path in PLAIN_BLOCKS}
    root = Asked()
    for path, block in blocks.items():
        parent, _, name = path.rpartition(".")
        (blocks[parent] if parent else root)[name] = block
    blocks["optimizer"]["type"] = blocks["scheduler"]["type"] = "any"
    with contextlib.redirect_stdout(sys.stderr):
        object.__new__(source.DeepSpeedConfig)._initialize_params(root)
    pipeline = source.get_pipeline_config({})
    blocks["pipeline"].noted = pipeline
    for path, block in (("", root), *blocks.items()):
        if path:
            yield path, {"type": "object", "unknown": PLAIN_BLOCKS[path]}
        for name, default in block.noted.items():
            entry = {"type": json_type(default), "default": plain(default)}
            yield f"{path}.{name}".lstrip("."), entry | ({"auto": "deepspeed"} if default == "auto" else {})


def expert_keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """The types and choices of expert_parallel, whose values DeepSpeed keeps in a dataclass."""
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
    from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS

    for name, annotation in typing.get_type_hints(AutoEPConfig).items():
        choices = next(filter(None, map(choices_of, union(annotation))), None)
        if name == "preset_model":
            choices = [*PRESET_MODELS]
        if not name.startswith("_"):
            yield f"expert_parallel.{name}", {"type": annotated_type(annotation), "choices": choices}


# --- pydantic ------------------------------------------------------------------------------------------


def models() -> dict[str, Any]:
    """The pydantic model behind each block that is one."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    monitors = DeepSpeedMonitorConfig.model_fields
    return {
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "weight_quantization": WeightQuantConfig,
        "zero_optimization": DeepSpeedZeroConfig,
        **{name: field.annotation for name, field in monitors.items()},
    }


def model_keys(path: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The block at `path` and every key in it, with those of the models inside."""
    yield path, {"type": "object", "unknown": "error"}
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}"
        entry = field_entry(field)
        inner = [item for item in union(field.annotation) if hasattr(item, "model_fields")]
        if inner:
            yield from model_keys(here, inner[0])
            entry = {"type": entry["type"], "unknown": "error"}
        yield here, entry


def field_entry(field: Any) -> dict[str, Any]:
    """Type, default, limits, choices and deprecation of one pydantic field."""
    entry: dict[str, Any] = {"type": annotated_type(field.annotation), "default": plain(field.get_default())}
    for part in union(field.annotation):
        if choices := choices_of(part):
            entry["choices"] = choices
    whole = entry["type"] == "int"
    for rule in field.metadata:
        for name, key, step in (
            ("ge", "minimum", 0),
            ("le", "maximum", 0),
            ("gt", "above", 1),
            ("lt", "below", -1),
        ):
            if (limit := getattr(rule, name, None)) is not None:
                entry[{"above": "minimum", "below": "maximum"}.get(key, key) if whole else key] = (
                    limit + step * whole
                )
    extra = field.json_schema_extra or {}
    if extra.get("deprecated"):
        new = extra.get("new_param", "")
        entry["deprecated"] = f"use {'stage3_' if new.startswith('gather_16bit') else ''}{new}"
    return entry


def union(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return typing.get_args(annotation)
    return (annotation,)


def choices_of(annotation: Any) -> list[Any] | None:
    """The values of an enum or literal, or of a list of literals."""
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [member.value for member in annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return None


def annotated_type(annotation: Any) -> str | list[str]:
    """The JSON types that an annotation allows."""
    found = sorted({name for part in union(annotation) for name in part_types(part)})
    return found[0] if len(found) == 1 else sorted(found, key=lambda name: (name == "null", name))


def part_types(part: Any) -> tuple[str, ...]:
    """The JSON types of one member of a union."""
    if choices := choices_of(part):
        return (str(json_type(choices[0])),)
    base = typing.get_origin(part) or part
    if base is type(None):
        return ("null",)
    known = {bool: "bool", int: "int", float: "float", str: "str", Path: "str"}
    if base in known:
        return (known[base],)
    if inspect.isclass(base) and issubclass(base, list | tuple):
        return ("list",)
    return ("object",) if base is dict or hasattr(base, "model_fields") else ("str", "null")


def json_type(value: Any) -> str | list[str]:
    """The type of a default; of no default, whatever may stand there."""
    for kind, name in (
        (bool, "bool"),
        (int, "int"),
        (float, "float"),
        (str, "str"),
        (dict, "object"),
        (list, "list"),
    ):
        if isinstance(value, kind):
            return name
    return ["str", "null"]


def plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bool | float | str) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    return list(value) if isinstance(value, list | tuple) else None


# --- optimizers and schedulers -------------------------------------------------------------------------


def parameters(where: str) -> dict[str, Any]:
    """What the class at `module:name` takes, with the defaults."""
    module, _, name = where.partition(":")
    found = inspect.signature(getattr(__import__(module, fromlist=[name]), name)).parameters
    return {key: parameter.default for key, parameter in found.items() if key not in NEVER}


def optimizers() -> dict[str, dict[str, list[str]]]:
    """What each optimizer takes in `params`, on the device and offloaded."""
    result = {}
    for name, (device, offloaded) in OPTIMIZERS.items():
        extra = ADAM_EXTRA if name in {"Adam", "AdamW"} else set()
        result[name] = {
            "device": sorted({*parameters(device), *extra}),
            "offloaded": sorted({*parameters(offloaded), *extra}),
        }
    return result | {"Muon": {"device": sorted(MUON), "offloaded": sorted(MUON)}}


def schedulers() -> dict[str, dict[str, list[str]]]:
    """What each scheduler of DeepSpeed takes in `params`, and what it must be given."""
    from deepspeed.runtime import lr_schedules

    result = {}
    for name in lr_schedules.VALID_LR_SCHEDULES:
        takes = parameters(f"deepspeed.runtime.lr_schedules:{name}")
        takes.pop("optimizer")
        needs = sorted(key for key, default in takes.items() if default is inspect.Parameter.empty)
        result[name] = {"takes": sorted(takes), "needs": needs}
    return result


def parameter_keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """A key for everything that any optimizer or scheduler takes."""
    from deepspeed.runtime import lr_schedules

    found: dict[str, list[Any]] = {}
    for where in dict.fromkeys(item for pair in OPTIMIZERS.values() for item in pair):
        for key, default in parameters(where).items():
            found.setdefault(f"optimizer.params.{key}", []).append(default)
    for key in (*MUON, *ADAM_EXTRA):
        found.setdefault(f"optimizer.params.{key}", [])
    for name in lr_schedules.VALID_LR_SCHEDULES:
        for key, default in parameters(f"deepspeed.runtime.lr_schedules:{name}").items():
            if key != "optimizer":
                found.setdefault(f"scheduler.params.{key}", []).append(default)
    for path, defaults in found.items():
        entry = parameter_entry(path.rpartition(".")[2], defaults)
        if path.startswith("scheduler.") and path.endswith("_lr"):
            entry["type"] = ["float", "list", "null"]  # runtime/lr_schedules.py: a list is one for each group
        yield path, entry


def parameter_entry(name: str, defaults: list[Any]) -> dict[str, Any]:
    """One parameter: its default where all the classes agree, and the types of the defaults."""
    given = [plain(default) for default in defaults if default is not inspect.Parameter.empty]
    agreed = given[0] if given and all(value == given[0] for value in given) else None
    kinds = sorted({str(json_type(value)) for value in given if value is not None})
    guess: Any = "float" if not kinds or kinds[0] in {"float", "int"} else kinds[0]
    if name.endswith(("_steps", "_size", "_count", "last_batch_iteration")):
        guess = "int"
    elif name in {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "per_head_muon"}:
        guess = "bool"
    elif name == "ns_method":
        guess = "str"
    if None in given and name not in PARAM_TYPES:
        guess = [guess, "null"]
    return {"type": PARAM_TYPES.get(name, guess), "default": agreed}


# --- "auto" --------------------------------------------------------------------------------------------


def trainer_fills() -> set[str]:
    """The keys whose "auto" Trainer replaces: the names it passes to `fill_match` and `fill_only`."""
    import transformers

    source = Path(transformers.__file__).parent / "integrations/deepspeed.py"
    calls = [
        node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in {"fill_match", "fill_only"}
        and call.args
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }


# --- all of it -----------------------------------------------------------------------------------------


def keys() -> dict[str, dict[str, Any]]:
    """Every key by its path, sorted, with all that is known of it."""
    found: dict[str, dict[str, Any]] = {}
    everything: tuple[tuple[str, dict[str, Any]], ...] = (
        *asked_keys(),
        *expert_keys(),
        *(item for path, model in models().items() for item in model_keys(path, model)),
        *BY_HAND.items(),
        *(
            (path.replace("bf16", "bfloat16", 1), entry)
            for path, entry in model_keys("bf16", models()["bf16"])
            if "." in path
        ),
        *parameter_keys(),
    )
    for path, entry in everything:
        found[path] = {**found.get(path, {}), **entry}
    for path, entry in DEMANDS.items():
        found[path].update(entry)
    for path in ACCELERATE_FILLS:
        found[path]["auto"] = "accelerate"
    for path in trainer_fills():
        found[path]["auto"] = "trainer"
    for path, entry in found.items():
        entry["stages"] = stages(path)
    return {path: in_order(found[path]) for path in sorted(found)}


def stages(path: str) -> list[int] | None:
    """The stages that read a key of zero_optimization; None for a key that has nothing to do with them."""
    block, _, name = path.partition(".")
    if block != "zero_optimization" or not name:
        return None
    return STAGES.get(name, STAGES.get(name.partition(".")[0], [1, 2, 3]))


def in_order(entry: dict[str, Any]) -> dict[str, Any]:
    """What is known of a key, in the order of `FIELDS`."""
    return {name: entry[name] for name in FIELDS if entry.get(name) is not None}


def removed() -> dict[str, str]:
    """The keys that the installed DeepSpeed refuses as removed, with what to do instead."""
    from deepspeed.runtime import config as source

    names = [*source._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    names += [f"zero_optimization.{name}" for name in source._REMOVED_ZERO_CONFIG_KEYS]
    return {name: REMOVED.get(name, "it is gone") for name in sorted(names)}


def dumps() -> str:
    """The text of keys.json for what is installed: one key a line."""
    head = {"versions": {name: version(name).partition("+")[0] for name in PACKAGES}}
    parts: dict[str, Mapping[str, Any]] = {
        **head,
        "removed": removed(),
        "optimizers": optimizers(),
        "schedulers": schedulers(),
        "keys": keys(),
    }
    blocks = []
    for name, block in parts.items():
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in block.items())
        blocks.append(f'  "{name}": {{\n{lines}\n  }}')
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else TARGET).write_text(dumps(), encoding="utf-8")
