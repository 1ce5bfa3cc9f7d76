"""The command line, as it is typed: exact output, in an isolated folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dstool import __version__
from dstool.cli import _checkpoint_and_words, _show_trained, app

COMMANDS = typer.main.get_command(app).commands


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def environment(**more):
    """Nothing of the user's own, and a terminal of fixed width without colours."""
    fixed = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "HOME": str(Path.cwd()), "LC_ALL": "C.UTF-8"}
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return {**kept, **fixed, **more}


def dstool(*arguments, script=None, **more):
    start = ["-c", script] if script else ["-m", "dstool"]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def succeeds(*arguments, **more):
    done = dstool(*arguments, **more)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def files():
    return sorted(str(path) for path in Path().rglob("*"))


RUN_FILE = "model:\n  name: model\ndata:\n  train: reviews.csv\ndeepspeed: ds_config.json\n"


def a_run(**files):
    """A folder with all that `dstool train` needs; `files` replaces some, and None takes one away."""
    fine = {
        "dstool.yaml": RUN_FILE,
        "ds_config.json": '{"zero_optimization": {"stage": 2}}',
        "reviews.csv": "text,label\ngood,1\n",
        "model/config.json": "{}",
    }
    for name, text in {**fine, **files}.items():
        if text is not None:
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)


# failures


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "said"),
    [
        ({"dstool.yaml": None}, ["train"], 2, "no dstool.yaml in"),
        ({}, ["train", "--config", "gone.yaml"], 2, "gone.yaml: no such run file"),
        ({"dstool.yaml": RUN_FILE + "trian: {}\n"}, ["train"], 2, "trian: unknown key, did you mean train?"),
        ({"dstool.yaml": "model: {\n"}, ["train"], 2, "dstool.yaml:2:1: expected the node content"),
        ({"dstool.yaml": "train: {}\ntrain: {}\n"}, ["train"], 2, "train: given twice, in lines 1 and 2"),
        ({"ds_config.json": "{,}"}, ["train"], 2, "ds_config.json:1:2: "),
        ({}, ["train", "train.max_step=1"], 2, "command line: train.max_step: unknown key, did you mean"),
        ({}, ["train", "nonsense"], 2, "nonsense: not KEY=VALUE"),
        ({"reviews.csv": None}, ["train"], 3, "no file or folder matches 'reviews.csv'"),
        ({"reviews.csv": "text,label\n"}, ["train"], 3, "reviews.csv has no rows"),
        ({}, ["train", "data.label_column=stars"], 3, "reviews.csv has no column 'stars'"),
        ({}, ["train", "model.name=./gone"], 3, "gone: no such folder"),
        ({}, ["merge"], 2, "merge needs a place for the model"),
        ({}, ["infer"], 2, "there is no text"),
        ({"dstool.yaml": None}, ["infer", "--text", "x"], 2, "no dstool.yaml in"),
        ({}, ["init-config"], 2, "ds_config.json exists"),
        ({}, ["init-config", "-o", "model"], 2, "model exists"),
        ({}, ["init-config", "-o", "reviews.csv/x.json"], 2, "reviews.csv is no folder"),
        ({}, ["init-config", "--offload", "nvme"], 2, "--offload nvme needs --stage 3"),
        ({}, ["consolidate", "--max-shard-size", "x", "-c", "gone"], 2, "gone: no such run file"),
    ],
)
def test_a_failure_is_two_lines_on_stderr_and_an_exit_code(changes, arguments, code, said):
    a_run(**changes)
    before = files()
    done = dstool(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("try: ")
    assert files() == before


def test_several_problems_of_a_run_file_are_one_line_each():
    a_run(**{"dstool.yaml": "trian: {}\ninfer:\n  sed: 1\n"})
    done = dstool("train")
    assert done.returncode == 2
    *problems, hint = done.stderr.removeprefix("error: ").splitlines()
    assert sorted(problems) == [
        "dstool.yaml: infer.sed: unknown key, did you mean seed? (line 3)",
        "dstool.yaml: trian: unknown key, did you mean train? (line 1)",
    ]
    assert hint == "try: correct dstool.yaml"


def test_the_traceback_of_a_failure_is_shown_for_debugging():
    done = dstool("train", DSTOOL_DEBUG="1")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2].startswith("error: no dstool.yaml in")
    assert lines[-1].startswith("try: ")


