"""The two files that `init-config` writes."""

import itertools
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstool import cli, machine, preflight
from dstool import init_config as module
from dstool.config import RUN_FILE, load
from dstool.ds_config import read
from dstool.ds_config.build import build
from dstool.ds_config.check import check
from dstool.ds_config.looks import Circumstances, Machine
from dstool.ds_config.options import CHOICES, Options
from dstool.ds_config.presets import PRESETS
from dstool.ds_config.source import parse
from dstool.errors import ConfigError, NoDevice
from dstool.init_config import _checked, generate, init_config, options_of, refuse_files
from dstool.new_run_file import train

STAGES, OFFLOADS = (0, 1, 2, 3), ("none", "cpu", "nvme")
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "none")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "none")
AT_3 = "dstool init-config --stage 3"
TASKS = ("text-classification", "causal-lm")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "LOCAL_NVME", tmp_path / "no_nvme_here")


def contents():
    return {str(path): path.read_text() for path in sorted(Path().rglob("*")) if path.is_file()}


def refusal(*arguments, **options) -> ConfigError:
    """The error that it ends in, everything left as it was."""
    before = contents()
    with pytest.raises(ConfigError) as caught:
        init_config(*arguments, **options)
    assert caught.value.hint
    assert contents() == before
    return caught.value


