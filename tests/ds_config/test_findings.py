"""What the check finds in faulty files, what it mends, and that it finds nothing in what `build` writes."""

import dataclasses
import inspect
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from common import AUTO, OWN
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dstool.ds_config import keys, run_rules, source
from dstool.ds_config.build import build, dumps
from dstool.ds_config.check import check, fix, refusal
from dstool.ds_config.looks import Circumstances, Machine
from dstool.ds_config.options import Options
from dstool.errors import ConfigError

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
NOWHERE = Circumstances()


def text_of(stage=2, /, zero=None, **keys):
    """A file that is fine but for the keys given; a key given as `...` is left out."""
    block = {"stage": stage, **(GATHER if stage == 3 else {}), **(zero or {})}
    config = {**OWN, "zero_optimization": block, **keys}
    config = {key: value for key, value in config.items() if value is not ...}
    return json.dumps(config, indent=2)


def found(text, around=NOWHERE):
    return check(source.parse(text), around)


@dataclass(frozen=True)
class Case:
    """A faulty file, and the one finding in it. `mended` are values by path after --fix; None: no mend."""

    name: str
    text: str
    rule: str
    path: str = ""
    said: str = ""
    line: int | None = None
    severity: str = "error"
    around: Circumstances = NOWHERE
    mended: dict[str, Any] | None = field(default=None)

    def expected_line(self):
        """The line given, or that of the key; of the top level for what is missing."""
        if self.line is not None or not self.path:
            return self.line or 1
        *_, name = [part for part in self.path.split(".") if not part.isdecimal()]
        lines = [number for number, line in enumerate(self.text.split("\n"), 1) if f'"{name}":' in line]
        if len(lines) > 1:  # a name such as "type" or "device", below its own block
            block = self.path.split(".")[-2]
            start = next(n for n, line in enumerate(self.text.split("\n"), 1) if f'"{block}":' in line)
            lines = [number for number in lines if number > start]
        return lines[0]


def case(name, text, rule, path="", said="", **more):
    return Case(name, text, rule, path, said, **more)


GONE = object()
"""The key is not there after the mend."""


# --- broken JSON -------------------------------------------------------------------------------------------

LINES = [
    "{",
    '  "zero_optimization": {',
    '    "stage": 2,',
    '    "contiguous_gradients": true,',
    '    "overlap_comm": true',
    "  },",
    '  "train_batch_size": "auto",',
    '  "train_micro_batch_size_per_gpu": "auto",',
    '  "gradient_accumulation_steps": "auto",',
    '  "gradient_clipping": "auto"',
    "}",
]
WHOLE = json.loads("\n".join(LINES))


def broken(line, text):
    """The lines with one in place of another, counted from 1."""
    return "\n".join([*LINES[: line - 1], text, *LINES[line:]])


ZERO = "zero_optimization"
SYNTAX = [
    case(
        "C34 missing comma", broken(4, '    "contiguous_gradients": true'), "missing-comma", line=5, mended={}
    ),
    case("missing comma after a block", broken(6, "  }"), "missing-comma", line=7, mended={}),
    case("C34 trailing comma", broken(5, '    "overlap_comm": true,'), "trailing-comma", line=5, mended={}),
    case("trailing comma at the end", broken(10, LINES[9] + ","), "trailing-comma", line=10, mended={}),
    case("two commas", broken(3, '    "stage": 2,,'), "trailing-comma", line=3, mended={}),
    case("C34 // comment", broken(3, '    "stage": 2, // two'), "comment", line=3, mended={}),
    case("C34 # comment", broken(3, '    "stage": 2, # two'), "comment", line=3, mended={}),
    case("C34 /* comment */", broken(3, '    "stage": /* two */ 2,'), "comment", line=3, mended={}),
    case("a line of comment", broken(1, "{\n  // DeepSpeed"), "comment", line=2, mended={}),
    case("a comment before all", broken(1, "// DeepSpeed\n{"), "comment", line=1, mended={}),
    case("a comment after all", broken(11, "}\n# end"), "comment", line=12, mended={}),
    case("a comment over two lines", broken(3, '    /* a\n  b */ "stage": 2,'), "comment", line=3, mended={}),
    case(
        "C35 duplicate key", broken(3, '    "stage": 2,\n    "stage": 2,'), "duplicate-key", line=4, mended={}
    ),
    case("single quotes", broken(3, "    'stage': 2,"), "single-quotes", line=3, mended={}),
    case(
        "single quotes of a value",
        broken(10, "  \"gradient_clipping\": 'auto'"),
        "single-quotes",
        line=10,
        mended={},
    ),
    case("a key without quotes", broken(3, "    stage: 2,"), "unquoted-key", line=3, mended={}),
    case("True", broken(5, '    "overlap_comm": True'), "python-word", line=5, mended={}),
    case("no colon", broken(3, '    "stage" 2,'), "missing-colon", line=3, mended={}),
    case("C34 byte-order mark", "\ufeff" + "\n".join(LINES), "byte-order-mark", line=1, mended={}),
    case("NaN", broken(10, '  "gradient_clipping": NaN'), "not-a-number", line=10),
    case("-Infinity", broken(10, '  "gradient_clipping": -Infinity'), "not-a-number", line=10),
    case("C40 Infinity", broken(10, '  "steps_per_print": Infinity'), "not-a-number", line=10),
    case("1e999", broken(10, '  "gradient_clipping": 1e999'), "not-a-number", line=10),
    case("C34 empty", "", "empty"),
    case("blank", " \n\n", "empty"),
    case("C34 a list", "[1, 2]", "top-level", line=1),
    case("a number", "\n3", "top-level", line=2),
    case("null", "null", "top-level", line=1),
    case("no closing brace", "\n".join(LINES[:-1]), "unclosed", line=10),
    case("no closing quote", broken(10, '  "gradient_clipping": "auto'), "unclosed", line=10),
    case("no closing quote at the end", '{"a": "b', "unclosed", line=1),
    case("a brace too many", "\n".join(LINES) + "}", "syntax", line=11),
    case("no value", broken(3, '    "stage": ,'), "syntax", line=3),
    case("a word", broken(3, '    "stage": two,'), "syntax", line=3),
    case("a backslash", broken(10, '  "gradient_clipping": "\\x"'), "syntax", line=10),
    case("words around", "stage: 2", "syntax", line=1),
    case("nested too deeply", "[" * 5000, "nested"),
    case("too many digits", broken(3, f'    "stage": {"1" * 5000},'), "not-a-number"),
]


@pytest.mark.parametrize("it", SYNTAX, ids=lambda it: it.name)
def test_a_file_that_is_not_json(it):
    all_found = found(it.text)
    first = next(each for each in all_found if each.rule == it.rule)
    assert first.severity == "error"
    assert first.line == (it.line if it.line else None)
    assert first.problem
    assert first.consequence
    assert first.mend
    if it.mended is None:
        assert not first.edit
    else:
        assert {each.rule for each in all_found} == {it.rule}
        assert json.loads(fix(it.text, NOWHERE).text) == WHOLE


@pytest.mark.parametrize("it", [it for it in SYNTAX if "comment" not in it.name], ids=lambda it: it.name)
@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_end_as_a_text_editor_counts_them(it, end):
    here = [(each.line, each.column, each.problem) for each in found(it.text)]
    text = it.text.replace("\n", end)
    there = source.parse(text)
    assert [(each.line, each.column, each.problem) for each in check(there, NOWHERE)] == here
    lines = source.parse(it.text)
    assert [there.line(line) for line, _, _ in here if line] == [
        lines.line(line) for line, _, _ in here if line
    ]


# --- what is said of a file that is JSON -------------------------------------------------------------------


def adam(**params):
    return {"type": "AdamW", "params": {"lr": AUTO, **params}}


def warm(name="WarmupLR", **params):
    return {"type": name, "params": {"warmup_num_steps": AUTO, **params}}


def zero_case(name, zero, rule, key, said="", stage=2, **more):
    return case(name, text_of(stage, zero), rule, f"{ZERO}.{key}", said, **more)


def top_case(name, key, value, rule, said="", **more):
    return case(name, text_of(**{key: value}), rule, key, said, **more)


