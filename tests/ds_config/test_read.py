"""Reading the JSON strictly, and bringing it together with the run file."""

import copy
import json
from types import SimpleNamespace

import pytest

from dstool.ds_config.build import build
from dstool.ds_config.options import Options
from dstool.ds_config.read import REMOVED_KEYS, TOP_LEVEL_KEYS, Reconciled, fit_batch, read, reconcile
from dstool.errors import ConfigError


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes ds_config.json in the current folder, so that messages show its bare name."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path.relative_to(tmp_path) / "ds_config.json"

    def write(content):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


# --- reading ---


def test_reads_what_build_writes_and_skips_a_byte_order_mark(file):
    config = build(Options())
    assert read(file("\ufeff" + json.dumps(config))) == config  # C34


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n  "zero_optimization": {\n    "contiguous_gradients": true\n    "overlap_comm": true\n  }\n}',
            '4:5: expected a comma before "overlap_comm"',
        ),
        ('{"a": 1,}', "1:8: a comma before } is one too many"),
        ('{"a": [1,\n]}', "1:9: a comma before ] is one too many"),
        ('{\n  "a": 1, // one\n  "b": 2\n}', "2:11: JSON has no comments"),
        ('{\n  "a": 1 # one\n}', "2:10: JSON has no comments"),
        ('/* a */\n{"a": 1}', "1:1: JSON has no comments"),
        ('{"a": 1}\n// end', "2:1: JSON has no comments"),
        ("", " the file is empty"),
        ("\n \n", " the file is empty"),
        ('{"a": NaN}', "1:7: NaN is not a number"),
        ('{"a": "NaN", "b": -Infinity}', "1:19: -Infinity is not a number"),
        ('{"a": 1e999}', "1:7: 1e999 is not a number"),
        ('{"a": 1e999x}', "1:7: 1e999 is not a number"),
        ("[1]", "1:1: the top level must be an object"),
        ("\n  3", "2:3: the top level must be an object"),
        ('{"a": 1', "1:8: the file ends too early"),
        ('{"a": 1,\n', "1:9: the file ends too early"),
        ('{"a": "x', "1:7: the string that starts here is never closed"),
        ('{"a": "x\n}', "1:9: a line break or tab inside a string"),
        ("{'a': 1}", "1:2: strings are written in double quotes"),
        ("{a: 1}", "1:2: expected a key in double quotes, found a"),
        ('{"a": True}', "1:7: True is Python"),
        ('{"a" 1}', "1:6: expected a colon before 1"),
        ('{"a": }', "1:7: expected a value, found }"),
        ('{"a": "C:\\x"}', "1:10: a backslash"),
        ('{"a": 1}}', "1:9: nothing may follow the closing brace, found }"),
        ("[" * 200_000, " nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", " a number in it has too many digits"),
    ],
)
def test_c34_one_line_with_file_line_and_column(file, text, message):
    with pytest.raises(ConfigError) as caught:
        read(file(text))
    assert caught.value.message.startswith(f"ds_config.json:{message}")
    assert "\n" not in caught.value.message


def test_c35_a_key_given_twice_is_named_with_both_lines(file):
    text = '{\n  "zero_optimization": {"stage": 3},\n  "steps": 1,\n  "zero_optimization": {"stage": 2}\n}'
    with pytest.raises(ConfigError) as caught:
        read(file(text))
    assert caught.value.message == 'ds_config.json:4:3: "zero_optimization" is given twice, first on line 2'


def test_c35_only_within_one_object_and_whatever_the_spelling(file):
    same = {"fp16": {"enabled": False}, "bf16": {"enabled": True}, "list": [{"enabled": 1}, {"enabled": 2}]}
    assert read(file(json.dumps(same))) == same
    with pytest.raises(ConfigError, match=r'2:17: "\\u0061" is given twice, first on line 2'):
        read(file('{"x": "a", "y": {"a": 1},\n"z": {"a": "{", "\\u0061": 2}}'))


def test_a_missing_file_names_the_command_that_writes_one(file):
    path = file("{}")
    path.unlink()
    with pytest.raises(ConfigError, match=r"^ds_config\.json: no such file$") as caught:
        read(path)
    assert caught.value.hint == "dstool init-config"