# what is written


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "names", [{}, {"model": "m", "data": "d.csv"}, {"model": "m"}, {"data": "d.csv"}], ids=str
)
def test_both_files_are_written_and_fit_each_other(task, names):
    result = init_config(Options(), task=task, **names)
    assert result.written == (Path.cwd() / "ds_config.json", Path.cwd() / RUN_FILE)
    assert result.kept == ()
    assert read.read(Path("ds_config.json")) == build(Options())
    config = load().config
    assert config.deepspeed == "ds_config.json"
    assert config.model.task == task
    assert config.model.name == names.get("model")
    assert (config.model.from_scratch is None) == ("model" in names)
    assert config.data.train == names.get("data", "sample:reviews_en")
    assert preflight.settle(config).ds["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_without_any_names_passes_the_check_before_a_run(task):
    init_config(Options(), task=task)
    assert preflight.check(load().config)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("names", [{}, {"model": "m" * 60, "data": "a: b"}], ids=["sample", "names"])
@pytest.mark.parametrize("scheduler", ["WarmupLR", "none"])
def test_every_line_of_the_run_file_has_a_comment(task, names, scheduler):
    init_config(Options(scheduler=scheduler), task=task, **names)
    lines = Path(RUN_FILE).read_text().splitlines()
    bare = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len(bare) > 10
    assert [line for line in bare if not line.partition(" # ")[2].strip()] == []


def test_the_json_may_lie_elsewhere():
    init_config(Options(), Path("configs/deep/ds.json"))
    assert load().config.deepspeed == "configs/deep/ds.json"
    assert preflight.settle(load().config)


def test_the_run_file_names_the_json_from_where_it_is_itself():
    init_config(Options(), Path("ds.json"), run_file=Path("runs/a/dstool.yaml"))
    assert "deepspeed: ../../ds.json" in Path("runs/a/dstool.yaml").read_text()
    assert preflight.settle(load("runs/a/dstool.yaml").config)


@pytest.mark.parametrize(
    "name",
    [
        *("a: b", "리뷰 모델/v1", "*starred", "&anchor", "#comment", "x # y", "- dash", "no", "null", "1e5"),
        *("{a}", "[1]", "'single'", '"double"', "back\\slash", "%percent", "@at", "`tick`", "two  blanks"),
        *("trailing ", "new\nline", "tab\there", "2024-01-01", "=", "x" * 300),
    ],
)
def test_names_survive_whatever_they_mean_in_yaml(name):
    init_config(Options(), Path(f"{name[:20]}.json"), model=name, data=name)
    config = load().config
    assert (config.model.name, config.data.train) == (name, name)
    assert Path(config.deepspeed) == Path(f"{name[:20]}.json")
    assert preflight.settle(config)


# what is there already


def test_an_existing_json_is_refused_and_everything_stays():
    Path("ds_config.json").write_text("{}")
    assert refusal(Options()).message == "ds_config.json exists"


MINE = "# mine\ntrain: {output_dir: mine, warmup_steps: 10}\n"


def test_force_writes_over_the_json_and_leaves_the_run_file_alone():
    Path("ds_config.json").write_text("old")
    Path(RUN_FILE).write_text(MINE)
    result = init_config(Options(), force=True)
    assert (result.written, result.kept) == ((Path.cwd() / "ds_config.json",), (Path.cwd() / RUN_FILE,))
    assert Path(RUN_FILE).read_text() == MINE
    assert read.read(Path("ds_config.json")) == build(Options())


@pytest.mark.parametrize(
    ("names", "old"), [({"model": "m"}, MINE), ({"data": "d.csv"}, MINE), ({"task": "causal-lm"}, MINE)]
)
def test_force_with_names_writes_a_new_run_file(names, old):
    Path(RUN_FILE).write_text(old)
    assert len(init_config(Options(), force=True, **names).written) == 2
    assert preflight.settle(load().config)


@pytest.mark.parametrize("empty", ["", "\n", "# nothing yet\n\n"])
def test_a_run_file_that_holds_nothing_is_written_over_by_force_alone(empty):
    Path(RUN_FILE).write_text(empty)
    assert "is empty" in refusal(Options()).message
    assert len(init_config(Options(), force=True).written) == 2


def test_an_existing_run_file_is_kept():
    Path(RUN_FILE).write_text(MINE)
    result = init_config(Options())
    assert (result.written, result.kept) == (
        (Path.cwd() / "ds_config.json",),
        (Path.cwd() / RUN_FILE,),
    )
    assert Path(RUN_FILE).read_text() == MINE


def test_a_run_file_that_stays_and_names_another_json_is_told_of():
    Path(RUN_FILE).write_text(f"{MINE}deepspeed: other.json\n")
    assert init_config(Options(), Path("ds3.json")).named == Path("other.json")
    assert init_config(Options(), Path("other.json")).named is None


@pytest.mark.parametrize("names", [{"model": "m"}, {"data": "d.csv"}, {"task": "causal-lm"}], ids=str)
def test_names_for_a_run_file_that_exists_are_refused(names):
    Path(RUN_FILE).write_text(MINE)
    assert "--model, --data and --task are for a new one" in refusal(Options(), **names).message
    assert not Path("ds_config.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(scheduler="ConstantLR"), "write lr_scheduler_type: constant, write warmup_steps: 0"),
        (Options(optimizer="none", lr=2e-5), "write learning_rate: 2e-5"),
        (Options(warmup=0.2), "write warmup_steps: 0.2"),
        (Options(activation_checkpointing=True), "write gradient_checkpointing: true"),
    ],
    ids=str,
)
def test_a_run_file_that_stays_must_say_what_the_json_cannot(options, said):
    Path(RUN_FILE).write_text(MINE)
    assert said in refusal(options).message