A_COMMAND = """
import typer
from dstool.cli import _Commands, app
from dstool.errors import *
@app.command()
def act(what: str) -> None:
    raise eval(what)
app(prog_name="dstool")
"""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("ConfigError('x')", 2),
        ("CheckpointError('x')", 3),
        ("NoDevice('x')", 4),
        ("MissingDependency('x')", 4),
        ("NonFiniteLoss('x')", 5),
    ],
)
def test_each_error_ends_in_its_own_exit_code(what, code):
    done = dstool("act", what, script=A_COMMAND)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "error: x\n")


def test_a_bug_shows_its_traceback_and_exits_with_1():
    done = dstool("act", "ZeroDivisionError('oh')", script=A_COMMAND)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ZeroDivisionError: oh\n")


def test_ctrl_c_is_silent_and_exits_with_130():
    done = dstool("act", "KeyboardInterrupt()", script=A_COMMAND)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("what", "report"),
    [
        ("DataError('x', hint='y')", {"error": "DataError", "message": "x", "hint": "y"}),
        (
            "ZeroDivisionError('oh')",
            {"error": "RankCrashed", "message": "rank 1 ended with ZeroDivisionError: oh"},
        ),
    ],
)
def test_a_rank_tells_the_process_that_launched_it(what, report):
    done = dstool("act", what, script=A_COMMAND, RANK="1", LOCAL_RANK="1", DSTOOL_RESULT="result.json")
    assert done.returncode == (3 if "DataError" in what else 1)
    assert "error:" not in done.stderr
    found = json.loads(Path("result.json").read_text())
    assert found.items() >= report.items()


def test_a_rank_that_nobody_listens_to_speaks_with_its_number():
    done = dstool("act", "NonFiniteLoss('x', hint='y')", script=A_COMMAND, RANK="1", LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (5, "[rank 1] error: x\n[rank 1] try: y\n")


def test_a_reader_that_has_gone_is_no_bug():
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "dstool", "init-config", "-o", "-"]
    done = subprocess.run(
        argv, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# what is typed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["train", "--nope"], "No such option: --nope"),
        (["init-config", "--stage", "4"], "Invalid value for '--stage'"),
        (["init-config", "--offload", "disk"], "Invalid value for '--offload'"),
        (["train", "--num-gpus", "two"], "Invalid value for '--num-gpus'"),
        (["init-config", "surplus"], "unexpected extra argument"),
    ],
)
def test_what_cannot_be_parsed_exits_with_2(arguments, said):
    done = dstool(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert files() == []


def test_version():
    assert succeeds("--version") == f"dstool {__version__}\n"


def test_no_command_shows_the_help():
    done = dstool()
    assert "Usage: dstool" in done.stdout + done.stderr
    assert all(name in done.stdout + done.stderr for name in COMMANDS)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command(flag):
    shown = succeeds(flag)
    assert all(f" {name} " in shown for name in COMMANDS)
    assert "local-rank" not in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_help_and_each_of_its_options_a_text(name):
    command = COMMANDS[name]
    assert command.help.endswith(".")
    assert [param.name for param in command.params if not getattr(param, "help", None)] == []
    assert all(len(opt) > 2 for param in command.params for opt in param.opts[:1])


@pytest.mark.parametrize(
    "before",
    [["--local_rank=0"], ["--local-rank=0"], ["--local_rank", "1"], ["--local-rank", "1"]],
    ids=" ".join,
)
def test_the_launchers_local_rank_stands_before_the_command(before):
    assert json.loads(succeeds(*before, "init-config", "--output", "-"))


@pytest.mark.parametrize("option", ["--nvme-path", "--nvme_path"])
def test_options_may_be_spelt_with_underscores(option):
    Path("a_b").mkdir()
    shown = succeeds("init-config", "--stage=3", "--offload=nvme", option, "a_b", "-o", "-")
    assert json.loads(shown)["zero_optimization"]["offload_param"]["nvme_path"] == "a_b"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--num_gpus", "2"], "no dstool.yaml"),
        (["train", "--num_gpus=2", "--show_config"], "no dstool.yaml"),
        (["merge", "--input_dir", "x", "--zero_stage", "2"], "merge needs a place"),
        (["merge", "--output_dir", "x", "--config", "gone"], "gone: no such run file"),
        (["infer", "--max_new_tokens", "3"], "no dstool.yaml"),
        (["init_config", "--stage", "0", "--offload", "cpu"], "--offload cpu needs"),
    ],
)
def test_what_people_have_in_their_shell_history_is_understood(arguments, said):
    done = dstool(*arguments)
    assert done.stderr.startswith("error: ")
    assert said in done.stderr