W = "warning"
NAMES = [
    top_case(
        "C10 zero_optimisation", "zero_optimisation", {}, "unknown-key", "did you mean zero_optimization?"
    ),
    top_case("C10 gradient_clip", "gradient_clip", 1.0, "unknown-key", "did you mean gradient_clipping?"),
    top_case(
        "train_micro_batch_size", "train_micro_batch_size", 2, "unknown-key", "train_micro_batch_size_per_gpu"
    ),
    top_case("a name like none", "xyzzy", 1, "unknown-key"),
    top_case("C38 stage at the top", "stage", 3, "wrong-block", "inside zero_optimization", line=9),
    top_case("offload_optimizer at the top", "offload_optimizer", {"device": "cpu"}, "wrong-block"),
    top_case("overlap_comm at the top", "overlap_comm", True, "wrong-block"),
    top_case("loss_scale at the top", "loss_scale", 0, "unknown-key", "read in fp16"),
    zero_case(
        "C37 misspelt in zero",
        {"stage3_param_persitence_threshold": 5},
        "unknown-key",
        "stage3_param_persitence_threshold",
        "did you mean stage3_param_persistence_threshold?",
        3,
    ),
    zero_case("fp16 in zero", {"fp16": {}}, "unknown-key", "fp16", "belongs at the top level"),
    zero_case("a comment key in zero", {"_comment": "x"}, "unknown-key", "_comment"),
    zero_case(
        "misspelt in an offload block",
        {"offload_optimizer": {"device": "cpu", "pin_memroy": True}},
        "unknown-key",
        "offload_optimizer.pin_memroy",
        "did you mean pin_memory?",
    ),
    zero_case(
        "offload_param's key in offload_optimizer",
        {"offload_optimizer": {"device": "cpu", "max_in_cpu": 1}},
        "unknown-key",
        "offload_optimizer.max_in_cpu",
        "read in zero_optimization.offload_param",
    ),
    case(
        "misspelt in fp16",
        text_of(fp16={"enabled": False, "loss_scal": 0}),
        "unknown-key",
        "fp16.loss_scal",
        "did you mean loss_scale?",
    ),
    case(
        "misspelt in aio",
        text_of(3, aio={"block_siz": 1}),
        "unknown-key",
        "aio.block_siz",
        "did you mean block_size?",
        severity=W,
    ),
    case(
        "aio.thread_count",
        text_of(3, aio={"thread_count": 1}),
        "unknown-key",
        "aio.thread_count",
        "intra_op_parallelism",
        severity=W,
    ),
    case(
        "misspelt in flops_profiler",
        text_of(flops_profiler={"enabled": True, "profil_step": 2}),
        "unknown-key",
        "flops_profiler.profil_step",
        "profile_step",
        severity=W,
    ),
    case(
        "misspelt in optimizer",
        text_of(optimizer={"type": "AdamW", "parms": {}}),
        "unknown-key",
        "optimizer.parms",
        "did you mean params?",
        severity=W,
    ),
    case(
        "misspelt three deep",
        text_of(timers={"throughput": {"enable": True}}),
        "unknown-key",
        "timers.throughput.enable",
        "did you mean enabled?",
    ),
    zero_case(
        "C08 aio in zero",
        {"aio": {"block_size": 262144}},
        "aio-in-zero",
        "aio",
        "top level",
        3,
        mended={"aio": {"block_size": 262144}, "zero_optimization.aio": GONE},
    ),
    case(
        "C08 aio in zero and at the top",
        text_of(3, {"aio": {"block_size": 1}}, aio={"queue_depth": 8}),
        "aio-in-zero",
        f"{ZERO}.aio",
    ),
    *(
        top_case(f"removed: {key}", key, {"enabled": True}, "removed-key", "gone from DeepSpeed")
        for key in keys.removed()
        if "." not in key
    ),
    *(
        zero_case(
            f"removed: {key}", {key.partition(".")[2]: 2}, "removed-key", key.partition(".")[2], "gone", 3
        )
        for key in keys.removed()
        if "." in key
    ),
    top_case("removed and off", "amp", {"enabled": False}, "removed-key", mended={"amp": GONE}),
    case(
        "bfloat16",
        text_of(bfloat16={"enabled": True}),
        "old-name",
        "bfloat16",
        severity=W,
        mended={"bf16": {"enabled": True}, "bfloat16": GONE},
    ),
    case(
        "bfloat16 and bf16",
        text_of(bfloat16={"enabled": True}, bf16={"enabled": True}),
        "both-names",
        "bfloat16",
        severity=W,
        mended={"bfloat16": GONE, "bf16.enabled": True},
    ),
    case(
        "C37 gather_fp16",
        text_of(
            3,
            {
                "stage3_gather_fp16_weights_on_model_save": True,
                "stage3_gather_16bit_weights_on_model_save": None,
            },
        ).replace('    "stage3_gather_16bit_weights_on_model_save": null,\n', ""),
        "old-name",
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save",
        severity=W,
        mended={f"{ZERO}.stage3_gather_16bit_weights_on_model_save": True},
    ),
    zero_case(
        "both gathers",
        {"stage3_gather_fp16_weights_on_model_save": True},
        "both-names",
        "stage3_gather_fp16_weights_on_model_save",
        stage=3,
    ),
    zero_case(
        "C37 cpu_offload",
        {"cpu_offload": True},
        "old-name",
        "cpu_offload",
        mended={f"{ZERO}.offload_optimizer": {"device": "cpu"}, f"{ZERO}.cpu_offload": GONE},
    ),
    zero_case(
        "cpu_offload off",
        {"cpu_offload": False},
        "old-name",
        "cpu_offload",
        severity=W,
        mended={f"{ZERO}.cpu_offload": GONE},
    ),
    zero_case(
        "C37 cpu_offload_param",
        {"cpu_offload_param": True},
        "old-name",
        "cpu_offload_param",
        "offload_param",
        3,
        severity=W,
        mended={f"{ZERO}.offload_param": {"device": "cpu"}},
    ),
    zero_case(
        "cpu_offload_use_pin_memory",
        {"cpu_offload_use_pin_memory": True},
        "old-name",
        "cpu_offload_use_pin_memory",
        severity=W,
    ),
]