def test_a_run_file_that_says_it_already_stays():
    Path(RUN_FILE).write_text("train: {lr_scheduler_type: cosine, warmup_steps: 5}\n")
    assert init_config(Options(scheduler="CosineAnnealingLR", warmup=5)).kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(lr=2e-5), "write learning_rate: 2e-5"),
        (Options(micro_batch=4), "write per_device_train_batch_size: 4"),
        (Options(warmup=20), "write warmup_steps: 20"),
        (Options(clip=0.5), "write max_grad_norm: 0.5"),
        (Options(precision="bf16"), "write fp16: false"),
        (Options(), "delete lr_scheduler_type"),
    ],
    ids=str,
)
def test_a_run_file_that_contradicts_an_option_is_changed_by_force_alone(options, said):
    Path(RUN_FILE).write_text(
        "# mine\ntrain:\n  learning_rate: 1e-3 # fast\n  per_device_train_batch_size: 8\n  fp16: true\n"
        "  warmup_steps: 5\n  max_grad_norm: 1.0\n  lr_scheduler_type: linear\n# the end\n"
    )
    before = Path(RUN_FILE).read_text()
    error = refusal(options)
    assert said in error.message
    assert error.hint == "--force changes that in it, and leaves the rest of it"
    assert Path(RUN_FILE).read_text() == before
    result = init_config(options, force=True)
    assert result.written[1] == Path.cwd() / RUN_FILE
    lines = Path(RUN_FILE).read_text().splitlines()
    verb, _, line = said.partition(" ")
    assert sum(line.split(":")[0] in each for each in lines) == (verb == "write")
    assert verb == "delete" or any(each.startswith(f"  {line}") for each in lines)
    assert (lines[0], lines[-1]) == ("# mine", "# the end")
    assert preflight.settle(load(words=["deepspeed=ds_config.json"]).config)
    assert init_config(options, force=True).kept  # agrees by now


def test_what_the_run_file_lacks_is_put_into_its_train_block():
    Path(RUN_FILE).write_text("train:\n  output_dir: mine\ndata:\n  text_column: text\n")
    init_config(Options(activation_checkpointing=True), force=True)
    assert Path(RUN_FILE).read_text() == (
        "train:\n  output_dir: mine\n  gradient_checkpointing: true\ndata:\n  text_column: text\n"
    )


def test_a_run_file_that_cannot_be_changed_stays_with_the_json_unwritten():
    Path(RUN_FILE).write_text("train:\n  seed: &a 1\n  warmup_steps: *a\n")
    error = refusal(Options(warmup=7), force=True)
    assert error.hint == "under train: in it, write warmup_steps: 7, and give the command again"
    assert not Path("ds_config.json").exists()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("deepspeed: ds_config.json", None),
        ("deepspeed: ds2.json", Path("ds2.json")),
        ("deepspeed: {zero_optimization: {stage: 1}}", "a mapping of its own"),
        ("deepspeed: null", "no JSON"),
        ("", "no JSON"),
    ],
)
def test_a_run_file_that_does_not_name_the_json_is_told_of(said, named):
    Path(RUN_FILE).write_text(f"{MINE}{said}\n")
    assert init_config(Options()).named == named
    done = CliRunner().invoke(cli.app, ["init-config", "--force"])
    assert (" deepspeed=ds_config.json" in done.output) == (named is not None)


@pytest.mark.parametrize("word", ["gradient_clipping=Infinity", "optimizer.params.lr=NaN", "x=[1e999]"])
def test_a_set_number_that_is_not_finite_is_refused(word):
    with pytest.raises(ConfigError, match="finite"):
        options_of(None, [word], {})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_c_a_model_without_hidden_size_gets_numbers_for_the_sizes(stage):
    Path("m").mkdir()
    Path("m/config.json").write_text('{"model_type": "efficientnet"}')
    init_config(Options(stage=stage), model="m")
    zero = read.read(Path("ds_config.json"))["zero_optimization"]
    sizes = [zero[name] for name in zero if name.endswith(("bucket_size", "threshold"))]
    assert sizes
    assert "auto" not in sizes
    assert module.json_alone(Options(stage=stage), "m") == Path("ds_config.json").read_text()


@pytest.mark.parametrize("there", [True, False])
def test_the_json_is_not_written_over_the_run_file(there):
    if there:
        Path(RUN_FILE).write_text("# mine\n")
    for name in (RUN_FILE, f"./{RUN_FILE}"):
        assert "is the run file" in refusal(Options(), Path(name), force=True).message


@pytest.mark.parametrize("output", ["folder", "file/ds.json"])
def test_an_output_that_cannot_be_a_file_is_refused(output):
    Path("folder").mkdir()
    Path("file").touch()
    assert "cannot be written" in refusal(Options(), Path(output)).message