def test_python_dstool_runs_the_folder_as_the_launcher_does():
    import dstool as package

    folder = Path(package.__file__).parent
    argv = [sys.executable, str(folder), "--local_rank=0", "--version"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (f"dstool {__version__}\n", "")


# init-config


def test_init_config_shows_what_it_wrote_and_what_comes_next():
    assert succeeds("init-config") == (
        "Initialised\n  written    ds_config.json, dstool.yaml\n  next       dstool train\n"
    )
    assert files() == ["ds_config.json", "dstool.yaml"]


def test_init_config_shows_what_it_kept():
    Path("dstool.yaml").write_text("train: {warmup_steps: 1}\n")
    assert "  written    ds_config.json\n  kept       dstool.yaml\n" in succeeds("init-config")


def test_init_config_as_json_is_one_object_with_absolute_paths():
    here = Path.cwd()
    Path("disk").mkdir()
    shown = succeeds("init-config", "--json", "--stage", "3", "--offload", "nvme", "--nvme-path", "disk")
    assert len(shown.splitlines()) == 1
    assert json.loads(shown) == {
        "written": [f"{here}/ds_config.json", f"{here}/dstool.yaml"],
        "kept": [],
        "nvme_path": f"{here}/disk",
        "named": None,
        "words": [],
    }


def test_init_config_to_stdout_prints_the_json_and_writes_nothing():
    shown = succeeds("init-config", "--output", "-")
    assert files() == []
    succeeds("init-config")
    assert Path("ds_config.json").read_text() == shown


def test_what_init_config_logs_is_not_on_stdout():
    done = dstool("init-config", "--stage", "3", "--offload", "nvme", "-o", "-")
    assert json.loads(done.stdout)["aio"]
    assert done.stderr == "" or done.stderr.startswith("nvme_path: ")


# what comes next


RESULT = {"steps": 2, "checkpoints": ["checkpoint-1", "checkpoint-2"], "best": None}


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        ({}, None, "dstool consolidate second-run/checkpoint-2"),
        ({}, "my runs/b.yaml", "dstool consolidate second-run/checkpoint-2 --config 'my runs/b.yaml'"),
        ({"best": "checkpoint-1"}, None, "dstool consolidate second-run/checkpoint-1"),
        ({"checkpoints": []}, None, 'dstool infer --model second-run --text "..."'),
        ({"output_dir": "두 번째"}, None, "dstool consolidate '두 번째/checkpoint-2'"),
        ({"output_dir": "/elsewhere"}, None, "dstool consolidate /elsewhere/checkpoint-2"),
    ],
)
def test_what_comes_after_training_can_be_typed_as_it_is_shown(changes, config, expected, capsys):
    result = {**RESULT, "output_dir": "second-run", **changes}
    result["output_dir"] = str(Path(result["output_dir"]).absolute())
    _show_trained(result, Path(config) if config else None)
    assert capsys.readouterr().out.splitlines()[-1].split("  ")[-1].strip() == expected


@pytest.mark.parametrize(
    ("command", "usage", "said"),
    [
        ("train", "dstool train [OPTIONS] [KEY=VALUE]...", "by default dstool.yaml"),
        ("consolidate", "dstool consolidate [OPTIONS] [CHECKPOINT] [KEY=VALUE]...", "by default dstool.yaml"),
        ("merge", "dstool merge [OPTIONS] [KEY=VALUE]...", "the checkpoint of its last step"),
        ("infer", "dstool infer [OPTIONS] [KEY=VALUE]...", "by default the run's newest weights"),
        ("check", "dstool check [OPTIONS] [DS_CONFIG]", "by default dstool.yaml"),
        ("explain", "dstool explain [OPTIONS] [NAME]", "by default that of the locale"),
    ],
)
def test_help_says_what_is_typed_and_what_is_the_default(command, usage, said):
    shown = " ".join(succeeds(command, "--help").replace("│", " ").split())
    assert f"Usage: {usage} " in shown
    assert said in shown


