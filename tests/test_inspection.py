"""`dstool inspect`: what it says of real checkpoints, whole and broken, in text and as JSON."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstool.checkpoint import layout
from dstool.cli import app, out
from dstool.errors import CheckpointError
from dstool.inspection import inspect


@pytest.fixture(autouse=True)
def _json_is_off():
    yield
    out.as_json = False


def dstool(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.mark.distributed
def test_a_run_is_said_to_be_whole(trained):
    result = inspect(trained / "out")
    checkpoint = layout.find(trained / "out")
    assert (result.stage, result.world_size, result.step) == (2, 2, checkpoint.step)
    assert (result.tags, result.latest) == ((checkpoint.tag,), checkpoint.tag)
    assert result.problem is None
    assert result.precision == "fp32"
    assert result.optimizer == "AdamW"
    assert result.trained is not None
    assert result.trained.bytes == 4 * result.trained.elements
    assert result.frozen is not None
    assert result.frozen.tensors == 0
    assert set(result.files) == {file.name for file in checkpoint.folder.iterdir()}
    assert (result.consolidates, result.merges) == ("yes", "yes")
    assert result.resumes.startswith("with 2 ranks")


@pytest.mark.distributed
def test_it_is_typed_and_the_next_command_can_be(trained, monkeypatch):
    monkeypatch.chdir(trained)
    done = dstool("checkpoint-1")
    assert done.exit_code == 0, done.output
    assert "  stage         2\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("dstool merge --input-dir out/checkpoint-1 --output-dir DIR")
    found = json.loads(dstool("--json").stdout)
    assert found["checkpoint"].endswith("checkpoint-16")
    assert found["trained"]["elements"] > 100_000


@pytest.mark.distributed
def test_k26_what_is_damaged_is_named_and_the_exit_code_says_so(trained, tmp_path):
    copy = shutil.copytree(trained / "out/checkpoint-1", tmp_path / "체크 포인트/checkpoint-1")
    file = next(copy.glob("global_step1/*rank_1*optim*"))
    file.write_bytes(file.read_bytes()[:1000])
    done = dstool(copy)
    assert done.exit_code == CheckpointError.exit_code
    assert f"{file.name} is cut short" in done.stdout
    assert inspect(copy).files[file.name] == 1000
    file.unlink()
    assert "is missing (rank 1 of 2)" in str(inspect(copy).problem)


def test_nothing_of_a_checkpoint_is_an_error(here):
    done = dstool(here)
    assert done.exit_code == CheckpointError.exit_code
    assert "no ZeRO checkpoint" in str(done.output) + str(done.stderr)


@pytest.mark.distributed
def test_no_tensor_data_is_read(trained, monkeypatch):
    """It opens each file once, by `pickles.read` alone, which reads the directory and the pickle."""
    opened: list[Path] = []
    before = layout.pickles.read

    def watched(file, **options):
        opened.append(file)
        return before(file, **options)

    monkeypatch.setattr(layout.pickles, "read", watched)
    assert inspect(trained / "out").problem is None
    assert {file.suffix for file in opened} == {".pt"}
    assert len(opened) == len(set(opened)) == 3