VALUES = [
    zero_case("stage 4", {"stage": 4}, "wrong-value", "stage", "0, 1, 2 or 3"),
    zero_case("stage as text", {"stage": "2"}, "wrong-value", "stage", mended={f"{ZERO}.stage": 2}),
    zero_case("stage true", {"stage": True}, "wrong-value", "stage"),
    top_case(
        "zero_optimization true",
        ZERO,
        True,
        "wrong-type",
        "an object",
        mended={f"{ZERO}.stage": 1, ZERO: {"stage": 1}},
    ),
    top_case("zero_optimization false", ZERO, False, "wrong-type", mended={ZERO: {"stage": 0}}),
    case(
        "zero_optimization true, with a size of its own",
        text_of(zero_optimization=True, allgather_size=1000),
        "wrong-type",
        ZERO,
    ),
    top_case(
        "C11 bf16 enabled as text", "bf16", {"enabled": "true"}, "wrong-type", mended={"bf16.enabled": True}
    ),
    top_case(
        "C11 fp16 disabled as text",
        "fp16",
        {"enabled": "false"},
        "wrong-type",
        mended={"fp16.enabled": False},
    ),
    top_case("bf16 enabled 1", "bf16", {"enabled": 1}, "wrong-type", mended={"bf16.enabled": True}),
    top_case("bf16 true", "bf16", True, "wrong-type", "an object"),
    top_case(
        "micro batch as text",
        "train_micro_batch_size_per_gpu",
        "4",
        "wrong-type",
        mended={"train_micro_batch_size_per_gpu": 4},
    ),
    top_case("micro batch 0", "train_micro_batch_size_per_gpu", 0, "wrong-type", "above 0"),
    top_case("accumulation -1", "gradient_accumulation_steps", -1, "wrong-type", "above 0"),
    top_case("batch 8.0", "train_batch_size", 8.0, "wrong-type", mended={"train_batch_size": 8}),
    top_case("clipping as text", "gradient_clipping", "1.0", "wrong-type", mended={"gradient_clipping": 1.0}),
    top_case("clipping below 0", "gradient_clipping", -1.0, "wrong-value"),
    zero_case(
        "C17 a fraction", {"reduce_bucket_size": 15099494.4}, "wrong-type", "reduce_bucket_size", "15099494.4"
    ),
    zero_case("bucket 0", {"reduce_bucket_size": 0}, "wrong-value", "reduce_bucket_size", "at least 1"),
    zero_case(
        "bucket below 0", {"allgather_bucket_size": -5}, "wrong-value", "allgather_bucket_size", "at least 0"
    ),
    zero_case(
        "bucket as text",
        {"allgather_bucket_size": "5e8"},
        "wrong-type",
        "allgather_bucket_size",
        mended={f"{ZERO}.allgather_bucket_size": 5e8},
    ),
    zero_case("bucket true", {"allgather_bucket_size": True}, "wrong-type", "allgather_bucket_size"),
    zero_case(
        "overlap_comm as text",
        {"overlap_comm": "True"},
        "wrong-type",
        "overlap_comm",
        mended={f"{ZERO}.overlap_comm": True},
    ),
    zero_case(
        "reduce_scatter 0",
        {"reduce_scatter": 0},
        "wrong-type",
        "reduce_scatter",
        mended={f"{ZERO}.reduce_scatter": False},
    ),
    zero_case(
        "contiguous_gradients null", {"contiguous_gradients": None}, "wrong-type", "contiguous_gradients"
    ),
    zero_case(
        "offload device gpu",
        {"offload_optimizer": {"device": "gpu"}},
        "wrong-value",
        "offload_optimizer.device",
        "not one of none, cpu, nvme",
    ),
    zero_case(
        "offload device in capitals",
        {"offload_optimizer": {"device": "CPU"}},
        "wrong-value",
        "offload_optimizer.device",
        "did you mean cpu?",
        mended={f"{ZERO}.offload_optimizer.device": "cpu"},
    ),
    case(
        "a dtype in capitals",
        text_of(torch_autocast={"enabled": True, "dtype": "BFloat16"}),
        "wrong-value",
        "torch_autocast.dtype",
        "did you mean bfloat16?",
        mended={"torch_autocast.dtype": "bfloat16"},
    ),
    case(
        "a warm-up that DeepSpeed takes for another in capitals",
        text_of(scheduler=warm(warmup_type="Linear")),
        "wrong-value",
        "scheduler.params.warmup_type",
        "did you mean linear?",
    ),
    zero_case(
        "offload as text", {"offload_optimizer": "cpu"}, "wrong-type", "offload_optimizer", "an object"
    ),
    zero_case(
        "ratio above 1",
        {"offload_optimizer": {"device": "cpu", "ratio": 1.5}},
        "wrong-value",
        "offload_optimizer.ratio",
        "at most 1",
        3,
    ),
    top_case(
        "C22 bfp16",
        "communication_data_type",
        "bfp16",
        "wrong-value",
        mended={"communication_data_type": "bf16"},
    ),
    top_case(
        "C22 bfloat16",
        "communication_data_type",
        "bfloat16",
        "wrong-value",
        mended={"communication_data_type": "bf16"},
    ),
    top_case("communication in int8", "communication_data_type", "int8", "wrong-value"),
    top_case("allreduce max", "gradient_allreduce_op", "max", "wrong-value", "not one of mean, sum"),
    top_case(
        "wall_clock_breakdown as text",
        "wall_clock_breakdown",
        "false",
        "wrong-type",
        mended={"wall_clock_breakdown": False},
    ),
    case(
        "tag_validation",
        text_of(checkpoint={"tag_validation": "warning"}),
        "wrong-value",
        "checkpoint.tag_validation",
    ),
    top_case("log_level loud", "log_level", "loud", "wrong-value", "not one of debug, info"),
    zero_case(
        "zenflow never updates",
        {"zenflow": {"update_interval": 0}, "offload_optimizer": {"device": "cpu"}},
        "wrong-value",
        "zenflow.update_interval",
        "at least 1",
    ),
    case(
        "steps of 0 in the range test",
        text_of(scheduler={"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}),
        "wrong-value",
        "scheduler.params.lr_range_test_step_size",
        "at least 1",
    ),
    case(
        "a type that JSON cannot write",
        text_of(tensor_parallel={"dtype": "bf16"}),
        "wrong-type",
        "tensor_parallel.dtype",
    ),
    case(
        "experts in no group",
        text_of(expert_parallel={"enabled": True, "num_limited_groups": 0}),
        "wrong-value",
        "expert_parallel.num_limited_groups",
        "at least 1",
    ),
    case(
        "lr as text",
        text_of(optimizer=adam(lr="5e-5")),
        "wrong-type",
        "optimizer.params.lr",
        mended={"optimizer.params.lr": 5e-5},
    ),
    case("lr below 0", text_of(optimizer=adam(lr=-0.1)), "wrong-value", "optimizer.params.lr"),
    case("one beta", text_of(optimizer=adam(betas=[0.9])), "wrong-type", "optimizer.params.betas"),
    case("a beta of 1", text_of(optimizer=adam(betas=[0.9, 1.0])), "wrong-value", "optimizer.params.betas"),
    case(
        "C26 no warm-up steps",
        text_of(scheduler=warm(warmup_num_steps=0)),
        "wrong-type",
        "scheduler.params.warmup_num_steps",
        "above 0",
    ),
    case(
        "params as list", text_of(optimizer={"type": "AdamW", "params": []}), "wrong-type", "optimizer.params"
    ),
]

NULLS = [
    top_case(f"{key} null", key, None, "null-block", "null where a block is expected", mended={key: GONE})
    for key in (
        *("activation_checkpointing", "autotuning", "checkpoint", "comet", "comms_logger", "compile"),
        *("csv_monitor", "data_efficiency", "data_types", "flops_profiler", "fp16", "hybrid_engine"),
        *("optimizer", "pipeline", "scheduler", "tensor_parallel", "tensorboard", "timers"),
        *("torch_autocast", "wandb", "weight_quantization"),
    )
]
NULLS += [
    case(
        "a block in a block null",
        text_of(timers={"throughput": None}),
        "null-block",
        "timers.throughput",
        mended={"timers.throughput": GONE, "timers": {}},
    ),
]

NULLS += [
    case(
        f"{name} null",
        text_of(optimizer=adam(**{name: None})),
        "null-param",
        f"optimizer.params.{name}",
        "is expected",
        mended={f"optimizer.params.{name}": AUTO},
    )
    for name in ("lr", "betas", "eps", "weight_decay")
]
NULLS += [
    case(
        "momentum null, which no run fills in",
        text_of(
            optimizer={"type": "SGD", "params": {"lr": AUTO, "momentum": None}},
            zero_allow_untested_optimizer=True,
        ),
        "null-param",
        "optimizer.params.momentum",
    ),
    case(
        "bias_correction null",
        text_of(optimizer=adam(bias_correction=None)),
        "null-param",
        "optimizer.params.bias_correction",
        "counts as false",
        severity=W,
    ),
    case(
        "warm-up steps null",
        text_of(scheduler=warm(warmup_num_steps=None)),
        "null-param",
        "scheduler.params.warmup_num_steps",
        mended={"scheduler.params.warmup_num_steps": AUTO},
    ),
    case(
        "total null",
        text_of(scheduler=warm("WarmupDecayLR", total_num_steps=None)),
        "scheduler-needs",
        "scheduler.params",
        mended={"scheduler.params.total_num_steps": AUTO},
    ),
]

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/n"}
CONTRADICTIONS = [
    case(
        "fp16 with bf16",
        text_of(fp16={"enabled": True}, bf16={"enabled": True}),
        "both-precisions",
        "bf16.enabled",
    ),
    zero_case(
        "C19 offload_param at stage 2",
        {"offload_param": CPU},
        "offload-stage",
        "offload_param.device",
        "needs stage 3",
    ),
    zero_case(
        "C19 offload_optimizer at stage 0",
        {"offload_optimizer": CPU},
        "offload-stage",
        "offload_optimizer.device",
        "needs stage 1",
        0,
    ),
    zero_case(
        "C20 nvme at stage 2",
        {"offload_optimizer": NVME},
        "offload-stage",
        "offload_optimizer.device",
        "nvme needs stage 3",
    ),
    zero_case(
        "nvme without a path",
        {"offload_optimizer": {"device": "nvme"}},
        "nvme-without-path",
        "offload_optimizer.device",
        "nvme_path",
        3,
    ),
    zero_case(
        "nvme with auto for a path",
        {"offload_param": {**NVME, "nvme_path": AUTO}},
        "nvme-without-path",
        "offload_param.device",
        "nvme_path",
        3,
    ),
    zero_case(
        "a key of stage 3 at stage 2",
        {"stage3_max_live_parameters": 1e9},
        "unread-key",
        "stage3_max_live_parameters",
        "at stage 3 only",
        severity=W,
        mended={f"{ZERO}.stage3_max_live_parameters": GONE},
    ),
    zero_case(
        "round_robin at stage 3",
        {"round_robin_gradients": True},
        "unread-key",
        "round_robin_gradients",
        "stage 1 and 2",
        3,
        severity=W,
        mended={f"{ZERO}.round_robin_gradients": GONE},
    ),
    zero_case(
        "overlap_comm at stage 0",
        {"overlap_comm": True},
        "unread-key",
        "overlap_comm",
        "the stage is 0",
        0,
        severity=W,
        mended={f"{ZERO}.overlap_comm": GONE},
    ),
    zero_case(
        "buffer_count at stage 2",
        {"offload_optimizer": {**CPU, "buffer_count": 4}},
        "unread-key",
        "offload_optimizer.buffer_count",
        severity=W,
        mended={f"{ZERO}.offload_optimizer": CPU},
    ),
    top_case("prescale with reduce_scatter", "prescale_gradients", True, "contradiction", "reduce_scatter"),
    top_case(
        "predivide with reduce_scatter", "gradient_predivide_factor", 2.0, "contradiction", "reduce_scatter"
    ),
    case(
        "Muon at stage 3",
        text_of(3, optimizer={"type": "Muon", "params": {"lr": AUTO}}),
        "contradiction",
        "optimizer.type",
        "Muon",
    ),
    case("sum at stage 3", text_of(3, gradient_allreduce_op="sum"), "contradiction", "gradient_allreduce_op"),
    case(
        "C23 bf16 communication at stage 1",
        text_of(1, communication_data_type="bf16", gradient_accumulation_steps=2),
        "contradiction",
        "communication_data_type",
        severity=W,
    ),
    case(
        "clipping left out",
        text_of(gradient_clipping=...),
        "left-out",
        said="gradient_clipping is left out",
        severity=W,
        mended={"gradient_clipping": AUTO},
    ),
    case(
        "clipping null",
        text_of(gradient_clipping=None),
        "left-out",
        said="gradient_clipping",
        severity=W,
        mended={"gradient_clipping": AUTO},
    ),
    case(
        "C16 batch left out",
        text_of(train_batch_size=..., train_micro_batch_size_per_gpu=..., gradient_accumulation_steps=...),
        "left-out",
        said="train_batch_size",
        severity=W,
        mended=OWN,
    ),
    case(
        "accumulation left out",
        text_of(gradient_accumulation_steps=...),
        "left-out",
        said="gradient_accumulation_steps",
        severity=W,
        mended={"gradient_accumulation_steps": AUTO},
    ),
    case(
        "no zero block", text_of(zero_optimization=...), "no-stage", severity=W, mended={ZERO: {"stage": 0}}
    ),
    case(
        "no stage", text_of(zero_optimization={}), "no-stage", ZERO, severity=W, mended={ZERO: {"stage": 0}}
    ),
    case(
        "weights not gathered",
        text_of(3, {"stage3_gather_16bit_weights_on_model_save": AUTO}),
        "not-gathered",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        severity=W,
    ),
    case(
        "C04 auto that nobody fills",
        text_of(zero={"allgather_bucket_size": AUTO}),
        "auto-unfilled",
        f"{ZERO}.allgather_bucket_size",
        "nobody fills in",
    ),
    case(
        "C01 auto of communication",
        text_of(communication_data_type=AUTO),
        "auto-unfilled",
        "communication_data_type",
    ),
    case(
        "auto that DeepSpeed would fill",
        text_of(data_types={"keep_in_fp32_modules": AUTO}),
        "auto-unfilled",
        "data_types.keep_in_fp32_modules",
    ),
    case(
        "auto of adam_w_mode",
        text_of(optimizer=adam(adam_w_mode=AUTO)),
        "auto-unfilled",
        "optimizer.params.adam_w_mode",
    ),
]

MUP = ("MuAdam", "muadamw", "MuSGD")
CHOSEN = [
    zero_case("stage auto", {"stage": AUTO}, "auto-chosen", "stage", "becomes 2", severity=W),
    *(
        zero_case(
            f"{block}'s device auto",
            {block: {"device": AUTO}},
            "auto-chosen",
            f"{block}.device",
            "becomes none",
            3,
            severity=W,
        )
        for block in ("offload_optimizer", "offload_param")
    ),
]

OPTIMIZERS = [
    case(
        "amsgrad of AdamW",
        text_of(optimizer=adam(amsgrad=True)),
        "optimizer-param",
        "optimizer.params.amsgrad",
        "does not support amsgrad",
    ),
    case(
        "amsgrad off the device",
        text_of(zero={"offload_optimizer": {"device": "cpu"}}, optimizer=adam(amsgrad=True)),
        "optimizer-param",
        "optimizer.params.amsgrad",
    ),
    case(
        "C32 adamw_torch",
        text_of(optimizer={"type": "adamw_torch"}),
        "optimizer",
        "optimizer.type",
        "did you mean AdamW?",
    ),
    case(
        "FusedAdam",
        text_of(optimizer={"type": "FusedAdam"}),
        "optimizer",
        "optimizer.type",
        "did you mean AdamW?",
    ),
    case(
        "sgd in small letters",
        text_of(optimizer={"type": "sgd"}),
        "optimizer",
        "optimizer.type",
        "did you mean SGD?",
    ),
    case("OneBitAdam", text_of(optimizer={"type": "OneBitAdam"}), "optimizer", "optimizer.type", "0.19.6"),
    case("LBFGS", text_of(optimizer={"type": "LBFGS"}), "optimizer", "optimizer.type"),
    case("a name like none", text_of(optimizer={"type": "xyzzy"}), "optimizer", "optimizer.type"),
    case("no type", text_of(optimizer={"params": {"lr": AUTO}}), "no-type", "optimizer"),
    case("type as number", text_of(optimizer={"type": 3}), "wrong-type", "optimizer.type"),
    case(
        "C31 SGD not allowed",
        text_of(optimizer={"type": "SGD", "params": {"lr": AUTO}}),
        "untested-optimizer",
        "optimizer.type",
        "allowed",
    ),
    case(
        "Lamb not allowed",
        text_of(optimizer={"type": "Lamb", "params": {"lr": AUTO}}),
        "untested-optimizer",
        "optimizer.type",
    ),
    case(
        "C32 learning_rate",
        text_of(optimizer={"type": "AdamW", "params": {"learning_rate": AUTO}}),
        "optimizer-param",
        "optimizer.params.learning_rate",
        "did you mean lr?",
        mended={"optimizer.params.lr": AUTO, "optimizer.params.learning_rate": GONE},
    ),
    case(
        "betas of Adagrad",
        text_of(optimizer={"type": "Adagrad", "params": {"lr": AUTO, "betas": AUTO}}),
        "optimizer-param",
        "optimizer.params.betas",
        "Adagrad takes no betas",
    ),
    case(
        "eps of Lion",
        text_of(optimizer={"type": "Lion", "params": {"lr": AUTO, "eps": AUTO}}),
        "optimizer-param",
        "optimizer.params.eps",
    ),
    case(
        "momentum of AdamW",
        text_of(optimizer=adam(momentum=0.9)),
        "optimizer-param",
        "optimizer.params.momentum",
    ),
    case(
        "max_grad_norm in params",
        text_of(optimizer=adam(max_grad_norm=1.0)),
        "optimizer-param",
        "optimizer.params.max_grad_norm",
    ),
    case(
        "set_grad_none off the device",
        text_of(zero={"offload_optimizer": CPU}, optimizer=adam(set_grad_none=True)),
        "optimizer-param",
        "optimizer.params.set_grad_none",
        "off the device",
    ),
    case(
        "C28 a scheduler of torch",
        text_of(scheduler={"type": "CosineAnnealingLR"}),
        "scheduler",
        "scheduler.type",
        "above stage 0",
    ),
    *(
        case(
            f"{name} warms up for longer than it runs",
            text_of(scheduler=warm(name, warmup_num_steps=100, total_num_steps=99)),
            "contradiction",
            "scheduler.params.warmup_num_steps",
            "warmup_num_steps 100 is above total_num_steps 99",
            severity=W,
        )
        for name in ("WarmupDecayLR", "WarmupCosineLR")
    ),
    case(
        "C28 a scheduler of Trainer",
        text_of(scheduler={"type": "linear"}),
        "scheduler",
        "scheduler.type",
        "of Trainer",
    ),
    case(
        "warmuplr in small letters",
        text_of(scheduler={"type": "warmuplr", "params": {}}),
        "scheduler",
        "scheduler.type",
        "WarmupLR",
        mended={"scheduler.type": "WarmupLR"},
    ),
    case("a scheduler like none", text_of(scheduler={"type": "xyzzy"}), "scheduler", "scheduler.type"),
    case("a scheduler without type", text_of(scheduler={"params": {}}), "no-type", "scheduler"),
    case(
        "C29 no total",
        text_of(scheduler=warm("WarmupDecayLR")),
        "scheduler-needs",
        "scheduler.params",
        "needs total_num_steps",
        mended={"scheduler.params.total_num_steps": AUTO},
    ),
    case(
        "C29 no params",
        text_of(scheduler={"type": "WarmupCosineLR"}),
        "scheduler-needs",
        "scheduler",
        "needs total_num_steps",
        mended={"scheduler.params": {"total_num_steps": AUTO}},
    ),
    *(
        case(
            f"{name} without params",
            text_of(scheduler={"type": name}),
            "scheduler-needs",
            "scheduler",
            "needs params",
            mended={"scheduler.params": {}},
        )
        for name in ("WarmupLR", "LRRangeTest")
    ),
    case(
        "ConstantLR without params",
        text_of(0, scheduler={"type": "ConstantLR"}),
        "scheduler-needs",
        "scheduler",
        mended={"scheduler.params": {}},
    ),
    *(
        case(
            f"{name} at stage 0",
            text_of(0, scheduler={"type": name, "params": params}),
            rule,
            path,
            said,
        )
        for name, params, rule, path, said in (
            ("CosineAnnealingLR", {"eta_min": 0.1}, "scheduler-needs", "scheduler.params", "needs T_max"),
            ("LambdaLR", {"lr_lambda": "x"}, "scheduler", "scheduler.type", "only Python can write"),
            ("ReduceLROnPlateau", {}, "scheduler", "scheduler.type", "the batch size for a loss"),
        )
    ),
    case(
        "OneCycle without its top",
        text_of(scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}),
        "scheduler-needs",
        "scheduler.params",
        "needs cycle_max_lr",
    ),
    case(
        "C29 warmup_steps",
        text_of(scheduler={"type": "WarmupLR", "params": {"warmup_steps": 3}}),
        "scheduler-param",
        "scheduler.params.warmup_steps",
        "did you mean warmup_num_steps?",
        mended={"scheduler.params.warmup_num_steps": 3},
    ),
    case(
        "warmup_max_lr of the cosine",
        text_of(scheduler=warm("WarmupCosineLR", total_num_steps=AUTO, warmup_max_lr=AUTO)),
        "scheduler-param",
        "scheduler.params.warmup_max_lr",
    ),
    case(
        "warmup_type",
        text_of(scheduler=warm(warmup_type="cosine")),
        "wrong-value",
        "scheduler.params.warmup_type",
        "not one of",
    ),
]


def run(**train):
    return Circumstances(train=train)


def on(**machine):
    return Circumstances(machine=Machine(**machine))


WARMUP = {"warmup_steps": 0.1}
AROUND = [
    case(
        "C13 7 for one rank",
        text_of(train_batch_size=7, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3),
        "batch",
        "train_batch_size",
        "no multiple",
    ),
    case(
        "C13 8 for three ranks",
        text_of(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1),
        "batch",
        "train_batch_size",
        "3 ranks cannot share",
        around=Circumstances(world_size=3),
    ),
    case(
        "C13 7 ranks and auto",
        text_of(train_batch_size=256),
        "batch",
        "train_batch_size",
        "7 ranks cannot share",
        around=Circumstances(world_size=7),
    ),
    case(
        "C13 a pinned batch",
        text_of(train_batch_size=256, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=4),
        "pinned",
        "train_batch_size",
        "one number of ranks",
        severity=W,
    ),
    case(
        "C05 micro batch",
        text_of(train_micro_batch_size_per_gpu=4),
        "mismatch",
        "train_micro_batch_size_per_gpu",
        "4 in the JSON",
        around=run(per_device_train_batch_size=2),
    ),
    case(
        "C05 accumulation",
        text_of(gradient_accumulation_steps=4),
        "mismatch",
        "gradient_accumulation_steps",
        around=run(gradient_accumulation_steps=2),
    ),
    case(
        "C05 clipping",
        text_of(gradient_clipping=0.5),
        "mismatch",
        "gradient_clipping",
        around=run(max_grad_norm=1.0),
    ),
    case(
        "C05 lr",
        text_of(optimizer=adam(lr=1e-4)),
        "mismatch",
        "optimizer.params.lr",
        around=run(learning_rate=1e-5),
    ),
    case(
        "C05 betas",
        text_of(optimizer=adam(betas=[0.8, 0.9])),
        "mismatch",
        "optimizer.params.betas",
        around=run(adam_beta1=0.9),
    ),
    case(
        "C05 eps",
        text_of(optimizer=adam(eps=1e-6)),
        "mismatch",
        "optimizer.params.eps",
        around=run(adam_epsilon=1e-8),
    ),
    case(
        "C05 weight decay",
        text_of(optimizer=adam(weight_decay=0.1)),
        "mismatch",
        "optimizer.params.weight_decay",
        around=run(weight_decay=0.0),
    ),
    case(
        "C05 warm-up",
        text_of(scheduler=warm(warmup_num_steps=5)),
        "mismatch",
        "scheduler.params.warmup_num_steps",
        around=run(warmup_steps=7),
    ),
    case(
        "C05 top rate",
        text_of(scheduler=warm(warmup_max_lr=1e-3)),
        "mismatch",
        "scheduler.params.warmup_max_lr",
        around=run(learning_rate=1e-5, **WARMUP),
    ),
    case("C05 bf16", text_of(bf16={"enabled": True}), "mismatch", "bf16.enabled", around=run(bf16=False)),
    case(
        "bf16 in the one, fp16 in the other",
        text_of(bf16={"enabled": True}),
        "mismatch",
        "bf16.enabled",
        "train.fp16 true in the run file",
        around=run(fp16=True),
    ),
    case(
        "bf16 in the one, fp16 for evaluation in the other",
        text_of(bf16={"enabled": True}, fp16={"enabled": AUTO}),
        "mismatch",
        "bf16.enabled",
        "train.fp16 true in the run file",
        around=run(fp16_full_eval=True),
    ),
    case(
        "a batch size to be found at stage 3",
        text_of(3),
        "contradiction",
        f"{ZERO}.stage",
        "auto_find_batch_size",
        around=run(auto_find_batch_size=True),
    ),
    *(
        case(
            f"{name} without mup",
            text_of(optimizer={"type": name, "params": {"lr": AUTO}}),
            "optimizer",
            "optimizer.type",
            "needs the package mup",
            around=on(mup=False),
        )
        for name in MUP
    ),
    case("C05 fp16", text_of(fp16={"enabled": True}), "mismatch", "fp16.enabled", around=run(bf16=True)),
    case(
        "C07 total steps",
        text_of(scheduler=warm("WarmupDecayLR", total_num_steps=100)),
        "mismatch",
        "scheduler.params.total_num_steps",
        "max_steps 3",
        around=run(max_steps=3, **WARMUP),
    ),
    case(
        "C07 pinned total steps",
        text_of(scheduler=warm("WarmupDecayLR", total_num_steps=100)),
        "pinned",
        "scheduler.params.total_num_steps",
        severity=W,
        around=run(**WARMUP),
    ),
    case(
        "C25 scheduler in both",
        text_of(scheduler=warm()),
        "silent-winner",
        "scheduler",
        "lr_scheduler_type cosine",
        around=run(lr_scheduler_type="cosine", **WARMUP),
    ),
    case(
        "C25 optimizer in both",
        text_of(optimizer=adam()),
        "silent-winner",
        "optimizer",
        "optim adafactor",
        around=run(optim="adafactor"),
    ),
    case("C26 steps at lr 0", text_of(scheduler=warm()), "no-warmup", "scheduler", severity=W, around=run()),
    case(
        "no hidden size",
        text_of(zero={"reduce_bucket_size": AUTO}),
        "auto-unfilled",
        f"{ZERO}.reduce_bucket_size",
        "no hidden size",
        mended={f"{ZERO}.reduce_bucket_size": 500_000_000},
        around=Circumstances(model_config={"model_type": "t5gemma"}),
    ),
    case(
        "a path that is a file",
        text_of(3, {"offload_param": NVME}),
        "nvme-path",
        f"{ZERO}.offload_param.nvme_path",
        "is no folder",
        around=on(folders={"/n": "no folder"}),
    ),
    case(
        "a path that is read-only",
        text_of(3, {"offload_param": NVME}),
        "nvme-path",
        f"{ZERO}.offload_param.nvme_path",
        "cannot be written",
        around=on(folders={"/n": "unwritable"}),
    ),
    case(
        "a path in memory",
        text_of(3, {"offload_param": NVME}),
        "nvme-path",
        f"{ZERO}.offload_param.nvme_path",
        "in memory",
        severity=W,
        around=on(folders={"/n": "in memory"}),
    ),
    case(
        "no libaio",
        text_of(3, {"offload_param": NVME}),
        "no-libaio",
        f"{ZERO}.offload_param.device",
        severity=W,
        around=on(libaio=False),
    ),
    case(
        "no compiler",
        text_of(2, {"offload_optimizer": CPU}),
        "no-compiler",
        f"{ZERO}.offload_optimizer.device",
        severity=W,
        around=on(compiler=False),
    ),
    case(
        "fp16 on the CPU",
        text_of(fp16={"enabled": True}),
        "precision",
        "fp16.enabled",
        severity=W,
        around=on(gpu=False),
    ),
    case(
        "bf16 on an older GPU",
        text_of(bf16={"enabled": True}),
        "precision",
        "bf16.enabled",
        "older than bf16",
        severity=W,
        around=on(bf16=False),
    ),
    case(
        "DeepSpeed's own activation checkpointing",
        text_of(activation_checkpointing={"partition_activations": True}),
        "unread-key",
        "activation_checkpointing",
        "does nothing for a model of Transformers",
        severity=W,
    ),
    case(
        "C32 Lion on the CPU",
        text_of(optimizer={"type": "Lion", "params": {"lr": AUTO}}),
        "no-device",
        "optimizer.type",
        around=on(gpu=False),
    ),
    case(
        "Adagrad with Trainer's scheduler",
        text_of(2, optimizer={"type": "Adagrad", "params": {"lr": AUTO}}),
        "contradiction",
        "optimizer.type",
        "does not follow Trainer's own scheduler (cosine)",
        around=Circumstances(train={"lr_scheduler_type": "cosine"}),
    ),
    case(
        "Trainer's SGD, offloaded",
        text_of(2, {"offload_optimizer": CPU}),
        "contradiction",
        f"{ZERO}.offload_optimizer.device",
        "Adam silently takes the place of train.optim sgd",
        around=Circumstances(train={"optim": "sgd"}),
    ),
    case(
        "Lamb off the GPU",
        text_of(
            2,
            {"offload_optimizer": CPU},
            optimizer={"type": "Lamb", "params": {"lr": AUTO}},
            zero_allow_untested_optimizer=True,
        ),
        "contradiction",
        "optimizer.type",
        "runs on the GPU alone",
    ),
    case(
        "Lamb with a fixed loss scale",
        text_of(
            optimizer={"type": "Lamb", "params": {"lr": AUTO}},
            zero_allow_untested_optimizer=True,
            fp16={"enabled": True, "loss_scale": 128},
        ),
        "contradiction",
        "fp16.loss_scale",
        "dynamic loss scaling",
    ),
    case(
        "OneBitAdam, and what is installed",
        text_of(optimizer={"type": "OneBitAdam", "params": {"lr": AUTO}}),
        "optimizer",
        "optimizer.type",
        "and 0.19.8 is installed",
        around=on(deepspeed="0.19.8"),
    ),
    case(
        "C13 half of a batch",
        text_of(train_batch_size=10, train_micro_batch_size_per_gpu=4),
        "batch",
        "train_batch_size",
        "no multiple of train_micro_batch_size_per_gpu 4",
    ),
]

CASES = [*NAMES, *VALUES, *NULLS, *CHOSEN, *CONTRADICTIONS, *OPTIMIZERS, *AROUND]
SINGLE = ("bf16", "fp16")  # those cases name the block, and the finding the key in it


def test_there_are_enough_faulty_files():
    texts = {it.text for it in (*SYNTAX, *CASES)}
    assert len(texts) >= 100


@pytest.mark.parametrize("it", CASES, ids=lambda it: it.name)
def test_the_one_thing_that_is_wrong(it):
    (one,) = found(it.text, it.around)
    whole = "object" in one.problem or "block" in one.problem
    path = f"{it.path}.enabled" if it.path in SINGLE and not whole else it.path
    assert (one.rule, one.severity, one.path) == (it.rule, it.severity, path)
    assert one.line == (it.expected_line() if it.path not in SINGLE else one.line)
    assert source.parse(it.text).line(one.line)[one.column - 1] not in " \t"
    assert it.said in one.problem
    assert one.consequence
    assert one.mend


@pytest.mark.parametrize("it", CASES, ids=lambda it: it.name)
def test_a_mend_changes_what_it_says_and_nothing_else(it):
    fixed = fix(it.text, it.around)
    if it.mended is None:
        assert fixed.text == it.text
        return
    assert [each.rule for each in fixed.mended] == [it.rule]
    assert found(fixed.text, it.around) in ((), found(fixed.text))
    before, after = flat(json.loads(it.text)), flat(json.loads(fixed.text))
    told = flat_changes(it.mended)
    for path, value in told.items():
        if value is GONE:
            assert not any(other == path or other.startswith(f"{path}.") for other in after)
        else:
            assert after[path] == value
            assert type(after[path]) is type(value)
    touched = [*it.mended, it.path] if it.path else list(it.mended)
    for path in set(before) | set(after):
        if not any(path == each or path.startswith(f"{each}.") for each in touched):
            assert before.get(path) == after.get(path)


def flat(node, prefix=""):
    """Every value that is no object, by its dotted path."""
    result = {}
    for key, value in node.items():
        if isinstance(value, dict):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result


def flat_changes(mended):
    return flat(mended)


# --- what is fine ------------------------------------------------------------------------------------------

STAGES, OFFLOADS = (0, 1, 2, 3), ("none", "cpu", "nvme")
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
NAMES_OF = {
    "optimizer": ("AdamW", "Adam", "Adagrad", "none"),
    "scheduler": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "none"),
}


