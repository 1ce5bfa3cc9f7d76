"""That what was written is proved to be what the checkpoint holds, and that a difference is found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from altered import edit
from by_hand import Model, save
from safetensors.torch import load_file, save_file

from dstool.checkpoint import stream
from dstool.consolidate import consolidate
from dstool.errors import CheckpointError


@pytest.fixture
def model() -> Model:
    torch.manual_seed(1)
    groups = [{"w": torch.randn(300, 7), "v": torch.randn(11)}, {"b": torch.randn(5)}]
    return Model(groups, buffers={"n": torch.arange(3)}, frozen={"f": torch.randn(4, 3).bfloat16()})


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "keep"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_manifest_has_the_digest_of_every_file(
    stage: int, form: Any, dtype: Any, model: Model, here: Path, command: Callable[..., Any]
) -> None:
    root = save(here / "checkpoint-7", model, stage, 2)
    found = consolidate(root, verify=True, dtype=dtype, file_format=form, max_shard_size="4KB")
    assert str(found.verified).startswith("5 tensors bit for bit")
    assert ("3 against" in str(found.verified)) == (stage in (1, 2))
    manifest = json.loads((found.output_dir / "manifest.json").read_text())
    assert list(manifest["files"]) == list(found.files)
    assert len(found.files) > 1
    for name, each in manifest["files"].items():
        data = (found.output_dir / name).read_bytes()
        assert each == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    said = command("sha256sum", *found.files, cwd=found.output_dir).out.split()
    assert said[::2] == [each["sha256"] for each in manifest["files"].values()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_written_byte_that_is_another_is_found(
    bit: int, dtype: Any, model: Model, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = save(here / "checkpoint-7", model, 2, 3)
    copy = stream.copy

    def damaging(targets: Any, progress: Any = None) -> None:
        copy(targets, progress)
        place = next(target for target in targets if target.entry.name == "v")
        with place.file.open("r+b") as file:
            file.seek(place.offset + 13)
            (value,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([value ^ 1 << bit]))

    monkeypatch.setattr(stream, "copy", damaging)
    with pytest.raises(CheckpointError, match=r"^1 of the tensors .*: v: is not what the checkpoint holds"):
        consolidate(root, here / "out", dtype=dtype, verify=True)
    assert [path.name for path in here.iterdir()] == ["checkpoint-7"]


def test_masters_that_are_not_the_weights_of_the_run_are_found_at_stage_2(
    model: Model, here: Path, command: Callable[..., Any]
) -> None:
    """A flip in a partition: the file is well-formed, and only the 16-bit weights tell."""
    root = save(here / "checkpoint-7", model, 2, 2)
    file = root / "global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = file.read_bytes()
    place = data.index(model.groups[0]["w"].flatten()[100:110].numpy().tobytes()) + 3
    file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    assert "Consolidated" in command("dstool", "consolidate", "checkpoint-7", cwd=here).out
    done = command("dstool", "consolidate", "checkpoint-7", "--force", "--verify", cwd=here, code=3)
    error, hint = [line for line in done.err.splitlines() if line.startswith(("error: ", "try: "))]
    assert "1 of the tensors" in error
    assert ": w: " in error
    assert hint
    assert (here / "consolidated/checkpoint-7/model.safetensors").is_file(), "the one before stays"


def test_masters_that_are_not_the_weights_of_the_run_are_found_at_stage_3(model: Model, here: Path) -> None:
    root = save(here / "checkpoint-7", model, 3, 2)
    kept = {name: value.bfloat16() for name, value in model.trained.items()}
    save_file(kept, root / "model.safetensors")
    assert "3 against" in str(consolidate(root, here / "one", verify=True).verified)
    kept["b"][2] += 1
    kept["w"][299, 6] = 0
    save_file(kept, root / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^2 of the tensors .*: w, b: rounded is not the weight"):
        consolidate(root, here / "two", verify=True)


def test_a_nan_is_the_same_whichever_of_its_patterns_the_processor_rounds_to(
    model: Model, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model.groups[0]["w"][3, 3] = torch.nan
    root = save(here / "checkpoint-7", model, 2, 2)

    def other(content: dict[str, Any]) -> None:
        bits = content["module"]["w"].view(torch.int16)
        bits[3, 3] = -1 if bits[3, 3] == 0x7FC0 else 0x7FC0

    edit(root / "global_step7/mp_rank_00_model_states.pt", other)
    assert consolidate(root, here / "out", verify=True, dtype="bf16").verified
    assert "w has infinite or NaN elements, as in the checkpoint" in caplog.text
    assert load_file(here / "out/model.safetensors")["w"].isnan().sum() == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bit_that_no_rounding_shows_is_found_by_the_checksum_of_the_save(
    stage: int, model: Model, here: Path
) -> None:
    root = save(here / "checkpoint-7", model, stage, 2)
    file = root / "global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    data[data.index(model.groups[0]["w"].flatten()[100:110].numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        consolidate(root, here / "out", verify=True)
    assert caught.value.message.startswith(f"{file} is damaged: it has other bytes than were saved, where ")
    assert " w" in caught.value.message
    assert not (here / "out").exists()


def test_k11_steps_that_disagree_are_no_proof_where_the_run_kept_no_weights(model: Model, here: Path) -> None:
    root = save(here / "checkpoint-7", model, 3, 2)
    for file in root.glob("global_step7/*_model_states.pt"):
        edit(file, lambda content: content.update(global_steps=8))
    assert consolidate(root, here / "out").step == 8
    with pytest.raises(CheckpointError, match="the run kept no weights that could show"):
        consolidate(root, here / "proved", verify=True)
    assert not (here / "proved").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_is_the_same_by_deepspeed_and_compared_with_the_run_by_its_own_names(
    stage: int, here: Path
) -> None:
    names = [f"base_model.model.q_proj.lora_{part}.default.weight" for part in "AB"]
    root = save(here / "checkpoint-7", Model([{name: torch.randn(4, 4) for name in names}]), stage, 2)
    (root / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    plan = consolidate(root, dry_run=True, max_shard_size="1KB")
    found = [
        consolidate(root, here / engine, engine=engine, verify=True) for engine in ("stream", "deepspeed")
    ]
    assert plan.files == found[0].files == found[1].files == ("adapter_model.safetensors",)
    one, two = ((each.output_dir / each.files[0]).read_bytes() for each in found)
    assert one == two
    assert ("2 against the run's own" in str(found[0].verified)) == (stage == 2)