# the NVMe


def test_the_nvme_of_the_machine_is_taken_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCAL_NVME", tmp_path / "nvme")
    Path("nvme").mkdir()
    assert init_config(Options(3, "nvme")).nvme_path == tmp_path / "nvme"
    offload = read.read(Path("ds_config.json"))["zero_optimization"]["offload_param"]
    assert offload["nvme_path"] == str(tmp_path / "nvme")


def test_without_an_nvme_a_folder_beside_the_run_file_is_taken(tmp_path):
    result = init_config(Options(3, "nvme"), run_file=Path("runs/dstool.yaml"))
    assert result.nvme_path == tmp_path / "runs/nvme_offload"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_nvme_that_may_not_be_written_to_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCAL_NVME", tmp_path / "nvme")
    Path("nvme").mkdir(mode=0o500)
    assert init_config(Options(3, "nvme")).nvme_path == tmp_path / "nvme_offload"


def test_a_folder_of_the_nvme_that_cannot_be_used_is_told_of_once(tmp_path):
    (tmp_path / "file").write_text("")
    error = refusal(chosen("zero3-nvme", nvme_path=str(tmp_path / "file")))
    assert error.message == f"{tmp_path / 'file'} is no folder"
    assert error.hint.startswith("--nvme-path FOLDER")


def test_an_nvme_folder_that_is_not_there_is_said_to_be_made_by_the_run(tmp_path, caplog):
    caplog.set_level("INFO", "dstool")
    init_config(Options(3, "nvme", str(tmp_path / "a disk/b")))
    said = f"not there yet: the run makes it, or mkdir -p '{tmp_path}/a disk/b'"
    assert said in caplog.text
    (tmp_path / "a disk/b").mkdir(parents=True)
    caplog.clear()
    init_config(Options(3, "nvme", str(tmp_path / "a disk/b")), force=True)
    assert "not there yet" not in caplog.text


def test_the_nvme_path_that_is_given_is_taken():
    assert init_config(Options(3, "nvme", "/fast/disk")).nvme_path == Path("/fast/disk")


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_no_path_is_looked_for_without_offload_to_nvme(offload):
    assert init_config(Options(3, offload)).nvme_path is None


# every combination


def accepted(stage, offload):
    return {"none": True, "cpu": stage >= 1, "nvme": stage == 3}[offload]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_offload_and_precision_are_written_and_read_back_or_refused(stage, offload, precision):
    options = Options(stage, offload, None, precision)
    if not accepted(stage, offload):
        assert f"--offload {offload}" in refusal(options).message
        assert contents() == {}
        return
    init_config(options)
    settled = preflight.settle(load().config)
    assert settled.ds["zero_optimization"]["stage"] == stage
    assert [note for note in settled.notes if "left out" in note] == []


@pytest.mark.parametrize(("optimizer", "scheduler"), [*itertools.product(OPTIMIZERS, SCHEDULERS)])
@pytest.mark.parametrize("model", [None, "m"])
def test_every_optimizer_goes_with_every_scheduler(optimizer, scheduler, model):
    init_config(Options(3, "cpu", optimizer=optimizer, scheduler=scheduler), model=model)
    settled = preflight.settle(load().config)
    assert ("optimizer" in settled.ds, "scheduler" in settled.ds) == (
        optimizer != "none",
        scheduler != "none",
    )


@pytest.mark.parametrize(
    "changes",
    [{"stage": 4}, {"offload": "disk"}, {"precision": "int8"}, {"optimizer": "Lyon"}, {"scheduler": "x"}],
    ids=str,
)
def test_a_value_that_is_no_choice_is_refused_and_nothing_written(changes):
    (name, value), *_ = changes.items()
    assert f"--{name} {value}: not one of" in refusal(Options(**changes)).message
    assert contents() == {}


# what is asked for