@given(
    stage=st.sampled_from(STAGES),
    offload=st.sampled_from(OFFLOADS),
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(NAMES_OF["optimizer"]),
    scheduler=st.sampled_from(NAMES_OF["scheduler"]),
)
@settings(max_examples=60)
def test_what_build_writes_has_no_finding(stage, offload, precision, optimizer, scheduler):
    path = "/n" if offload == "nvme" else None
    try:
        config = build(Options(stage, offload, path, precision, optimizer, scheduler))
    except ConfigError:
        return
    for around in (NOWHERE, Circumstances(train={"warmup_steps": 0.1}, world_size=3, machine=Machine())):
        assert found(dumps(config), around) == ()
    assert fix(dumps(config), NOWHERE).text == dumps(config)


def test_known_names_and_comments_are_fine():
    assert found(text_of(_comment="x", steps_per_print=10, wall_clock_breakdown=False)) == ()
    assert found(text_of(zero={"allgather_bucket_size": 5e8, "allgather_partitions": True})) == ()
    assert found(text_of(3, {"offload_param": {"device": "none"}})) == ()
    assert found(text_of(optimizer={"type": "adamw", "params": {"lr": AUTO}})) == ()


@pytest.mark.parametrize(
    "key", [key for key in keys.keys().values() if key.any_case], ids=lambda key: key.path
)
def test_a_value_that_is_read_in_any_case_is_fine_in_any(key):
    for said in (str.lower, str.upper, str.capitalize):
        block = said(str(key.choices[0]))
        for name in reversed(key.path.split(".")):
            block = {name: block}
        assert not found(text_of(**block))