def test_the_hint_of_a_wrong_word_and_of_a_wrong_line():
    a_run(**{"dstool.yaml": RUN_FILE + "trian: {}\n"})
    done = dstool("train", "train.max_step=1")
    assert done.stderr.splitlines()[-1] == "try: correct the command line and dstool.yaml"


def test_a_word_may_stand_before_or_after_the_checkpoint_and_a_path_may_have_an_equals_sign(tmp_path):
    assert _checkpoint_and_words(["checkpoint-1", "a.b=1"]) == (Path("checkpoint-1"), ["a.b=1"])
    assert _checkpoint_and_words(["a.b=1"]) == (None, ["a.b=1"])
    (tmp_path / "lr=1").mkdir()
    assert _checkpoint_and_words(["lr=1"]) == (Path("lr=1"), [])
    assert _checkpoint_and_words(["out/lr=1"]) == (Path("out/lr=1"), [])


# --show-config


def test_show_config_says_where_each_value_is_from():
    Path("dstool.yaml").write_text("train:\n  max_steps: 3\n")
    shown = succeeds("train", "--show-config", "train.learning_rate=2e-5")
    rows = {line.partition("#")[0].strip(): line.partition("# ")[2] for line in shown.splitlines()}
    assert rows["train.max_steps: 3"] == "dstool.yaml:2"
    assert rows["train.learning_rate: 2e-05"] == "command line"
    assert rows['data.text_column: "text"'] == "default"


def test_show_config_says_where_each_value_of_a_mapping_is_from():
    Path("dstool.yaml").write_text(
        "model:\n  from_scratch:\n    model_type: bert\n    hidden_size: 8\ntrain:\n  hub_token: hf_XYZ\n"
    )
    words = ["model.from_scratch.hidden_size=16", "deepspeed.zero_optimization={stage: 2}"]
    shown = succeeds("train", "--show-config", *words)
    rows = {line.partition("#")[0].strip(): line.partition("# ")[2] for line in shown.splitlines()}
    assert rows['model.from_scratch.model_type: "bert"'] == "dstool.yaml:3"
    assert rows["model.from_scratch.hidden_size: 16"] == "command line"
    assert rows["deepspeed.zero_optimization.stage: 2"] == "command line"
    assert rows['train.hub_token: "***"'] == "dstool.yaml:6"
    assert "hf_XYZ" not in shown


def test_a_mapping_given_as_a_whole_is_all_from_there():
    Path("dstool.yaml").write_text("model:\n  from_scratch:\n    model_type: bert\n    hidden_size: 8\n")
    shown = json.loads(succeeds("train", "--show-config", "--json", "model.from_scratch={model_type: gpt2}"))
    assert shown["model.from_scratch.model_type"] == {"value": "gpt2", "from": "command line"}
    assert "model.from_scratch.hidden_size" not in shown


def test_show_config_as_json_is_one_object():
    Path("dstool.yaml").write_text("train:\n  max_steps: 3\n")
    shown = json.loads(succeeds("train", "--show-config", "--json"))
    assert shown["train.max_steps"] == {"value": 3, "from": "dstool.yaml:2"}
    assert shown["train.output_dir"] == {"value": "out", "from": "default"}


@pytest.mark.parametrize(
    "words",
    [
        ["consolidate", ""],
        ["consolidate", "out", "-o", ""],
        ["inspect", ""],
        ["merge", "--input-dir", "", "-o", "merged"],
        ["merge", "-o", ""],
        ["infer", "--model", "", "-t", "a"],
    ],
)
def test_an_empty_path_as_of_an_unset_variable_is_not_the_current_folder(words):
    done = dstool(*words)
    assert done.returncode == 2
    assert "is empty" in done.stderr
    assert files() == []