def settled(options: Options, **names):
    init_config(options, **names)
    return preflight.settle(load().config)


def test_a_number_that_is_given_stands_in_the_json_and_nowhere_else():
    options = Options(lr=2e-5, warmup=20, micro_batch=4, global_batch=64, clip=0.5)
    train = settled(options).train
    assert (train["learning_rate"], train["warmup_steps"]) == (2e-5, 20)
    assert (train["per_device_train_batch_size"], train["max_grad_norm"]) == (4, 0.5)
    lines = [line.strip() for line in Path(RUN_FILE).read_text().splitlines()]
    assert not [line for line in lines if line.startswith(("learning_rate", "warmup_steps", "per_device"))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(scheduler="ConstantLR"), {"lr_scheduler_type": "constant", "warmup_steps": 0}),
        (
            Options(scheduler="ConstantLR", warmup=10),
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
        ),
        (
            Options(scheduler="CosineAnnealingLR", warmup=0.1),
            {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
        ),
        (Options(optimizer="none", lr=1e-4), {"learning_rate": 1e-4}),
        (Options(warmup=0.3), {"warmup_steps": 0.3}),
        (Options(activation_checkpointing=True), {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_what_the_json_cannot_say_stands_in_the_run_file(options, expected, caplog):
    caplog.set_level("INFO", "dstool")
    train = settled(options).train
    assert expected.items() <= train.items()
    for name in expected:
        assert f"dstool.yaml says train.{name}: " in caplog.text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_global_batch_is_the_same_on_any_number_of_ranks(ranks):
    both = settled(Options(global_batch=64, micro_batch=4))
    fitted = read.fit_batch(both.ds, ranks, both.train)
    assert fitted["gradient_accumulation_steps"] * 4 * ranks == 64


def test_a_global_batch_with_accumulation_decides_the_rows_of_a_step():
    both = settled(Options(global_batch=64, accumulation=8))
    assert read.fit_batch(both.ds, 2, both.train)["per_device_train_batch_size"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gradient_cliping=1"], "did you mean gradient_clipping?"),
        (["zero_optimization.stage=5"], "--stage says that zero_optimization.stage is 2"),
        (['zero_optimization={"stage": 3}'], "--stage says that zero_optimization.stage is 2"),
        (["zero_optimization.overlap_com=true"], "did you mean overlap_comm?"),
        (["fp16.enabled=true", "bf16.enabled=true"], "both true"),
        (["train_micro_batch_size_per_gpu=x"], "a whole number above 0"),
        (["amp.enabled=true"], "amp is gone from DeepSpeed"),
        (["gradient_clipping"], "--set gradient_clipping: not KEY.PATH=VALUE"),
        (["=1"], "not KEY.PATH=VALUE"),
        (["zero_optimization..stage=1"], "not KEY.PATH=VALUE"),
    ],
    ids=str,
)
def test_set_is_checked_like_any_file(words, said):
    with pytest.raises(ConfigError) as caught:
        init_config(chosen(settings=words))
    assert said in caught.value.message
    assert caught.value.hint
    assert contents() == {}


@pytest.mark.parametrize(
    ("given", "word", "hint"),
    [
        ({"clip": 1.0}, "gradient_clipping=0.5", "--clip 0.5"),
        ({"micro_batch": 2}, "train_micro_batch_size_per_gpu=4", "--micro-batch 4"),
        ({"lr": 1e-3}, 'optimizer={"type": "AdamW"}', "--lr 0.001"),
        (
            {"stage": 3, "offload": "cpu"},
            "zero_optimization.offload_param.device=none",
            "--offload-param none",
        ),
    ],
    ids=str,
)
def test_what_an_option_gives_cannot_be_set_to_something_else(given, word, hint):
    with pytest.raises(ConfigError, match=r"--set .*: --\S+ says that ") as caught:
        generate(chosen(settings=[word], **given))
    assert caught.value.hint == f"dstool init-config {hint}"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "zero_optimization.stage=2"),
        ({"clip": 0.5}, "gradient_clipping=0.5"),
        ({}, "optimizer.params.weight_decay=0.1"),
        ({"optimizer": "none"}, 'optimizer={"type": "AdamW", "params": {"lr": "auto"}}'),
    ],
    ids=str,
)
def test_what_says_the_same_or_what_no_option_says_may_be_set(given, word):
    assert generate(chosen(settings=[word], **given))