@pytest.mark.parametrize(
    "key", [key for key in keys.keys().values() if "str" in key.types and key.choices and not key.any_case]
)
def test_a_value_in_capitals_is_mended_where_deepspeed_refuses_the_file_for_it(key):
    """Against DeepSpeed itself: one that it takes for something else may be meant."""
    from deepspeed.runtime.config import DeepSpeedConfig

    meant = key.choices[-1]
    config = one_block(key.path, meant.upper())
    config.setdefault(ZERO, {})["stage"] = 3
    (one,) = [each for each in found(json.dumps(config)) if f"did you mean {meant}?" in each.problem]
    assert one.mend == f'write "{meant}"'
    mended = flat(json.loads(fix(json.dumps(config), NOWHERE).text)).get(key.path)
    try:
        DeepSpeedConfig({"train_batch_size": 1, **config})
    except ValueError:
        assert mended == meant
    else:
        assert mended == meant.upper()


def test_a_text_where_a_limited_number_may_stand_is_no_traceback():
    zero = {"zenflow": {"update_interval": "often"}, "offload_optimizer": {"device": "cpu"}}
    (one,) = found(text_of(zero=zero))
    assert one.problem.endswith('is "often", a whole number is expected')


def one_block(path, value):
    """The object that has `value` at the dotted `path`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("path", [path for path, key in keys.keys().items() if "object" in key.types])
def test_a_null_block_is_refused_where_deepspeed_dies_of_it(path):
    """Against DeepSpeed itself, so that there is neither a miss nor a false alarm."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = one_block(path, None)
    if path.endswith("dynamic_batching"):  # DeepSpeed looks at its neighbour first
        config["data_efficiency"]["data_sampling"]["curriculum_learning"] = {}
    refused = [each.path for each in found(json.dumps(config)) if each.rule == "null-block"]
    try:
        DeepSpeedConfig({"train_batch_size": 1, **config})
    except (AttributeError, TypeError, ValueError):
        assert refused == [path]
    else:
        assert refused == []


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"stage": 3}, "stage"),
        ({"stage": 3, ZERO: {"overlap_comm": True}}, "stage"),
        ({"zero_stage": 3, ZERO: {"overlap_comm": True}}, "zero_stage"),
        ({ZERO: {"Stage": 3, "stage3_max_live_parameters": 1e9}}, f"{ZERO}.Stage"),
        ({ZERO: {"stag": 2, "offload_optimizer": {"device": "cpu"}}}, f"{ZERO}.stag"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation"),
        ({"Zero_Optimization": {"stage": 2}}, "Zero_Optimization"),
    ],
)
def test_a_stage_under_another_name_or_place_is_one_finding_and_none_is_added(config, path):
    text = json.dumps({**OWN, **config})
    assert [(each.severity, each.path) for each in found(text)] == [("error", path)]
    assert fix(text, NOWHERE).text == text


