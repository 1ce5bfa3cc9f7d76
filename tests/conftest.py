"""What the tests share: tiny real models, a way to run commands, and one training by two ranks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# The same examples in every run: what fails here fails everywhere. HYPOTHESIS_PROFILE=default looks further.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# A job in the background ignores Ctrl-C and a hang-up, and so would all that the tests start and end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

BIN = Path(sys.executable).parent
TEXTS = (
    "a splendid lamp and a warm light",
    "the worst kettle, it leaks",
    "fine cups, quick delivery, thank you",
    "broken on arrival and no reply",
)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.out)


def run(
    *argv: str, cwd: Path, code: int = 0, env: dict[str, str] | None = None, timeout: float = 400
) -> Done:
    """Run a command, and its descendants with it, to the end; `code` is the exit code it must have."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **(env or {})}
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(argv)} took more than {timeout} s:\n{out}\n{err}")
    assert process.returncode == code, f"{' '.join(argv)} ended with {process.returncode}:\n{out}\n{err}"
    assert "Traceback" not in err, err
    return Done(process.returncode, out, err)


@pytest.fixture(autouse=True)
def log_is_put_back() -> Iterator[None]:
    """A command that ran in this process has set up the log for it alone."""
    logger = logging.getLogger("dstool")
    before = (logger.handlers[:], logger.propagate, logger.level)
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture(scope="session", autouse=True)
def shared_memory_is_given_back() -> Iterator[None]:
    """No run leaves its buffers behind: dozens of them would fill the memory of the machine."""
    before = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
    yield
    left = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")) - before
    for path in left:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def command() -> Callable[..., Done]:
    """`command("dstool", "infer", ..., cwd=...)` runs a program of this environment."""
    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the sample by two ranks at stage 2, read-only for the tests."""
    folder = tmp_path_factory.mktemp("trained")
    run("dstool", "init-config", "--stage", "2", cwd=folder)
    run("dstool", "train", "--num-gpus", "2", cwd=folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer with an end-of-text token and, like GPT-2's, no padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", bos_token="<end>")


SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 37},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="session")
def tiny(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("llama", tie_word_embeddings=True)`: the folder of a model with random weights."""
    import torch
    import transformers

    def make(kind: str, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        config = transformers.AutoConfig.for_model(kind, vocab_size=300, **{**SIZES[kind], **options})
        torch.manual_seed(0)
        auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Callable[..., Path]:
    """`write("a.csv", "text,label", "good,1")` makes a file of these lines in the current folder."""

    def lines(name: str, *rows: str, encoding: str = "utf-8") -> Path:
        path = here / name
        path.write_bytes("".join(f"{row}\n" for row in rows).encode(encoding))
        return path

    return lines


@pytest.fixture
def language_words(write: Callable[..., Path]) -> tuple[str, ...]:
    """The words that train a language model of `tiny` on a few lines."""
    write("prose.jsonl", *(json.dumps({"text": f"line {n} about lamps and kettles"}) for n in range(60)))
    data = ("data.train=prose.jsonl", "data.block_size=32")
    return ("model.from_scratch=null", "model.task=causal-lm", *data)


@pytest.fixture
def train_here(here: Path) -> Callable[..., Any]:
    """`train_here("data.train=a.csv", stage=3)` trains in this process, by the sample's run file."""
    from dstool.config import load
    from dstool.ds_config.options import Options
    from dstool.init_config import init_config
    from dstool.train import train

    def go(*words: str, stage: int = 2, offload: str = "none", **options: Any) -> Any:
        if not (here / "dstool.yaml").exists():
            init_config(Options(stage=stage, offload=offload))  # type: ignore[arg-type]
        return train(load(words=words).config, **options)

    return go


@pytest.fixture
def as_nobody() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as a user that is not root, and that has no home; skips where that cannot be."""
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        pytest.skip("another user is needed")

    def start(*argv: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        if "No module named" in done.stderr or "setpriv" in done.stderr:
            pytest.skip("another user may not read dstool itself")
        return done

    return start