def test_a_global_batch_that_the_rows_of_a_step_do_not_divide_has_a_command_that_works():
    assert refusal(Options(global_batch=7)).hint == "dstool init-config --global-batch 7 --micro-batch 1"
    assert init_config(Options(global_batch=7, micro_batch=1)).written


def test_one_key_cannot_be_set_twice():
    with pytest.raises(ConfigError, match="--set gradient_clipping is given twice: 1 and 2") as caught:
        chosen(settings=["gradient_clipping=1", "gradient_clipping=2"])
    assert caught.value.hint == "leave one of the two out: --set gradient_clipping=2"


def test_set_may_change_what_an_option_only_decides():
    options = chosen(stage=2, precision="fp16", settings=["fp16.loss_scale=128", "gradient_clipping=1"])
    assert dict(options.settings) == {"fp16.loss_scale": 128, "gradient_clipping": 1}


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("zero_optimization.stage=3", "dstool init-config --stage 3"),
        ("zero_optimization.stage=7", "dstool init-config --stage 2"),
        ("zero_optimization=null", "dstool init-config --stage 2"),
        ('zero_optimization={"stage": 1}', "dstool init-config --stage 1"),
        ("optimizer=null", "dstool init-config --optimizer none"),
        ("optimizer.type=x", "dstool init-config --optimizer AdamW"),
        ("optimizer.type=SGD", "dstool init-config --optimizer SGD"),
        ("scheduler.type=OneCycle", "dstool init-config --scheduler OneCycle"),
        ("fp16=null", "dstool init-config --precision auto"),
        ("zero_optimization.offload_optimizer.device=nvme", f"{AT_3} --offload-optimizer nvme"),
        ("zero_optimization.offload_param.device=cpu", f"{AT_3} --offload-param cpu"),
        ("optimizer.params.lr=1e-4", "dstool init-config --lr 0.0001"),
        ("optimizer.params=3", "dstool init-config --lr 2e-5"),
        ("gradient_clipping=x", "dstool init-config --clip 1.0"),
        ("train_micro_batch_size_per_gpu=4", "dstool init-config --micro-batch 4"),
        ("gradient_accumulation_steps=1.5", "dstool init-config --accumulation 8"),
        ("scheduler.params.warmup_num_steps=10", "dstool init-config --warmup 10"),
        ("train_batch_size=7", "dstool init-config --global-batch 7 --micro-batch 1"),
        ("a=b", "dstool explain"),
        ("gradient_cliping=1", "dstool explain gradient_clipping"),
        ("zero_optimization.overlap_comm=5", "dstool explain zero_optimization.overlap_comm"),
    ],
    ids=str,
)
def test_what_cannot_be_set_has_a_command_for_it(word, hint):
    with pytest.raises(ConfigError) as caught:
        init_config(chosen(settings=[word]))
    assert caught.value.hint == hint
    assert contents() == {}


@pytest.mark.parametrize("scheduler", ["WarmupLR", "WarmupCosineLR", "none"])
@pytest.mark.parametrize(
    "before", [["ConstantLR"], ["OneCycle"], ["LRRangeTest"], ["OneCycle", "ConstantLR"]]
)
def test_the_warm_up_comes_back_with_a_scheduler_that_has_one(before, scheduler, caplog):
    for name in before:
        init_config(Options(scheduler=name), force=True)
        assert not load(RUN_FILE).config.train.arguments().get("warmup_steps")
    init_config(Options(scheduler=scheduler), force=True)
    train = load(RUN_FILE).config.train.arguments()
    constant = train.get("lr_scheduler_type") == "constant"  # the run file's own, as the JSON has none
    assert (train.get("warmup_steps") or 0) == (0 if constant else 0.1)
    assert "LR 0" not in caplog.text
    assert "rate of 0" not in caplog.text