MISSPELT = "zero_optimisation"


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (
            {MISSPELT: {"stage": 5, "overlap_com": True}},
            [MISSPELT, f"{MISSPELT}.stage", f"{MISSPELT}.overlap_com"],
        ),
        (
            {MISSPELT: {"stage": 2, "offload_optimiser": {"device": "gpu"}, "aio": {"thread_count": 1}}},
            [
                MISSPELT,
                f"{MISSPELT}.offload_optimiser",
                f"{MISSPELT}.offload_optimiser.device",
                f"{MISSPELT}.aio",
                f"{MISSPELT}.aio.thread_count",
            ],
        ),
        (
            {ZERO: {"stage": 3, **GATHER, "aio": {"thread_count": 1, "block_size": "2"}}},
            [f"{ZERO}.aio", f"{ZERO}.aio.thread_count", f"{ZERO}.aio.block_size"],
        ),
        (
            {ZERO: {"stage": 2}, "offload_optimizer": {"device": "gpu"}},
            ["offload_optimizer", "offload_optimizer.device"],
        ),
        (
            {ZERO: {"stage": 2}, "optimiser": {"params": {"lr": "1"}}},
            ["optimiser"] * 2 + ["optimiser.params.lr"],
        ),
        ({ZERO: {"stage": 2}, MISSPELT: {"stage": 5}}, [MISSPELT]),
        ({MISSPELT: {"stage": 5}, "zero_optimizatoin": {"stage": 6}}, [MISSPELT, "zero_optimizatoin"]),
    ],
)
def test_a_block_of_a_wrong_name_or_place_is_looked_into_as_what_it_means(config, paths):
    text = json.dumps({**OWN, **config}, indent=2)
    assert [each.path for each in found(text)] == paths
    lines = [each.line for each in found(text)]
    assert lines == sorted(lines)
    once = fix(text, NOWHERE).text
    assert fix(once, NOWHERE).text == once
    assert MISSPELT not in text or once == text


