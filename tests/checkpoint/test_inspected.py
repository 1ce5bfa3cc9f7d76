"""`dstool inspect` on checkpoints of any form: its JSON, the next command, the time it takes."""

import resource
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from altered import edit
from by_hand import Model, save

from dstool.inspection import InspectResult, inspect

FIELDS = {
    *("checkpoint", "tags", "latest", "tag", "problem", "hint", "stage", "world_size", "step"),
    *("deepspeed_version", "precision", "optimizer", "nvme", "trained", "frozen", "buffers", "tied", "files"),
    *("bytes", "consolidates", "merges", "resumes", "next"),
}
"""Scripts read them: one may be added, none renamed or taken away. README.md has the list."""


@pytest.fixture
def model():
    groups = [{"층.w": torch.randn(6, 5), "v": torch.randn(3)}]
    return Model(groups, {"f": torch.randn(2, 2).bfloat16()}, {"n": torch.arange(3)}, {"t": "층.w"})


def test_the_fields_of_the_json_are_those_that_are_documented(model, here, command):
    assert {each.name for each in fields(InspectResult)} == FIELDS
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(FIELDS) if f"`{name}`" not in readme] == []
    save(here / "checkpoint-7", model, 3, 2)
    found = command("dstool", "inspect", "checkpoint-7", "--json", cwd=here).json()
    assert found.keys() == FIELDS
    assert found["trained"] == {"tensors": 2, "elements": 33, "bytes": 132}
    assert found["frozen"] == {"tensors": 1, "elements": 4, "bytes": 8}
    assert found["buffers"] == {"tensors": 1, "elements": 3, "bytes": 24}
    assert found["tied"] == {"t": "층.w"}
    assert (found["stage"], found["world_size"], found["step"], found["precision"]) == (3, 2, 7, "bf16")
    assert found["bytes"] == sum(found["files"].values()) > 0
    assert len(found["files"]) == 4
    assert found["next"] == "dstool consolidate checkpoint-7"
    for file in Path("checkpoint-7/global_step7").glob("*optim*"):
        file.unlink()
    broken = command("dstool", "inspect", "checkpoint-7", "--json", cwd=here, code=3).json()
    assert broken.keys() == FIELDS
    assert "optim_states.pt is missing (rank 0 of 2; those of 1 more as well: 1)" in broken["problem"]
    assert broken["next"] == broken["hint"]


@pytest.mark.parametrize("given", ["체크 포인트", "체크 포인트/global_step7", "체크 포인트/global_step9"])
def test_the_next_command_works_as_printed_on_what_was_looked_at(given, model, here, command):
    save(here / "체크 포인트", model, 2, 2, step=9)
    save(here / "체크 포인트", model, 2, 2, step=7)
    shown = command("dstool", "inspect", given, cwd=here).out.splitlines()
    (step,) = [line.split()[-1] for line in shown if line.startswith("  step ")]
    title, _, following = shown[-1].strip().partition(" ")
    assert title == "next"
    done = command("bash", "-c", f"{following} --json", cwd=here).json()
    assert done["step"] == int(step) == (9 if given.endswith("9") else 7)


def test_a_tag_that_is_asked_for_is_the_one_of_the_next_command(model, here):
    save(here / "checkpoint-9", model, 2, 2, step=7)
    save(here / "checkpoint-9", model, 2, 2, step=9)
    result = inspect(Path("checkpoint-9"), tag="global_step7")
    assert (result.tag, result.latest, result.step) == ("global_step7", "global_step9", 7)
    assert result.next == "dstool consolidate checkpoint-9/global_step7"
    assert inspect(Path("checkpoint-9")).next == "dstool consolidate checkpoint-9"
    Path("checkpoint-9/global_step7/mp_rank_00_model_states.pt").unlink()
    for found in (
        inspect(Path("checkpoint-9"), tag="global_step7"),
        inspect(Path("checkpoint-9/global_step7")),
    ):
        assert (found.tag, len(found.files)) == ("global_step7", 2)
        assert "mp_rank_00_model_states.pt is missing" in str(found.problem)


def test_an_adapter_is_merged_into_its_base_model(model, here):
    save(here / "checkpoint-7", model, 2, 2)
    Path("checkpoint-7/adapter_config.json").write_text("{}")
    result = inspect(Path("checkpoint-7"))
    assert result.merges.startswith("yes: an adapter")
    assert result.next == "dstool merge --input-dir checkpoint-7 --output-dir DIR"


def test_a_checkpoint_of_many_ranks_takes_less_than_3_seconds(here, command):
    """48 ranks at stage 3, 500 parameters: time of the processor, as other work may be going on."""
    model = Model([{f"model.layers.{n}.weight": torch.ones(48) for n in range(500)}])
    folder = save(here / "checkpoint-7", model, 3, 1) / "global_step7"
    for file in folder.iterdir():
        content = torch.load(file)
        content["dp_world_size"] = 48
        if state := content.get("optimizer_state_dict"):
            state |= {"partition_count": 48, "fp32_flat_groups": [torch.ones(500)]}
        torch.save(content, file)
        for rank in range(1, 48):
            shutil.copyfile(file, folder / file.name.replace("rank_0_", f"rank_{rank}_", 1))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command("dstool", "inspect", "checkpoint-7", "--json", cwd=here)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = done.json()
    assert (found["world_size"], found["trained"]["tensors"]) == (48, 500)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_k11_steps_that_disagree_are_told_with_what_consolidate_will_do(model, here):
    root = save(here / "checkpoint-7", model, 2, 2)
    assert inspect(root).consolidates == "yes"
    edit(root / "global_step7/mp_rank_00_model_states.pt", lambda content: content.update(global_steps=8))
    assert inspect(root).consolidates.startswith("after a comparison")