@pytest.mark.parametrize("warmup", ["", "  warmup_steps: 7\n"])
def test_a_run_file_of_its_own_keeps_its_warm_up_and_the_lack_of_one(warmup):
    Path(RUN_FILE).write_text(f"train:\n  output_dir: mine\n{warmup}deepspeed: ds_config.json\n")
    for _ in range(2):
        init_config(Options(), force=True)
    assert load(RUN_FILE).config.train.arguments().get("warmup_steps") == (7 if warmup else None)


def chosen(preset=None, settings=(), **given) -> Options:
    return options_of(preset, settings, given)


def test_set_takes_values_as_json_has_them():
    words = ["comms_logger.enabled=true", "zero_optimization.reduce_bucket_size=5", "wandb.project=내 것"]
    init_config(chosen(settings=words))
    ds = read.read(Path("ds_config.json"))
    assert ds["comms_logger"] == {"enabled": True}
    assert ds["zero_optimization"]["reduce_bucket_size"] == 5
    assert ds["wandb"] == {"project": "내 것"}


def test_c28_c32_no_combination_that_is_written_has_a_finding(monkeypatch):
    """On a machine that has everything, whatever is not refused is clean."""
    fit = Machine(gpu=True, compiler=True, libaio=True)
    monkeypatch.setattr(machine, "look", lambda ds: fit)
    optimizers, schedulers = CHOICES["optimizer"], CHOICES["scheduler"]
    seen = set()
    for stage, device, optimizer, scheduler in itertools.product(STAGES, OFFLOADS, optimizers, schedulers):
        path = "/nvme" if device == "nvme" else None
        options = Options(stage, device, path, "auto", optimizer, scheduler, offload_param=None)
        try:
            text = generate(options)
            _checked(text, Circumstances(train(options)), Path(RUN_FILE), options)
        except ConfigError:
            continue
        found = check(parse(text), Circumstances(train(options), machine=fit))
        assert found == (), (options, found)
        seen.add((stage, device, optimizer, scheduler))
    assert len(seen) > 300
    assert {optimizer for _, _, optimizer, _ in seen} == set(optimizers) - {"OneBitAdam"}
    assert {scheduler for *_, scheduler in seen} == set(schedulers)


def test_c32_what_this_machine_cannot_run_is_refused():
    for options in (Options(optimizer="Lion"), Options(optimizer="Lamb", precision="fp16")):
        if not machine.has_gpu():
            with pytest.raises(NoDevice, match="needs a GPU"):
                init_config(options)
            assert contents() == {}
    assert "0.19.6 is the last that has it" in refusal(Options(optimizer="OneBitAdam")).message


# presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_written_and_read_back(name, tmp_path):
    init_config(chosen(name, nvme_path=str(tmp_path) if name == "zero3-nvme" else None))
    assert preflight.settle(load().config).ds["zero_optimization"]["stage"] == PRESETS[name].options.stage


def test_options_go_over_a_preset():
    options = chosen("zero3-nvme", offload="cpu", stage=3, lr=1e-5)
    assert (options.stage, options.offload, options.nvme_path, options.lr) == (3, "cpu", None, 1e-5)
    assert chosen("zero3-nvme", nvme_path="/x").nvme_path == "/x"


def test_a_preset_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--preset zero4: not one of ddp, ") as caught:
        chosen("zero4")
    assert caught.value.hint.startswith("dstool init-config --preset zero")


def test_printing_the_json_takes_no_option_about_files():
    with pytest.raises(ConfigError, match="--output - prints the JSON alone, and --model"):
        refuse_files({"model": "m"})
    refuse_files({"model": "m"}, auto=True)
