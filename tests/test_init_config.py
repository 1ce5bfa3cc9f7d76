"""The two files that `init-config` writes."""

import itertools
import os
from pathlib import Path

import pytest

from dstool import init_config as module
from dstool import preflight
from dstool.config import RUN_FILE, load
from dstool.ds_config import read
from dstool.ds_config.build import Options, build
from dstool.errors import ConfigError
from dstool.init_config import init_config

STAGES, OFFLOADS = (0, 1, 2, 3), ("none", "cpu", "nvme")
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "none")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "none")
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


def test_force_overwrites_both():
    for name in ("ds_config.json", RUN_FILE):
        Path(name).write_text("old")
    result = init_config(Options(), force=True)
    assert len(result.written) == 2
    assert preflight.settle(load().config)


def test_an_existing_run_file_is_kept():
    Path(RUN_FILE).write_text("# mine\n")
    result = init_config(Options())
    assert (result.written, result.kept) == (
        (Path.cwd() / "ds_config.json",),
        (Path.cwd() / RUN_FILE,),
    )
    assert Path(RUN_FILE).read_text() == "# mine\n"


@pytest.mark.parametrize("names", [{"model": "m"}, {"data": "d.csv"}], ids=str)
def test_names_for_a_run_file_that_exists_are_refused(names):
    Path(RUN_FILE).write_text("# mine\n")
    assert "--model and --data are for a new one" in refusal(Options(), **names).message
    assert not Path("ds_config.json").exists()


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
    [{"stage": 4}, {"offload": "disk"}, {"precision": "int8"}, {"optimizer": "Lion"}, {"scheduler": "x"}],
    ids=str,
)
def test_a_value_that_is_no_choice_is_refused_and_nothing_written(changes):
    (name, value), *_ = changes.items()
    assert f"--{name} {value}: not one of" in refusal(Options(**changes)).message
    assert contents() == {}