@pytest.mark.parametrize("config", [OWN, {**OWN, ZERO: {}}, {**OWN, ZERO: {"_stage": 2}, "_stage": "two"}])
def test_the_stage_that_is_added_is_the_one_that_is_said(config):
    (one,) = [each for each in found(json.dumps(config)) if each.rule == "no-stage"]
    assert '"stage": 0' in one.mend
    assert json.loads(fix(json.dumps(config), NOWHERE).text)[ZERO]["stage"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("gradient_accumulation_steps", 0), ("max_grad_norm", -1), ("learning_rate", float("nan"))],
)
def test_a_number_of_the_run_file_that_trains_nothing(name, value):
    (one,) = found(text_of(), run(**{name: value}))
    assert (one.rule, one.severity, one.line) == ("run-file", "error", None)
    assert f"train.{name} is {value}" in one.problem
    assert error_of(text_of(), run(**{name: value})).message == f"dstool.yaml: {one.problem}"


@pytest.mark.parametrize(
    ("text", "around"),
    [
        (text_of(2), run(auto_find_batch_size=True)),
        (text_of(), run(gradient_accumulation_steps=1, max_grad_norm=0)),
        (text_of(optimizer={"type": "MuAdam", "params": {"lr": AUTO}}), on()),
        (text_of(optimizer=adam(amsgrad=True, torch_adam=True)), NOWHERE),
        (text_of(optimizer=adam(amsgrad=False)), NOWHERE),
        (text_of(bf16={"enabled": True}), run(fp16=False)),
    ],
)
def test_what_only_looks_like_it_is_fine(text, around):
    assert found(text, around) == ()


@pytest.mark.parametrize("optimizer", ["FusedAdam", "DeepSpeedCPUAdam"])
def test_deepspeed_has_no_amsgrad(optimizer):
    import torch
    from deepspeed.ops import adam as adams

    with pytest.raises(RuntimeError, match="AMSGrad"):
        getattr(adams, optimizer)([torch.nn.Parameter(torch.ones(1))], amsgrad=True)


def test_a_null_zero_block_is_refused_and_its_stage_is_not_guessed():
    text = text_of(zero_optimization=None)
    assert [(each.rule, each.path) for each in found(text)] == [("null-block", ZERO)]
    assert fix(text, NOWHERE).text == text


def test_a_scheduler_with_null_for_its_parameters_is_refused():
    """The engine unpacks them (deepspeed 0.19.8, runtime/engine.py `_configure_lr_scheduler`)."""
    (one,) = found(text_of(scheduler={"type": "WarmupLR", "params": None}))
    assert (one.rule, one.path) == ("null-block", "scheduler.params")


TORCHS = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
NEEDED = {
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_step_size": 1, "decay_lr_rate": 0.1},
    "WarmupLR": {"warmup_num_steps": 2},
    "WarmupDecayLR": {"warmup_num_steps": 2, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 9},
    "LRRangeTest": {},
}


def steps_with_null(block, name, param):
    """Whether the optimizer or scheduler of that name takes two steps, or twelve, with `param` as null."""
    import torch
    from deepspeed.ops import adam as adams
    from deepspeed.runtime import lr_schedules

    weight = torch.nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.ones(3, 3)
    own = {"AdamW": adams.FusedAdam}
    try:
        if block == "optimizer":
            of_name = own.get(name) or getattr(torch.optim, name)
            made = of_name([weight], **{"lr": 0.1, param: None})
        else:
            optimizer = torch.optim.AdamW([weight], lr=0.1)
            made = getattr(lr_schedules, name)(optimizer, **{**NEEDED[name], param: None})
        for _ in range(2 if block == "optimizer" else 12):
            made.step()
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    ("block", "name"),
    [*(("optimizer", name) for name in (*TORCHS, "AdamW")), *(("scheduler", name) for name in NEEDED)],
)
def test_a_null_parameter_is_refused_where_it_is_computed_with(block, name):
    """Against DeepSpeed and torch themselves."""
    table = keys.optimizers() if block == "optimizer" else keys.schedulers()
    # Of these, dampening is looked at beside a momentum alone, and the engine takes the last three out.
    others = {"dampening", "differentiable", "foreach", "torch_adam", "fp32_optimizer_states"}
    for param in table[name].takes - others:
        params = {"lr": AUTO, param: None} if block == "optimizer" else {**NEEDED[name], param: None}
        text = text_of(zero_allow_untested_optimizer=True, **{block: {"type": name, "params": params}})
        errors = [each for each in found(text) if each.severity == "error"]
        assert bool(errors) is not steps_with_null(block, name, param), (param, errors)


def test_a_null_that_dstool_fills_in_stops_no_run():
    assert error_of(text_of(optimizer=adam(lr=None))) is None
    assert error_of(text_of(optimizer=adam(bias_correction=None))) is None
    lion = {"type": "Lion", "params": {"lr": AUTO, "betas": None}}
    assert "betas is null" in error_of(text_of(optimizer=lion)).message


@pytest.mark.parametrize("on", [True, False])
def test_the_old_form_of_zero_is_what_a_trainer_cannot_read(on):
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    assert DeepSpeedConfig({"train_batch_size": 1, ZERO: on}).zero_config.stage == int(on)
    with pytest.raises(AttributeError):
        HfDeepSpeedConfig({ZERO: on})
    assert "bool" not in keys.keys()[ZERO].types


def test_a_scheduler_of_torch_needs_what_torch_says():
    from torch.optim import lr_scheduler

    for name, needs in run_rules._TORCH_SCHEDULERS.items():
        taken = inspect.signature(getattr(lr_scheduler, name)).parameters.values()
        assert {each.name for each in taken if each.default is each.empty} == {"optimizer", *needs}


def test_a_scheduler_of_torch_is_built_on_an_optimizer_of_torch_alone():
    """Against DeepSpeed itself: its optimizers in 16 bits, and those of ZeRO, are none of torch's."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from torch.optim.lr_scheduler import ConstantLR

    for cls in (FP16_Optimizer, FP16_UnfusedOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        with pytest.raises(TypeError, match="is not an Optimizer"):
            ConstantLR(cls.__new__(cls))


@pytest.mark.parametrize("name", run_rules._TORCH_SCHEDULERS)
def test_a_scheduler_of_torch_comes_with_the_one_of_trainer_to_set(name):
    from transformers.trainer_utils import SchedulerType

    (one,) = found(text_of(scheduler={"type": name}))
    said = one.mend.partition("set train.lr_scheduler_type to ")[2].partition(" in the run file")[0]
    assert said in {each.value for each in SchedulerType}
    expected = {"CosineAnnealingLR": "cosine", "LinearLR": "linear", "ConstantLR": "constant"}
    assert said == expected.get(name, said)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("steps", [0, -1, 1.5, "1", 1, 2])
def test_a_warm_up_that_deepspeed_refuses_is_told_with_its_error(name, steps):
    """Against DeepSpeed itself, which takes a warm-up of 1 step for one of 2."""
    import torch
    from deepspeed.runtime import lr_schedules

    more = {} if name == "WarmupLR" else {"total_num_steps": 9}
    told = [each.consequence for each in found(text_of(scheduler=warm(name, warmup_num_steps=steps, **more)))]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        getattr(lr_schedules, name)(optimizer, warmup_num_steps=steps, **more)
    except ValueError as error:
        words = str(error).partition(", got")[0]
        assert told == [f"DeepSpeed stops after the model has loaded: ValueError, {words}"]
    else:
        assert told == []


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_warm_up_longer_than_the_run_never_comes_to_its_peak(name):
    """Against DeepSpeed itself, which says a word in its log and goes on."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(lr_schedules, name)(optimizer, total_num_steps=5, warmup_num_steps=9)
    rates = []
    for _ in range(5):
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == sorted(rates)
    assert rates[-1] < 1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("strategy", ["step", "epoch", None])
@pytest.mark.parametrize("select", [1, 4, None])
@pytest.mark.parametrize("update", [4, None])
def test_the_intervals_of_zenflow_are_those_that_deepspeed_takes(stage, strategy, select, update):
    """Against DeepSpeed itself, where the settings alone decide."""
    from types import SimpleNamespace

    from deepspeed.runtime.zenflow.engine_stage3 import configure_zenflow
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig

    given = {"select_strategy": strategy, "select_interval": select, "update_interval": update}
    given = {name: value for name, value in given.items() if value is not None}
    refused = [each.rule for each in found(text_of(stage, {"zenflow": given, "offload_optimizer": CPU}))]
    try:
        configure_zenflow(SimpleNamespace(), ZenFlowConfig(**given))
    except (ValueError, Warning):
        assert refused == ["contradiction"]
    else:
        assert refused == []


