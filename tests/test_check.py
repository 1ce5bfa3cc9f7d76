"""`dstool check`, as it is typed: exact output, exit codes, and files that are mended whole or not at all."""

import json
import os
import shlex
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstool.check import check
from dstool.cli import app, out
from dstool.errors import ConfigError

FINE = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
TRAILING = json.dumps(FINE)[:-1] + ",\n}\n"


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    out.as_json = False


def dstool(*arguments):
    return CliRunner().invoke(app, ["check", *arguments])


def test_a_file_that_is_fine():
    Path("ds_config.json").write_text(json.dumps(FINE))
    done = dstool()
    assert (done.exit_code, done.stdout) == (0, "ds_config.json: nothing is wrong\n")


def test_an_error_has_a_caret_and_exits_with_2():
    Path("a.json").write_text('{\n  "zero_optimization": {"stage": 4},\n' + json.dumps(FINE)[36:])
    done = dstool("a.json")
    assert done.exit_code == 2
    assert done.stdout == (
        "a.json:2:34: error in zero_optimization.stage: "
        "zero_optimization.stage is 4, it must be 0, 1, 2 or 3\n"
        '      "zero_optimization": {"stage": 4},\n'
        "                                     ^\n"
        "  if left: DeepSpeed stops after the model has loaded\n"
        "  mend: choose one of the values\n"
        "\n"
        "a.json: 1 error\n"
    )


def test_standard_input_is_named_as_a_path():
    done = dstool("-")
    assert done.exit_code == 2
    assert (
        done.stderr
        == "error: -: a path is expected\ntry: dstool check /dev/stdin reads what is piped to it\n"
    )


def test_what_is_no_regular_file_is_checked_and_never_written(tmp_path):
    done = dstool("/dev/null")
    assert done.exit_code == 2
    assert "mend: dstool init-config writes one\n" in done.stdout
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("{}",))
    writer.start()
    done = dstool("pipe")
    writer.join()
    assert (done.exit_code, "--fix" in done.stdout) == (0, False)
    assert done.stdout.endswith("pipe: 3 warnings\n")
    for name in ("pipe", "/dev/null"):
        done = dstool("--fix", name)
        assert done.exit_code == 2
        assert f"{name}: no regular file, which --fix cannot mend\ntry: dstool check {name}" in done.stderr
        assert not Path(name).is_file()


def test_a_warning_exits_with_0():
    Path("a.json").write_text(json.dumps({**FINE, "gradient_clipping": None}))
    done = dstool("a.json")
    assert done.exit_code == 0
    assert done.stdout.endswith("a.json: 1 warning; dstool check a.json --fix mends 1\n")


def test_fix_shows_the_difference_and_has_nothing_to_do_again():
    Path("ds_config.json").write_text(TRAILING)
    done = dstool("--fix")
    assert done.exit_code == 0
    assert done.stdout.startswith("--- ds_config.json\n+++ ds_config.json mended\n")
    assert done.stdout.endswith("ds_config.json: 1 mend\n")
    mended = Path("ds_config.json").read_bytes()
    assert json.loads(mended) == FINE
    assert dstool("--fix").stdout == "ds_config.json: nothing is wrong\n"
    assert Path("ds_config.json").read_bytes() == mended


def test_json_is_one_object():
    Path("ds_config.json").write_text(TRAILING)
    done = dstool("--json")
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["errors"], shown["findings"][0]["rule"]) == (2, 1, "trailing-comma")
    assert shown["file"] == str(Path("ds_config.json").absolute())


def test_the_run_file_has_a_say():
    Path("ds_config.json").write_text(json.dumps({**FINE, "gradient_clipping": 0.5}))
    Path("dstool.yaml").write_text("train: {max_grad_norm: 1.0}\ndeepspeed: ds_config.json\n")
    for path in (None, Path("ds_config.json")):
        assert [each.rule for each in check(path).findings] == ["mismatch"]


def test_a_json_in_the_run_file_is_checked_by_its_lines():
    inline = json.dumps(FINE)[1:-1].replace(', "', '\n  "')
    Path("dstool.yaml").write_text(f"train: {{}}\ndeepspeed:\n  xyzzy: 1\n  {inline}\n")
    (one,) = check().findings
    assert (one.rule, one.line, one.edit) == ("unknown-key", 3, ())
    with pytest.raises(ConfigError, match="which --fix leaves alone"):
        check(fix=True)


def test_nothing_to_check():
    with pytest.raises(ConfigError, match=r"neither dstool\.yaml nor ds_config\.json"):
        check()


def test_the_world_size_is_counted_in():
    Path("ds_config.json").write_text(json.dumps({**FINE, "train_batch_size": 8}))
    assert [each.rule for each in check(world_size=3).findings] == ["batch"]


def test_the_command_that_mends_works_as_printed():
    Path("my file.json").write_text(TRAILING)
    Path("run.yaml").write_text("deepspeed: my file.json\n")
    said = dstool("my file.json", "--config", "run.yaml").stdout.splitlines()[-1]
    command = said.partition("; ")[2].removesuffix(" mends 1")
    assert command == "dstool check 'my file.json' --config run.yaml --fix"
    assert dstool(*shlex.split(command)[2:]).exit_code == 0
    assert json.loads(Path("my file.json").read_text()) == FINE


def test_an_empty_file_is_written_anew_under_its_own_name():
    Path("e.json").write_text("")
    (one,) = check(Path("e.json")).findings
    command = one.mend.removesuffix(" writes one")
    assert command == "dstool init-config -o e.json --force"
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert json.loads(Path("e.json").read_text())


def test_a_json_that_the_run_file_does_not_name_is_said_to_stand_alone(caplog):
    Path("x.json").write_text(json.dumps(FINE))
    Path("dstool.yaml").write_text("deepspeed: ds_config.json\n")
    with caplog.at_level("INFO", logger="dstool"):
        check(Path("x.json"))
    assert "x.json was not compared with dstool.yaml, which names ds_config.json" in caplog.text
