"""From the shards of a real run to one set of weights, and what is refused before anything is written."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dstool.consolidate import ConsolidateResult, consolidate
from dstool.errors import CheckpointError, ConfigError, DstoolError, EnvironmentUnfit, ModelError
from dstool.merge import merge

pytestmark = pytest.mark.distributed

KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


@pytest.fixture(scope="module")
def checkpoint(trained: Path) -> Path:
    """A checkpoint of two ranks at stage 2, read-only."""
    return trained / "out/checkpoint-1"


@pytest.fixture(scope="module")
def gathered(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ConsolidateResult:
    """Its weights, in a file of safetensors."""
    return consolidate(checkpoint, tmp_path_factory.mktemp("gathered") / "weights")


@pytest.fixture
def broken(checkpoint: Path, here: Path) -> Path:
    """A copy of the checkpoint, alone in the folder `run`, to break."""
    return Path(shutil.copytree(checkpoint, here / "run/checkpoint-1"))


def names(folder: Path) -> list[str]:
    """Every file below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def load_whole(folder: Path, auto: Any = transformers.AutoModelForSequenceClassification) -> Any:
    """The model in `folder` in fp32, loaded by plain Transformers without a key missing or left over."""
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in KINDS), info
    return model.eval()


# --- what is written -------------------------------------------------------------------------------


def test_weights_config_and_tokenizer_lie_together(gathered: ConsolidateResult) -> None:
    assert names(gathered.output_dir) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    load_whole(gathered.output_dir)
    assert transformers.AutoTokenizer.from_pretrained(gathered.output_dir)("a lamp")["input_ids"]