def test_a_batch_that_fits_is_fine():
    pinned = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert found(text_of(**pinned), Circumstances(world_size=2)) == ()


# --- several things ----------------------------------------------------------------------------------------


def test_c35_the_last_of_two_blocks_counts():
    text = '{"zero_optimization": {"stage": 3},\n "zero_optimization": {"stage": 2},\n' + json.dumps(OWN)[1:]
    (one,) = found(text)
    assert (one.rule, one.line, one.problem) == (
        "duplicate-key",
        2,
        '"zero_optimization" is given twice, first on line 1',
    )
    assert json.loads(fix(text, NOWHERE).text) == json.loads(text)


def test_findings_come_in_the_order_of_the_lines():
    lines = [each.line for each in found(text_of(4, {"overlap_com": 1}, xyzzy=1, train_batch_size="x"))]
    assert lines == sorted(lines)
    assert len(lines) == 4


def test_what_a_reader_cannot_get_past_hides_the_rest():
    assert [each.rule for each in found('{"xyzzy": 1, "a": }')] == ["syntax"]


def test_all_that_is_certain_is_mended_at_once():
    text = (
        "\ufeff{ // x\n'zero_optimization': {stage: '2', \"aio\": {\"block_size\": 1,}\n'overlap_comm': True,"
    )
    text += "}}"
    fixed = fix(text, NOWHERE)
    assert json.loads(fixed.text) == {
        **OWN,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "aio": {"block_size": 1},
    }
    assert found(fixed.text) == ()


# --- the error of a run ------------------------------------------------------------------------------------


def error_of(text, around=NOWHERE, **more):
    names = {"json_name": "ds.json", "run_name": "dstool.yaml", "places": True, **more}
    return refusal(found(text, around), **names)


def test_a_run_is_refused_with_one_error_that_names_all():
    error = error_of(
        text_of(4, xyzzy=1, train_micro_batch_size_per_gpu=4), run(per_device_train_batch_size=2)
    )
    assert error.message == (
        "ds.json:7:14: zero_optimization.stage is 4, it must be 0, 1, 2 or 3; "
        "ds.json:9:3: xyzzy is no DeepSpeed key; ds.json and dstool.yaml disagree: "
        "train_micro_batch_size_per_gpu is 4 in the JSON and "
        "train.per_device_train_batch_size 2 in the run file"
    )
    assert error.hint == "dstool check ds.json shows each with its place and mend"
    alone = error_of(text_of(train_micro_batch_size_per_gpu=4), run(per_device_train_batch_size=2))
    assert alone.hint == 'in ds.json set to "auto": train_micro_batch_size_per_gpu'


def test_warnings_and_what_a_run_sets_right_by_itself_stop_no_run():
    assert error_of("\ufeff" + text_of(3, {"aio": {}}, scheduler=warm("WarmupDecayLR"))) is None
    assert error_of(text_of(gradient_clipping=...)) is None
    assert error_of(text_of(scheduler={"type": "OneCycle", "params": {}})) is not None


# --- whatever comes ----------------------------------------------------------------------------------------

TABLE = sorted(keys.keys())
VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["auto", "cpu", "nvme", "true", "3", "AdamW", "WarmupLR", "", "\ud800", "é\n"]),
)
NAME = st.one_of(
    st.sampled_from([part for path in TABLE for part in path.split(".")]),
    st.sampled_from(["overlap_com", "_comment", "", "a.b", "learning_rate", "0"]),
)
TREE = st.recursive(
    VALUE,
    lambda child: st.one_of(st.lists(child, max_size=3), st.dictionaries(NAME, child, max_size=5)),
    max_leaves=12,
)


@st.composite
def configs(draw):
    """An object with known keys at their places and anything as their values."""
    config = {}
    for path in draw(st.lists(st.sampled_from(TABLE), max_size=8)):
        *above, last = path.split(".")
        node = config
        for name in above:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                break
        else:
            node[last] = draw(TREE)
    for name in draw(st.lists(st.sampled_from(sorted(config)), max_size=2)) if config else ():
        config[f"{name}s"] = config.pop(name, None)
    return config


PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"stage"',
    '"a"',
    "'b'",
    "c",
    "1",
    "-",
    "1e9",
    "1e999",
    "true",
    "True",
]
PIECES += [
    "NaN",
    "null",
    " ",
    "\n",
    "\t",
    "// x\n",
    "# y",
    "/* z */",
    "/*",
    '"',
    "'",
    "\\",
    "\ufeff",
    "é",
    "\x00",
]


def sound(text, around):
    """Nothing raises, the mends come to an end, and json agrees before and after."""
    first = found(text, around)
    lines = len(re.split("\r\n|\r|\n", text))
    assert all(each.line is None or each.line <= lines for each in first)
    once = fix(text, around)
    assert fix(once.text, around).text == once.text
    assert not any(each.edit for each in found(once.text, around))
    syntax = [each for each in first if each.rule in {fault.rule for fault in source.parse(text).faults}]
    if not syntax:
        assert not source.parse(once.text).faults
    return once


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join)))
@example('{"a": {}, "a": {"b": 1,}}')
@example('{"a" 1 "b" 2}')
@settings(max_examples=60)
def test_no_text_makes_a_traceback(text):
    sound(text, NOWHERE)
    try:
        read = json.loads(text.removeprefix("\ufeff"), parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError, RecursionError):
        return
    parsed = source.parse(text)
    faults = {fault.rule for fault in parsed.faults} - {"duplicate-key", "byte-order-mark", "not-a-number"}
    assert faults <= {"top-level", "nested"}
    assert parsed.value == read or "not-a-number" in {fault.rule for fault in parsed.faults}


@given(configs(), st.dictionaries(st.sampled_from(["learning_rate", "bf16", "max_steps", "optim"]), VALUE))
@settings(max_examples=60)
def test_no_config_makes_a_traceback_and_no_mend_touches_the_rest(config, train):
    around = Circumstances(train, 3, {"model_type": "t5gemma"}, Machine(False, False, False))
    text = json.dumps(config, indent=2)
    once = sound(text, around)
    before, after = flat(config), flat(json.loads(once.text))
    told = {each.path for each in once.mended}
    told |= {name for each in once.mended if each.rule == "left-out" for name in OWN if name in each.mend}
    for path in before:
        if path not in after or before[path] != after[path]:
            assert any(path == each or path.startswith(f"{each}.") for each in told)


@given(st.integers(0, len("\n".join(LINES))), st.sampled_from([*PIECES, ""]), st.integers(0, 3))
@settings(max_examples=60)
def test_a_slip_of_the_pen_never_changes_a_value(position, piece, cut):
    """What json still reads, or read before the slip, is what it reads after the mends."""
    whole = "\n".join(LINES)
    text = whole[:position] + piece + whole[position + cut :]
    once = sound(text, NOWHERE)
    try:
        read = json.loads(text)
    except ValueError:
        return
    if isinstance(read, dict) and not found(text):
        assert once.text == text


def test_the_finding_is_plain_data():
    (one,) = found(text_of(xyzzy=1))
    assert json.loads(json.dumps(dataclasses.asdict(one)))["rule"] == "unknown-key"


@pytest.mark.parametrize(("kind", "stage"), [*itertools.product(("json", "inline"), (2, 3))])
def test_a_mapping_of_the_run_file_is_checked_alike(kind, stage):
    config = json.loads(text_of(stage, {"overlap_com": True}))
    parsed = source.of_value(config) if kind == "inline" else source.parse(json.dumps(config))
    assert [each.rule for each in check(parsed, NOWHERE)] == ["unknown-key"]


@pytest.mark.parametrize("version", ["0.18.0", "0.19.6"])
def test_a_deepspeed_that_still_has_one_bit_adam_may_run_it(version):
    text = text_of(optimizer={"type": "OneBitAdam", "params": {"lr": AUTO}})
    assert found(text, on(deepspeed=version)) == ()


@pytest.mark.parametrize(
    "part", [{}, {"train_micro_batch_size_per_gpu": 4}, {"gradient_accumulation_steps": 4}]
)
def test_a_pinned_batch_that_any_ranks_may_share_is_no_finding(part):
    assert found(text_of(train_batch_size=16, **part)) == ()
    assert found(text_of(train_batch_size=16, **part), Circumstances(world_size=2)) == ()


@pytest.mark.parametrize(
    ("optim", "more"),
    [
        ("adamw_torch_fused", {}),
        ("adagrad", {}),
        ("sgd", {"zero_force_ds_cpu_optimizer": False}),
        ("sgd", {"optimizer": {"type": "AdamW", "params": {"lr": AUTO}}}),
    ],
)
def test_an_offloaded_optimizer_that_stays_what_it_is_is_no_contradiction(optim, more):
    text = text_of(2, {"offload_optimizer": CPU}, **more)
    findings = found(text, Circumstances(train={"optim": optim}))
    assert [each for each in findings if each.rule == "contradiction"] == []
