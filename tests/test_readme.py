"""Every command that the README prints, run as printed, and the output that it shows."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dstool as package

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@dataclass(frozen=True)
class Block:
    """A block of code, and the heading it stands under."""

    heading: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """All the blocks of the README, in order."""
    for section in re.split(r"^##? ", README, flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        for language, text in re.findall(r"```(\w+)\n(.*?)```", section, flags=re.DOTALL):
            yield Block(heading, language, text)


def commands(heading: str, language: str = "bash") -> list[str]:
    """The lines of the blocks of `language` under `heading`."""
    found = [block.text for block in blocks() if (block.heading, block.language) == (heading, language)]
    assert found, f"the README has no {language} block under {heading!r}"
    return "".join(found).splitlines()


def shell(line: str, command: Callable[..., Any], cwd: Path) -> Any:
    """Run a line as a shell would, stderr after stdout, as on a terminal."""
    return command("bash", "-c", f"{{ {line.partition(' #')[0]}; }} 2>&1", cwd=cwd)


def test_every_block_is_run_by_a_test() -> None:
    assert {(block.heading, block.language) for block in blocks()} == {
        ("dstool", "bash"),
        ("dstool", "console"),
        ("Your model, your data", "bash"),
        ("What fits", "bash"),
        ("An adapter instead of the whole model", "yaml"),
        ("An adapter instead of the whole model", "bash"),
        ("Starting the ranks", "bash"),
        ("Writing the JSON", "bash"),
        ("Checking the JSON", "bash"),
        ("What a key means", "bash"),
        ("What a key means", "console"),
        ("What a checkpoint is", "bash"),
        ("Checkpoints to weights", "bash"),
        ("Checkpoints to weights", "python"),
        ("Asking the model", "bash"),
        ("From Python", "python"),
        ("Working on dstool", "bash"),
    }


def test_make_has_the_targets() -> None:
    """They are not run: the tests are what `make test` runs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = commands("dstool") + commands("Working on dstool")
    targets = [line.split()[1] for line in lines if line.startswith("make")]
    assert targets == ["demo", "test", "check", "clean"]
    assert all(f"\n{target}:" in makefile for target in targets)


def test_scripts(command: Callable[..., Any]) -> None:
    lines = [line for line in commands("Working on dstool") if not line.startswith("make")]
    assert lines == ["python scripts/bench_help.py"]
    assert "ratio" in shell(lines[0], command, ROOT).out


def test_the_tour_shows_what_it_says(tmp_path: Path, command: Callable[..., Any]) -> None:
    text = "\n".join(commands("dstool", "console"))
    for part in text.split("$ ")[1:]:
        line, _, shown = part.partition("\n")
        output = shell(line, command, tmp_path).out
        if "device" in shown and without_numbers("no GPU found") not in without_numbers(output):
            continue  # the README shows a machine without a GPU
        assert without_numbers(output) == without_numbers(shown)


def without_numbers(text: str) -> str:
    """`text` with every number as 0 and either label as one; they are those of one machine."""
    text = re.sub(r"\d[\d.,]*(e-?\d+)?", "0", text).strip()
    return re.sub(r"^(positive|negative) ", "LABEL ", text, flags=re.MULTILINE)


def test_your_model_your_data(tmp_path: Path, tiny: Callable[..., Path], command: Callable[..., Any]) -> None:
    """The model of the hub is a tiny one here, in a folder of that name."""
    shutil.copytree(tiny("llama"), tmp_path / "Qwen/Qwen3-0.6B")
    for name in ("reviews.csv", "valid.csv"):
        shutil.copy(Path(package.__file__).parent / "sample/reviews_en.csv", tmp_path / name)
    for line in commands("Your model, your data"):
        shell(line, command, tmp_path)
    assert (tmp_path / "out/model.safetensors").is_file()
    assert (tmp_path / "second-run/model.safetensors").is_file()


def test_what_fits(tmp_path: Path, tiny: Callable[..., Path], command: Callable[..., Any]) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "Qwen/Qwen3-0.6B")
    command("dstool", "init-config", cwd=tmp_path)
    *tables, object_ = [shell(line, command, tmp_path).out for line in commands("What fits")]
    assert all("next: dstool init-config --stage 1" in table for table in tables)
    assert '"stage": 1' in object_


def test_an_adapter(tmp_path: Path, tiny: Callable[..., Path], command: Callable[..., Any]) -> None:
    heading = "An adapter instead of the whole model"
    command("dstool", "init-config", "--model", str(tiny("llama")), cwd=tmp_path)
    with (tmp_path / "dstool.yaml").open("a") as file:
        file.write("\n".join(commands(heading, "yaml")))
    first, *others = [shell(line, command, tmp_path).out for line in commands(heading)]
    assert "parameters are trained" in first
    assert "parameters are trained" not in others[-1]
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert (tmp_path / "whole/model.safetensors").is_file()


@pytest.mark.parametrize("line", commands("Starting the ranks"))
def test_starting_the_ranks(line: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    (tmp_path / "dstool").symlink_to(Path(package.__file__).parent, target_is_directory=True)
    command("dstool", "init-config", cwd=tmp_path)
    assert "world size   2" in shell(line, command, tmp_path).out


def test_writing_the_json(tmp_path: Path, command: Callable[..., Any]) -> None:
    for line in commands("Writing the JSON"):
        assert "written" in shell(line, command, tmp_path).out


def test_what_a_key_means(tmp_path: Path, command: Callable[..., Any]) -> None:
    english, korean = {"LC_ALL": "C.UTF-8"}, "스테이지"
    for line in commands("What a key means"):
        assert (korean in command("bash", "-c", line, cwd=tmp_path, env=english).out) == (
            "ko" in line.split()
        )
    line, *shown = commands("What a key means", "console")
    done = command("bash", "-c", line.removeprefix("$ "), cwd=tmp_path, env=english)
    assert done.out.splitlines() == shown


def test_checking_the_json(tmp_path: Path, command: Callable[..., Any]) -> None:
    command("dstool", "init-config", cwd=tmp_path)
    for line in commands("Checking the JSON"):
        assert shell(line, command, tmp_path).out == "ds_config.json: nothing is wrong\n"


def test_what_a_checkpoint_is(trained: Path, command: Callable[..., Any]) -> None:
    for line in commands("What a checkpoint is"):
        assert "global_step16" in shell(line, command, trained).out


def test_checkpoints_to_weights(trained: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copytree(run / "out/checkpoint-1", run / "out/checkpoint-8")
    script = "\n".join(["from pathlib import Path", *commands("Checkpoints to weights", "python")])
    assert "embeddings" in command(sys.executable, "-c", script, cwd=run).out
    for line in commands("Checkpoints to weights"):
        shell(line, command, run)
    assert all((run / name / "config.json").is_file() for name in ("weights", "model-bf16", "model-fp32"))


def test_asking_the_model(trained: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copytree(run / "out", run / "my-model")
    one, other = (shell(line, command, run).out for line in commands("Asking the model"))
    assert without_numbers(one) == "LABEL  0  It broke.\nLABEL  0  It did not."
    assert '"label": ' in other


def test_from_python(tmp_path: Path, command: Callable[..., Any]) -> None:
    done = command(sys.executable, "-c", "\n".join(commands("From Python", "python")), cwd=tmp_path)
    assert done.out.splitlines()[-1] in {"positive", "negative"}
