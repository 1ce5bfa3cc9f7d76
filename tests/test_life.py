"""The whole life as typed: from an empty folder to an answer, by two real ranks, at every stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dstool as package
from dstool.launch import SHARED_MEMORY, free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SENTENCES = ("A splendid lamp.", "아주 좋아요")


def launcher(*how: str) -> list[str]:
    """The launcher with a port of its own, so that tests may run beside each other."""
    return ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), *how, "dstool", "train"]


WAYS = {
    "deepspeed dstool train": launcher,
    "deepspeed --module dstool train": lambda: launcher("--module"),
    "deepspeed --no_python dstool train": lambda: launcher("--no_python"),
    "dstool train": lambda: ["dstool", "train", "--num-gpus", "2"],
}


@pytest.mark.parametrize(
    ("way", "stage", "offload"),
    [
        ("deepspeed --no_python dstool train", 1, "none"),
        ("dstool train", 2, "none"),
        ("deepspeed --module dstool train", 3, "none"),
        ("deepspeed dstool train", 3, "nvme"),
    ],
)
def test_c02_c14_from_an_empty_folder_to_an_answer(
    way: str, stage: int, offload: str, tmp_path: Path, command: Callable[..., Any]
) -> None:
    if offload == "nvme":
        need_async_io()
    if way == "deepspeed dstool train":
        # The launcher runs the folder `dstool` of the current one, as in the repository's root.
        (tmp_path / "dstool").symlink_to(Path(package.__file__).parent, target_is_directory=True)

    command("dstool", "init-config", "--stage", str(stage), "--offload", offload, cwd=tmp_path)
    argv = WAYS[way]()
    trained = command(*argv, cwd=tmp_path, timeout=580)
    if "--master_port" in argv:
        port = argv[argv.index("--master_port") + 1]
        assert not list(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
    assert "training on the CPU over gloo, 2 ranks" in trained.err
    assert "[transformers]" not in trained.err, "noise of a library"
    assert "Trained" in trained.out
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert (record["stage"], record["world_size"]) == (stage, 2)
    assert record["checkpoints"] == ["checkpoint-1", "checkpoint-16"]

    gathered = command("dstool", "consolidate", "checkpoint-1", "--json", cwd=tmp_path).json()
    assert Path(gathered["output_dir"]) == tmp_path / "out/consolidated/checkpoint-1"
    assert (gathered["stage"], gathered["world_size"], gathered["step"]) == (stage, 2, 1)

    merge = ("dstool", "merge", "--input-dir", "out", "--output-dir", "merged", "--zero-stage", str(stage))
    merged = command(*merge, "--json", cwd=tmp_path).json()
    assert_loads_whole(Path(merged["output_dir"]))
    assert_same_weights(tmp_path / "merged", tmp_path / "out")

    words = [word for sentence in SENTENCES for word in ("--text", sentence)]
    answer = command("dstool", "infer", *words, "--json", cwd=tmp_path).json()
    assert [each["text"] for each in answer["predictions"]] == list(SENTENCES)
    assert {each["label"] for each in answer["predictions"]} <= {"positive", "negative"}
    assert all(0.5 <= each["probability"] <= 1 for each in answer["predictions"])


def test_merge_runs_under_the_launcher_with_the_spelling_of_old(
    trained: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    (tmp_path / "dstool").symlink_to(Path(package.__file__).parent, target_is_directory=True)
    deepspeed = ("deepspeed", "--num_gpus=1", f"--master_port={free_port()}", "dstool", "merge")
    command(
        *deepspeed,
        *("--input_dir", str(trained / "out"), "--output_dir", "merged", "--zero-stage", "2"),
        cwd=tmp_path,
    )
    assert_loads_whole(tmp_path / "merged")


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_the_merged_model_computes_what_the_live_one_did(
    stage: int, precision: str, tiny: Callable[..., Path], tmp_path: Path, command: Callable[..., Any]
) -> None:
    """Logits at the end of training, by all ranks together, against those of the folder, by plain
    Transformers. The folder is written in fp32 and rounded by the loader to what the model was run in.
    """
    model = tiny("llama", tie_word_embeddings=True)
    worker = Path(__file__).with_name("live_logits.py")
    argv = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(worker)]
    command(*argv, str(model), str(stage), precision, cwd=tmp_path)
    live = torch.load(tmp_path / "live.pt")

    command(
        *("dstool", "merge", "--input-dir", "out", "--output-dir", "merged", "--dtype", "fp32"),
        *("--zero-stage", str(stage)),
        cwd=tmp_path,
    )
    assert_loads_whole(tmp_path / "merged")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype).eval()
    with torch.no_grad():
        logits = loaded(live["input_ids"]).logits
    before = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    with torch.no_grad():
        untrained = before(live["input_ids"]).logits
    assert not torch.allclose(logits, untrained, atol=1e-2), "training changed nothing"
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-6 if precision == "fp32" else 2**-8)


def need_async_io() -> None:
    """Skip where DeepSpeed cannot build what offloading to NVMe needs."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("async_io cannot be built here (Debian: libaio-dev)")


def assert_loads_whole(folder: Path) -> None:
    """`from_pretrained` finds no key missing, left over or of another shape, and the tokenizer loads."""
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    _, info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert transformers.AutoTokenizer.from_pretrained(folder)("a lamp")["input_ids"]


def assert_same_weights(one: Path, other: Path) -> None:
    """Both folders hold the same tensors under the same names."""
    from safetensors.torch import load_file

    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