def test_K16_the_weights_are_those_of_deepspeeds_own_function(
    gathered: ConsolidateResult, checkpoint: Path
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    found = load_file(gathered.output_dir / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_the_result_says_what_was_read_and_written(gathered: ConsolidateResult, checkpoint: Path) -> None:
    assert (gathered.step, gathered.stage, gathered.world_size, gathered.dtype) == (1, 2, 2, "fp32")
    assert gathered.checkpoint == checkpoint / "global_step1"
    assert gathered.files == ("model.safetensors",)
    assert gathered.bytes == (gathered.output_dir / "model.safetensors").stat().st_size
    state = load_file(gathered.output_dir / "model.safetensors")
    assert gathered.tensors == len(state)
    assert gathered.parameters == sum(value.numel() for value in state.values())


@pytest.mark.parametrize(
    ("dtype", "stored"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_M08_each_dtype_is_that_of_the_weights_and_of_the_config(
    dtype: Any, stored: torch.dtype, checkpoint: Path, gathered: ConsolidateResult, here: Path
) -> None:
    result = consolidate(checkpoint, here / "weights", dtype=dtype)
    exact = load_file(gathered.output_dir / "model.safetensors")
    found = load_file(result.output_dir / "model.safetensors")
    assert all(torch.equal(found[name], exact[name].to(stored)) for name in exact)
    assert {value.dtype for value in found.values()} == {stored}
    assert json.loads((result.output_dir / "config.json").read_text())["dtype"] == str(stored)[6:]


@pytest.mark.parametrize("size", ["5GB", "300KB"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_shards_and_their_index_load_whole(
    form: Any, size: str, checkpoint: Path, gathered: ConsolidateResult, here: Path
) -> None:
    result = consolidate(checkpoint, here / "weights", file_format=form, max_shard_size=size)
    assert set(result.files) == {name for name in names(result.output_dir) if form in name}
    assert len(result.files) == 1 if size == "5GB" else len(result.files) > 3
    if size != "5GB":
        index = json.loads((result.output_dir / result.files[-1]).read_text())
        assert {*index["weight_map"].values(), result.files[-1]} == set(result.files)
    one, other = load_whole(result.output_dir), load_whole(gathered.output_dir)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_M13_a_bin_file_is_a_flat_dict_of_tensors(
    checkpoint: Path, gathered: ConsolidateResult, here: Path
) -> None:
    result = consolidate(checkpoint, here / "weights", file_format="bin")
    state = torch.load(result.output_dir / "pytorch_model.bin", weights_only=True)
    assert state.keys() == load_file(gathered.output_dir / "model.safetensors").keys()


def test_files_have_the_permissions_of_the_umask(checkpoint: Path, here: Path) -> None:
    before = os.umask(0o027)
    try:
        consolidate(checkpoint, here / "weights")
    finally:
        os.umask(before)
    assert (here / "weights").stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in (here / "weights").iterdir()} == {0o640}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("kind", "options"), [("llama", {"tie_word_embeddings": True}), ("gpt2", {})])
def test_K07_tied_weights_are_stored_once_and_compute_the_same(
    kind: str,
    options: dict[str, Any],
    stage: int,
    tiny: Callable[..., Path],
    language_words: tuple[str, ...],
    train_here: Callable[..., Any],
) -> None:
    run = train_here(f"model.name={tiny(kind, **options)}", *language_words, "train.max_steps=1", stage=stage)
    found = consolidate(run.output_dir)
    assert "lm_head.weight" not in load_file(found.output_dir / "model.safetensors")
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        one, other = (
            load_whole(folder, transformers.AutoModelForCausalLM)(ids).logits
            for folder in (found.output_dir, run.output_dir)
        )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


# --- where it is read from and written to ------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "given", "step"),
    [
        (".", "out", 16),
        (".", "out/checkpoint-1", 1),
        (".", "out/checkpoint-1/global_step1", 1),
        ("out", "checkpoint-1", 1),
        ("out/checkpoint-1", ".", 1),
        ("out/checkpoint-1", "global_step1", 1),
    ],
)
def test_K01_every_level_is_found_and_the_weights_go_beside_the_checkpoint(
    below: str, given: str, step: int, trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained / "out", here / "out")
    monkeypatch.chdir(here / below)
    result = consolidate(Path(given))
    assert (result.step, result.output_dir) == (step, here / f"out/consolidated/checkpoint-{step}")
    assert (result.output_dir / "model.safetensors").is_file()


def test_a_bare_name_is_looked_up_in_the_run_and_json_is_one_object(
    trained: Path, here: Path, command: Callable[..., Any]
) -> None:
    shutil.copytree(trained, here, dirs_exist_ok=True)
    found = command("dstool", "consolidate", "checkpoint-1", "--json", cwd=here).json()
    assert found["output_dir"] == str(here / "out/consolidated/checkpoint-1")
    assert found["checkpoint"] == str(here / "out/checkpoint-1/global_step1")
    assert found["files"] == ["model.safetensors"]
    assert found["bytes"] == (here / "out/consolidated/checkpoint-1/model.safetensors").stat().st_size
    assert 0 < found["seconds"] < 100


# --- what is refused -----------------------------------------------------------------------------------


def refusal(error: type[DstoolError], *arguments: Any, **options: Any) -> DstoolError:
    """What `consolidate` raises: one line, and what to do."""
    with pytest.raises(error) as caught:
        consolidate(*arguments, **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_K01_without_a_checkpoint_the_hint_says_what_is_there(broken: Path) -> None:
    run = broken.parent
    assert refusal(CheckpointError, run.parent).hint == f"dstool consolidate {run}"
    assert refusal(CheckpointError, run / "checkpoint-7").hint == f"there is {broken}"
    assert names(run.parent) == [f"run/checkpoint-1/{name}" for name in names(broken)]


def test_K01_without_latest_the_hint_names_the_folder(broken: Path) -> None:
    (broken / "latest").unlink()
    found = refusal(CheckpointError, broken)
    assert "latest is missing" in found.message
    assert found.hint == f"name the folder itself: dstool consolidate {broken / 'global_step1'}"
    assert consolidate(broken / "global_step1").step == 1


def test_K10_a_missing_rank_is_named_and_nothing_written(broken: Path, here: Path) -> None:
    (lost,) = broken.glob("global_step1/*zero_pp_rank_1_*_optim_states.pt")
    lost.unlink()
    before = names(here)
    assert str(lost) in refusal(CheckpointError, broken).message
    assert names(here) == before


@pytest.mark.parametrize("size", ["5", "0GB", "big", "-1GB"])
def test_a_shard_size_that_is_none_is_found_before_anything_is_read(size: str, here: Path) -> None:
    found = refusal(ConfigError, here / "no-checkpoint-yet", here / "a/weights", max_shard_size=size)
    assert repr(size) in found.message
    assert list(here.iterdir()) == []


def test_K32_a_folder_that_exists_is_left_alone_and_replaced_whole_by_force(
    checkpoint: Path, here: Path
) -> None:
    target = here / "weights"
    consolidate(checkpoint, target, max_shard_size="300KB")
    before = names(target)
    assert "--force" in str(refusal(ConfigError, checkpoint, target).hint)
    assert names(target) == before
    consolidate(checkpoint, target, force=True)
    assert names(here) == [
        f"weights/{name}"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]


def test_what_merge_made_is_replaced_by_force_with_its_card(
    trained: Path, checkpoint: Path, here: Path
) -> None:
    target = merge(trained / "out", here / "model").output_dir
    assert (target / "README.md").is_file()
    consolidate(checkpoint, target, verify=True, force=True)
    assert not (target / "README.md").exists()
    merge(trained / "out", target, force=True)
    (target / "README.md").write_text("# Mine\n")
    before = names(here)
    assert (
        f"{target / 'README.md'} is nothing" in refusal(ConfigError, checkpoint, target, force=True).message
    )
    assert names(here) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("inside", ["", "weights", "global_step1", "../checkpoint-1/weights", ".."])
def test_K31_an_output_that_would_mix_with_or_replace_the_checkpoint(
    inside: str, force: bool, broken: Path, here: Path
) -> None:
    before = names(here)
    found = refusal(ConfigError, broken, broken / inside, force=force)
    assert found.hint == f"-o {broken.parent / 'consolidated/checkpoint-1'}"
    assert names(here) == before


def test_K31_an_output_in_another_checkpoint(broken: Path, here: Path) -> None:
    other = Path(shutil.copytree(broken, broken.with_name("checkpoint-2")))
    before = names(here)
    assert f"lies in the checkpoint {other}" in refusal(ConfigError, broken, other / "weights").message
    assert names(here) == before


def fill(folder: Path, *paths: str) -> Path:
    """A folder with these files in it."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("mine")
    return folder


@pytest.mark.parametrize(
    ("inside", "named"),
    [
        (("model.safetensors", "config.json", "notes.txt"), "notes.txt"),
        (("model.safetensors", "config.json", "run.json", "dstool.yaml"), "dstool.yaml"),
        (("model.safetensors", "config.json", "checkpoint-3/latest"), "checkpoint-3"),
        (("config.json/deep.txt",), "config.json"),
        (("thesis.tex",), "thesis.tex"),
    ],
)
def test_force_replaces_nothing_but_a_model(
    inside: tuple[str, ...], named: str, checkpoint: Path, here: Path
) -> None:
    target = fill(here / "target", *inside)
    before = names(here)
    found = refusal(ConfigError, checkpoint, target, force=True)
    assert found.message.startswith(f"{target / named} is nothing that dstool wrote")
    assert names(here) == before


@pytest.mark.parametrize("target", [".", "..", "file.txt"])
def test_force_replaces_neither_the_current_folder_nor_a_file(
    target: str, checkpoint: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    fill(here / "sub", "file.txt") if target == "file.txt" else None
    before = names(here)
    refusal(ConfigError, checkpoint, Path(target), force=True)
    assert names(here) == before


def test_what_is_missing_is_answered_with_what_is_there(
    trained: Path, here: Path, command: Callable[..., Any]
) -> None:
    shutil.copytree(trained, here / "두 번째 run")
    done = command("dstool", "consolidate", "checkpoint-9", cwd=here / "두 번째 run", code=3)
    assert done.err.splitlines() == [
        "error: out/checkpoint-9 does not exist",
        "try: there is out/checkpoint-1, out/checkpoint-16",
    ]
    (here / "두 번째 run/out/checkpoint-1/latest").unlink()
    done = command("dstool", "consolidate", "두 번째 run/out/checkpoint-1", cwd=here, code=3)
    hint = done.err.splitlines()[-1].partition("folder itself: ")[2]
    assert "wrote" not in hint
    assert "Consolidated" in command("bash", "-c", hint, cwd=here).out


def test_words_may_stand_beside_the_checkpoint(
    trained: Path, here: Path, command: Callable[..., Any]
) -> None:
    shutil.copytree(trained, here, dirs_exist_ok=True)
    argv = ("dstool", "consolidate", "consolidate.dtype=bf16", "checkpoint-1", "consolidate.output_dir=w")
    found = command(*argv, "--json", cwd=here).json()
    assert (found["dtype"], found["output_dir"]) == ("bf16", str(here / "w"))
    argv = ("dstool", "merge", "merge.input_dir=w", "merge.output_dir=m", "merge.dtype=fp16", "--json")
    assert command(*argv, cwd=here).json()["dtype"] == "fp16"
    done = command("dstool", "consolidate", "checkpoint-1", "out/checkpoint-16", cwd=here, code=2)
    assert "checkpoint-1 and out/checkpoint-16 are 2 checkpoints" in done.err


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write files beyond `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_K28_a_disk_that_fails_leaves_nothing_behind(form: Any, checkpoint: Path, here: Path) -> None:
    with largest_file(200_000), pytest.raises(EnvironmentUnfit, match="could not be written"):
        consolidate(checkpoint, here / "a/weights", file_format=form)
    assert list(here.iterdir()) == []


def test_K28_a_disk_that_fails_leaves_what_force_would_have_replaced(checkpoint: Path, here: Path) -> None:
    fill(here / "weights", "config.json")
    with largest_file(200_000), pytest.raises(EnvironmentUnfit, match="could not be written"):
        consolidate(checkpoint, here / "weights", force=True)
    assert names(here) == ["weights/config.json"]


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_config_that_is_none_is_refused(text: str, broken: Path) -> None:
    (broken / "config.json").write_text(text)
    before = names(broken.parent)
    assert "config.json" in refusal(ModelError, broken).message
    assert names(broken.parent) == before


def test_a_checkpoint_without_config_or_tokenizer_gives_the_weights_alone(broken: Path) -> None:
    for file in broken.glob("*.json"):
        file.unlink()
    assert names(consolidate(broken).output_dir) == ["model.safetensors"]


@pytest.mark.parametrize("command", ["consolidate", "merge"])
def test_k11_masters_of_another_step_are_refused_where_the_run_kept_its_weights(
    command: str, checkpoint: Path, here: Path
) -> None:
    """All the optimizer files agree with each other, and not with the model file beside them."""
    mixed = Path(shutil.copytree(checkpoint, here / "mixed"))
    (folder,) = mixed.glob("global_step*")
    for file in folder.glob("*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        state = content["optimizer_state_dict"]
        moments = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        moments["state"][0]["step"] += 1
        for part in state.get("single_partition_of_fp32_groups") or state["fp32_flat_groups"]:
            part.data.add_(1)
        torch.save(content, file)
    work = consolidate if command == "consolidate" else merge
    with pytest.raises(CheckpointError, match="files of two saves are mixed"):
        work(mixed, here / "result")
    assert not (here / "result").exists()