def test_a_folder_and_other_encodings(file, tmp_path):
    with pytest.raises(ConfigError, match="a folder, not a JSON file"):
        read(tmp_path)
    (tmp_path / "my ds").mkdir()
    file("{}").rename(tmp_path / "my ds" / "a.json")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "my ds")
    assert caught.value.hint == f"name the file in it: '{tmp_path}/my ds/a.json'"
    with pytest.raises(ConfigError, match=r"^ds_config\.json: not UTF-8 text \(byte 0\)"):
        read(file('{"a": 1}'.encode("utf-16")))


# --- bringing together ---


def problems(ds, train=None):
    with pytest.raises(ConfigError) as caught:
        reconcile(ds, train or {})
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value.message


def pinned():
    """Every literal that Trainer compares with one of its own arguments."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 5}},
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }


FROM_JSON = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.1,
    "warmup_steps": 5,
    "fp16": False,
    "bf16": True,
}


@pytest.mark.parametrize(
    "options", [Options(), Options(stage=0), Options(stage=3, offload="nvme", nvme_path="/n")]
)
def test_what_build_writes_needs_no_change(options):
    assert reconcile(build(options), {"learning_rate": 1e-3}) == Reconciled(
        build(options), {"learning_rate": 1e-3}, ()
    )


def test_inputs_are_not_changed():
    ds, train = {"zero_optimization": {"stage": 3, "aio": {}}, "optimizer": {"type": "AdamW"}}, {"seed": 1}
    before = copy.deepcopy((ds, train))
    result = reconcile(ds, train)
    result.ds["zero_optimization"]["stage"] = 1
    assert (ds, train) == before


def test_c16_batch_keys_and_clipping_left_out_become_auto():
    result = reconcile({"zero_optimization": {"stage": 2}, "train_batch_size": None}, {})
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [result.ds[key] for key in (*keys, "gradient_clipping")] == ["auto"] * 4
    assert result.notes == (
        f"left out of ds_config.json and taken from the run: {', '.join(keys)}, gradient_clipping",
    )


def test_c29_params_left_out_become_auto_as_far_as_the_class_takes_them():
    ds = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "adagrad"},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}},
    }
    result = reconcile(ds, {})
    assert result.ds["optimizer"]["params"] == {"lr": "auto", "eps": "auto", "weight_decay": "auto"}
    assert result.ds["scheduler"]["params"] == {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    other = {"type": "RMSprop", "params": {"momentum": 0.9}}
    assert reconcile({"optimizer": other}, {}).ds["optimizer"] == other


def test_literals_of_the_json_reach_the_run_with_a_note_each():
    result = reconcile(pinned(), {})
    assert result.train == FROM_JSON
    assert "train.learning_rate is 0.0001, from optimizer.params.lr in ds_config.json" in result.notes
    assert len([note for note in result.notes if note.startswith("train.")]) == len(FROM_JSON)
    assert result.ds["optimizer"]["params"]["betas"] == [0.8, 0.95]


def test_given_on_both_sides_and_equal_is_no_problem():
    assert reconcile(pinned(), FROM_JSON).train == FROM_JSON


@pytest.mark.parametrize("train", [{}, FROM_JSON])
def test_trainer_finds_no_mismatch_afterwards(train, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    result = reconcile(pinned(), train)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **result.train)
    config = HfTrainerDeepSpeedConfig(result.ds)
    config.trainer_config_process(args)
    config.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 100)
    assert config.mismatches == []
    assert "auto" not in json.dumps(config.config)
    fit_batch(config.config, 1, result.train)


def test_c05_all_mismatches_in_one_message():
    ds = {**pinned(), "train_batch_size": "auto"}
    train = {
        "per_device_train_batch_size": 2,
        "max_grad_norm": 1.0,
        "learning_rate": 2e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "warmup_steps": 0.1,
        "bf16": False,
    }
    with pytest.raises(ConfigError) as caught:
        reconcile(ds, train)
    assert caught.value.message == (
        "ds_config.json and dstool.yaml disagree: "
        "train_micro_batch_size_per_gpu is 4 in the JSON and "
        "train.per_device_train_batch_size 2 in the run file; "
        "gradient_clipping is 0.5 in the JSON and train.max_grad_norm 1.0 in the run file; "
        "optimizer.params.lr is 0.0001 in the JSON and train.learning_rate 0.0002 in the run file; "
        "optimizer.params.betas.0 is 0.8 in the JSON and train.adam_beta1 0.9 in the run file; "
        "optimizer.params.betas.1 is 0.95 in the JSON and train.adam_beta2 0.999 in the run file; "
        "scheduler.params.warmup_max_lr is 0.0001 in the JSON and "
        "train.learning_rate 0.0002 in the run file; "
        "scheduler.params.warmup_num_steps is 5 in the JSON and train.warmup_steps 0.1 in the run file; "
        "bf16.enabled is true in the JSON and train.bf16 false in the run file"
    )
    assert caught.value.hint == (
        'in ds_config.json set to "auto": train_micro_batch_size_per_gpu, gradient_clipping, '
        "optimizer.params.lr, optimizer.params.betas, scheduler.params.warmup_max_lr, "
        "scheduler.params.warmup_num_steps, bf16.enabled"
    )


def test_c05_two_rates_in_the_json_itself():
    ds = pinned()
    ds["scheduler"]["params"]["warmup_max_lr"] = 3e-4
    assert (
        "scheduler.params.warmup_max_lr is 0.0003 in the JSON and "
        "optimizer.params.lr, which means the same, 0.0001"
    ) in problems(ds)


def test_problems_and_mismatches_come_together_under_the_names_of_the_files():
    with pytest.raises(ConfigError) as caught:
        reconcile(
            {"elasticity": {}, "gradient_clipping": 2},
            {"max_grad_norm": 1},
            json_name="z.json",
            run_name="r.yaml",
        )
    assert caught.value.message == (
        "z.json: elasticity is gone from DeepSpeed, delete it; "
        "z.json and r.yaml disagree: "
        "gradient_clipping is 2 in the JSON and train.max_grad_norm 1 in the run file"
    )
    assert caught.value.hint == "dstool check shows each with its place and mend"


def test_no_warm_up_is_one_step_for_trainer():
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}
    assert reconcile({"scheduler": scheduler}, {"warmup_steps": 0}).train["warmup_steps"] == 0


def test_c07_a_pinned_total_number_of_steps():
    ds = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}
    assert "total_num_steps is 100 in the JSON and train.max_steps 3" in problems(ds, {"max_steps": 3})
    assert reconcile(ds, {"max_steps": 100}).train == {"max_steps": 100}
    assert any("must equal the steps of the run" in note for note in reconcile(ds, {}).notes)


def test_c08_aio_is_moved_to_the_top():
    result = reconcile({"zero_optimization": {"stage": 3, "aio": {"block_size": 1, "queue_depth": 2}}}, {})
    assert result.ds["aio"] == {"block_size": 1, "queue_depth": 2}
    assert "aio" not in result.ds["zero_optimization"]
    assert any(note.startswith("aio was moved") for note in result.notes)
    both = {"aio": {"block_size": 9}, "zero_optimization": {"aio": {"block_size": 1, "queue_depth": 2}}}
    assert reconcile(both, {}).ds["aio"] == {"block_size": 9, "queue_depth": 2}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("zero_optimisation", "did you mean zero_optimization?"),
        ("gradient_clip", "did you mean gradient_clipping?"),
        ("train_micro_batch_size", "did you mean train_micro_batch_size_per_gpu?"),
        ("xyz", "xyz is no DeepSpeed key"),
        ("stage", "stage belongs inside zero_optimization"),  # C38
        ("offload_param", "offload_param belongs inside zero_optimization"),
        ("stage3_max_live_parameters", "belongs inside zero_optimization"),
        *((key, f"{key} is gone from DeepSpeed") for key in REMOVED_KEYS),
    ],
)
def test_c10_c38_top_level_names(key, words):
    assert words in problems({key: 3, "zero_optimization": {"stage": 2}})


def test_c10_known_names_and_comments_pass():
    blocks = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization", "aio", "bfloat16")
    ds = {key: {} if key in blocks else "auto" for key in TOP_LEVEL_KEYS}
    assert reconcile({**ds, "_comment": "x", "// note": "y"}, {}).ds["_comment"] == "x"


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"])
def test_removed_zero_keys(key):
    assert f"zero_optimization.{key} is gone" in problems({"zero_optimization": {"stage": 3, key: 1}})


def test_the_old_name_bfloat16():
    result = reconcile({"bfloat16": {"enabled": True}}, {})
    assert result.ds["bf16"] == {"enabled": True}
    assert "bfloat16" not in result.ds
    assert result.train == {"bf16": True}


@pytest.mark.parametrize("value", ["true", "false", 1])
def test_c11_booleans_only(value):
    assert "bf16.enabled is" in problems({"bf16": {"enabled": value}})


@pytest.mark.parametrize(
    ("ds", "words"),
    [
        (
            {"train_micro_batch_size_per_gpu": "4"},
            'train_micro_batch_size_per_gpu is "4", a whole number above 0',
        ),
        ({"train_batch_size": 8.0}, "train_batch_size is 8.0, a whole number above 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0, a whole number above 0"),
        ({"gradient_clipping": True}, "gradient_clipping is true, a number"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "5e-5"}}},
            'optimizer.params.lr is "5e-5", a number',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "optimizer.params.betas is [0.9], two",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"betas": ["a", 1]}}}, 'optimizer.params.betas.0 is "a"'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "warmup_num_steps is 0, a whole",
        ),
        ({"zero_optimization": True}, "zero_optimization is true, an object"),
        ({"zero_optimization": {"stage": 3, "offload_param": "cpu"}}, 'offload_param is "cpu", an object'),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params is [], an object"),
        ({"bf16": True}, "bf16 is true, an object"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4, it must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage is "3", it must be'),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is true, it must be"),
    ],
)
def test_values_of_the_wrong_kind(ds, words):
    message = problems(ds)
    assert words in message
    assert message.count(";") == 0, "one mistake is one problem"


def test_c10_no_zero_block_is_stage_0():
    for ds in ({}, {"zero_optimization": None}, {"zero_optimization": {}}):
        result = reconcile(ds, {})
        assert result.ds["zero_optimization"] == {"stage": 0}
        assert any("names no ZeRO stage" in note for note in result.notes)


def test_stage_auto_is_what_accelerate_makes_of_it():
    assert reconcile({"zero_optimization": {"stage": "auto"}}, {}).ds["zero_optimization"]["stage"] == 2


def test_blocks_left_out_stay_out():
    assert {"fp16", "bf16", "optimizer", "scheduler", "aio"}.isdisjoint(reconcile({}, {"bf16": True}).ds)


@pytest.mark.parametrize(
    ("stage", "name", "block", "words"),
    [
        (
            2,
            "offload_param",
            {"device": "cpu"},
            "offload_param.device cpu needs stage 3, the stage is 2",
        ),  # C19
        (0, "offload_optimizer", {"device": "cpu"}, "offload_optimizer.device cpu needs stage 1"),
        (2, "offload_optimizer", {"device": "nvme", "nvme_path": "/n"}, "device nvme needs stage 3"),  # C20
        (3, "offload_optimizer", {"device": "nvme"}, "needs zero_optimization.offload_optimizer.nvme_path"),
        (
            3,
            "offload_param",
            {"device": "nvme", "nvme_path": "auto"},
            "needs zero_optimization.offload_param.nvme",
        ),
    ],
)
def test_c19_c20_offload(stage, name, block, words):
    assert words in problems({"zero_optimization": {"stage": stage, name: block}})


def test_c19_device_none_passes_at_any_stage():
    zero = {"stage": 1, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "cpu"}}
    assert reconcile({"zero_optimization": zero}, {}).ds["zero_optimization"] == zero


@pytest.mark.parametrize("value", [None, "auto"])
def test_stage_3_always_saves_weights(value):
    key = "stage3_gather_16bit_weights_on_model_save"
    result = reconcile({"zero_optimization": {"stage": 3, key: value}}, {})
    assert result.ds["zero_optimization"][key] is True
    assert any(key in note for note in result.notes)


@pytest.mark.parametrize("name", ["16bit", "fp16"])
def test_c37_unless_the_json_says_otherwise_under_either_name(name):
    zero = {"stage": 3, f"stage3_gather_{name}_weights_on_model_save": False}
    assert reconcile({"zero_optimization": zero}, {}).ds["zero_optimization"] == zero


def test_both_precisions():
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert "fp16.enabled and bf16.enabled are both true" in problems(both)


@pytest.mark.parametrize("bf16", [None, {"enabled": "auto"}])
def test_one_precision_in_each_file(bf16):
    message = problems({"fp16": {"enabled": True}, "bf16": bf16}, {"bf16": True})
    assert "fp16.enabled is true in the JSON and train.bf16 true in the run file" in message


def test_full_eval_turns_its_precision_on():
    assert "bf16" not in reconcile({"bf16": {"enabled": True}}, {"bf16_full_eval": True}).train


def test_c25_a_scheduler_block_beside_lr_scheduler_type():
    message = problems(build(Options(scheduler="WarmupDecayLR")), {"lr_scheduler_type": "cosine"})
    assert (
        "the scheduler block (WarmupDecayLR) would silently replace train.lr_scheduler_type cosine" in message
    )
    reconcile(build(Options(scheduler="none")), {"lr_scheduler_type": "cosine"})


def test_c25_an_optimizer_block_beside_another_optim():
    assert "would silently replace train.optim adafactor" in problems(
        build(Options()), {"optim": "adafactor"}
    )
    reconcile(build(Options()), {"optim": "adamw_torch"})
    reconcile(build(Options(optimizer="none")), {"optim": "adafactor"})


# --- the batch triangle ---


def test_c13_shows_the_numbers_the_world_size_and_a_valid_triple():
    ds = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": "auto"}
    with pytest.raises(ConfigError) as caught:
        fit_batch(ds, 2, {"gradient_accumulation_steps": 3})
    assert caught.value.message == (
        "train_batch_size is 12, but train_micro_batch_size_per_gpu 5 * gradient_accumulation_steps 3 * "
        "world size 2 is 30; 12 = 3 * 2 * 2 would do"
    )
    assert caught.value.hint == 'set train_batch_size to "auto" (or to 30) in the DeepSpeed JSON'


@pytest.mark.parametrize("total", [1, 7, 256])
def test_c13_the_triple_is_valid_for_any_world_size(total):
    for world_size in (1, 2, 7, 8):
        ds = {"train_batch_size": total, "train_micro_batch_size_per_gpu": 3}
        with pytest.raises(ConfigError) as caught:
            fit_batch(ds, world_size, {"gradient_accumulation_steps": 5})
        left, _, right = caught.value.message.split("; ")[1].removesuffix(" would do").partition(" = ")
        micro, steps, world = map(int, right.split(" * "))
        assert int(left) == micro * steps * world
        assert world == world_size


def test_c13_agreeing_auto_and_absent_pass():
    agreeing = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    assert fit_batch({"train_batch_size": 48}, 3, agreeing) == agreeing
    for absent in ({"train_batch_size": "auto"}, {}):
        assert fit_batch(absent, 3, {}) == {}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize(
    "given", [{}, {"per_device_train_batch_size": 2}, {"gradient_accumulation_steps": 2}]
)
def test_c13_a_pinned_batch_stays_the_same_on_any_number_of_ranks_that_divides_it(world_size, given):
    fitted = fit_batch({"train_batch_size": 48}, world_size, given)
    micro, steps = fitted["per_device_train_batch_size"], fitted["gradient_accumulation_steps"]
    assert micro * steps * world_size == 48
    assert given.items() <= fitted.items()


def test_c13_a_pinned_batch_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="train_batch_size is 7, which 2 ranks cannot share"):
        fit_batch({"train_batch_size": 7}, 2, {})


def test_a_scheduler_without_params_is_given_empty_ones():
    ds = {"zero_optimization": {"stage": 0}, "scheduler": {"type": "ConstantLR"}}
    assert reconcile(ds, {}).ds["scheduler"] == {"type": "ConstantLR", "params": {}}


def test_the_json_of_another_name_is_written_under_that(file):
    with pytest.raises(ConfigError) as caught:
        read(file("{}").with_name("a b.json"))
    assert caught.value.hint == "dstool init-config -o 'a b.json'"
