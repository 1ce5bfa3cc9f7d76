"""The model card of a merged model, and the push to a hub: a small server that speaks as the hub does."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from dstool.card import hub_name
from dstool.errors import ConfigError, EnvironmentUnfit
from dstool.merge import merge

RUN = {
    "model": {"task": "causal-lm", "name": "org/base-1"},
    "data": {"train": "org/stories", "hub_config": "plain", "hub_eval_split": "validation"},
    "train": {"output_dir": "/home/somebody/out", "learning_rate": 0.001, "num_train_epochs": 2},
    "deepspeed": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4},
}
RECORD = {
    "versions": {"deepspeed": "0.19.8"},
    "output_dir": "/home/somebody/out",
    "steps": 16,
    "metrics": {"loss": 2.0, "perplexity": 7.389},
    "world_size": 2,
    "precision": "bf16",
    "stage": 3,
    "best": None,
}


@pytest.fixture
def run(tiny: Callable[..., Path], here: Path) -> Callable[..., Path]:
    """`run({"data": {...}})`: the folder of a finished run, as `train` leaves it, with these sections."""

    def make(sections: dict[str, Any] | None = None, **record: Any) -> Path:
        shutil.copytree(tiny("llama"), here / "out")
        (here / "out/dstool.yaml").write_text(yaml.safe_dump({**RUN, **(sections or {})}))
        (here / "out/run.json").write_text(json.dumps({**RECORD, **record}))
        return here / "out"

    return make


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """The front matter as the hub reads it, and the text below."""
    card = ModelCard.load(folder / "README.md")
    return yaml.safe_load(card.content.split("---")[1]), card.text


# --- what is written ---------------------------------------------------------------------------------


def test_the_card_of_a_run(run: Callable[..., Path], here: Path) -> None:
    merge(run(), here / "merged")
    data, text = card_of(here / "merged")
    (results,) = data.pop("model-index")
    assert data == {
        "base_model": "org/base-1",
        "datasets": ["org/stories"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["deepspeed"],
        "metrics": ["perplexity"],
    }
    assert results["name"] == "merged"
    (result,) = results["results"]
    assert result["dataset"] == {
        "name": "org/stories",
        "type": "org/stories",
        "config": "plain",
        "split": "validation",
    }
    assert {each["type"]: each["value"] for each in result["metrics"]} == RECORD["metrics"]
    for row in (
        "| ZeRO stage | 3 |",
        "| precision | bf16 |",
        "| optimizer | adamw_torch_fused |",
        "| learning rate | 0.001 |",
        "| batch per step | 8: 4 x 1 accumulated x 2 ranks |",
        "| epochs | 2 |",
        "| steps | 16 |",
        "| seed | 42 |",
    ):
        assert row in text
    assert "\n".join(["```python", "from transformers import pipeline", ""]) in text
    snippet = text.split("```python\n")[1].split("```")[0].replace('"..."', '"a lamp", max_new_tokens=2')
    exec(compile(snippet, "card", "exec"), {})


def test_nothing_of_this_machine_stands_in_it(run: Callable[..., Path], here: Path) -> None:
    (here / "private").mkdir()
    (here / "rows.csv").write_text("text\na\n")
    sections = {
        "model": {"task": "causal-lm", "name": str(here / "private")},
        "data": {"train": [str(here / "rows.csv")], "eval": str(here / "rows.csv")},
        "train": {**RUN["train"], "hub_token": "hf_secret", "run_name": "hf_secret"},
        "deepspeed": str(here / "gone.json"),
    }
    merge(run(sections), here / "merged")
    data, text = card_of(here / "merged")
    assert not data.keys() & {"base_model", "datasets", "language"}
    assert data["model-index"][0]["results"][0]["dataset"] == {"name": "held-out rows", "type": "other"}
    whole = (here / "merged/README.md").read_text()
    assert not any(word in whole for word in (str(here), "/home", "hf_secret", "private", "rows.csv", ".tmp"))
    assert "a model that is not on the hub" in text
    assert "| learning rate | 0.001 |" in text


@pytest.mark.parametrize("place", ["checkpoint-8", "consolidated/checkpoint-8"])
def test_another_checkpoint_than_the_last_has_the_metrics_of_its_step(
    place: str, run: Callable[..., Path], tiny: Callable[..., Path], here: Path
) -> None:
    out = run()
    shutil.copytree(tiny("llama"), out / place)
    log = [
        {"step": 8, "loss": 3.5},
        {"step": 8, "eval_loss": 3.0, "eval_runtime": 1.0},
        {"step": 16, "eval_loss": 2},
    ]
    (out / "checkpoint-8").mkdir(exist_ok=True)
    (out / "checkpoint-8/trainer_state.json").write_text(json.dumps({"log_history": log}))
    merge(out / place, here / "merged")
    data, text = card_of(here / "merged")
    (result,) = data["model-index"][0]["results"]
    assert [(each["type"], each["value"]) for each in result["metrics"]] == [("loss", 3.0)]
    assert "| steps | 8 |" in text
    assert "epochs" not in text


def test_a_sample_gives_the_language(run: Callable[..., Path], here: Path) -> None:
    merge(run({"data": {"train": "sample:reviews_ko"}}), here / "merged")
    data, text = card_of(here / "merged")
    assert (data["language"], "datasets" in data) == ("ko", False)
    assert "the sample reviews_ko" in text


def test_a_card_of_the_source_is_kept(run: Callable[..., Path], here: Path) -> None:
    out = run()
    (out / "README.md").write_text("# 내 모델\n", encoding="utf-8")
    merge(out, here / "merged")
    merge(out, here / "merged", force=True)
    assert (here / "merged/README.md").read_text(encoding="utf-8") == "# 내 모델\n"


def test_the_empty_form_that_peft_saves_is_no_card(run: Callable[..., Path], here: Path) -> None:
    out = run()
    (out / "README.md").write_text(
        f"---\nbase_model: {here}\n---\n- **License:** [More Information Needed]\n"
    )
    merge(out, here / "merged")
    assert card_of(here / "merged")[0]["base_model"] == "org/base-1"


@pytest.mark.parametrize("lost", ["world_size", "stage", "precision", "steps"])
def test_a_record_that_lacks_something_gives_no_card(lost: str, run: Callable[..., Path], here: Path) -> None:
    out = run()
    (out / "run.json").write_text(json.dumps({key: value for key, value in RECORD.items() if key != lost}))
    merge(out, here / "merged")
    assert not (here / "merged/README.md").exists()


@pytest.mark.parametrize("broken", [None, "run.json", "dstool.yaml"])
def test_no_card_is_made_up(broken: str | None, run: Callable[..., Path], tiny: Any, here: Path) -> None:
    source = run() if broken else tiny("llama")
    if broken:
        (source / broken).write_text("[")
    merge(source, here / "merged")
    assert not (here / "merged/README.md").exists()


def test_a_model_folder_inside_a_run_is_not_taken_for_the_runs(
    run: Callable[..., Path], tiny: Callable[..., Path], here: Path
) -> None:
    shutil.copytree(tiny("gpt2"), run() / "other")
    merge(here / "out/other", here / "merged")
    assert not (here / "merged/README.md").exists()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("org/model", True),
        ("gpt2", True),
        ("/home/model", False),
        ("./model", False),
        ("a/b/c", False),
        (None, False),
    ],
)
def test_what_is_a_name_on_the_hub(name: str | None, known: bool) -> None:
    assert hub_name(name) == (name if known else None)


# --- the push ----------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of the hub's HTTP as a push needs; `files` holds what was committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.failing = ""
        self.there: bool | None = None
        """Whether the repository that is there is private; None where there is none."""
        self.asked: dict[str, Any] = {}
        """What was asked for the new repository."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer({})

    def do_GET(self) -> None:
        token = self.headers.get("authorization") == "Bearer hf_right"
        if self.path.startswith("/api/models/"):
            self._answer_of_model(self.path.removeprefix("/api/models/"))
            return
        self._answer(
            {"type": "user", "name": "org"} if token else {"error": "Invalid"}, 200 if token else 401
        )

    def _answer_of_model(self, name: str) -> None:
        if self.server.failing == "info":
            self._answer({"error": "out of order"}, 400)
        elif self.server.there is None or name != "org/m":
            self._answer({"error": "not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        else:
            self._answer({"id": name, "private": self.server.there})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.failing and self.server.failing in self.path:
            self._answer({"error": "the store is full"}, 403)
        elif self.path == "/api/repos/create":
            self.server.asked = json.loads(body)
            self._answer({"url": f"{self.server.url}/org/{self.server.asked['name']}"})
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            self._answer(
                {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"{self.server.url}/org/m/commit/1", "commitOid": "1"})
        else:
            self._answer({"errors": [], "warnings": []})

    def _answer(self, value: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, as the hub of this process, and a token that it takes."""
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_uploads_the_folder_with_its_card(hub: Hub, run: Callable[..., Path], here: Path) -> None:
    result = merge(run(), here / "merged", push_to_hub="org/m")
    assert result.pushed_to == f"{hub.url}/org/m"
    assert hub.files == {file.name: file.read_bytes() for file in (here / "merged").iterdir()}
    assert 'model="org/m"' in hub.files["README.md"].decode()


@pytest.mark.parametrize("private", [True, False])
def test_a_new_repository_is_private_where_that_is_asked_for(
    private: bool, hub: Hub, run: Callable[..., Path], here: Path
) -> None:
    merge(run(), here / "merged", push_to_hub="org/m", private=private)
    asked = hub.asked.get("visibility", hub.asked.get("private"))  # older clients send the second
    assert asked in (("private", True) if private else (None,))


@pytest.mark.parametrize("repo", ["org/m", "m"])
def test_what_is_to_be_private_is_not_pushed_to_a_public_repository(
    repo: str, hub: Hub, run: Callable[..., Path], here: Path
) -> None:
    out = run()
    hub.there = False
    with pytest.raises(ConfigError, match=f"{repo}: that repository is there and public"):
        merge(out, here / "merged", push_to_hub=repo, private=True)
    assert not (here / "merged").exists()
    hub.there = True
    assert merge(out, here / "merged", push_to_hub=repo, private=True).pushed_to
    assert hub.files


def test_private_without_a_push_or_an_answer_is_refused(
    hub: Hub, run: Callable[..., Path], here: Path
) -> None:
    out = run()
    with pytest.raises(ConfigError, match="--private is for a new repository") as caught:
        merge(out, here / "merged", private=True)
    assert caught.value.hint == "--push-to-hub OWNER/NAME --private"
    hub.failing = "info"
    with pytest.raises(EnvironmentUnfit, match="does not say whether org/m is private"):
        merge(out, here / "merged", push_to_hub="org/m", private=True)
    assert not (here / "merged").exists()


@pytest.mark.parametrize("step", ["create", "preupload", "commit"])
def test_a_push_that_fails_leaves_the_folder(
    step: str, hub: Hub, run: Callable[..., Path], here: Path
) -> None:
    hub.failing, out = step, run()
    with pytest.raises(
        EnvironmentUnfit, match=r"merged is written, and could not be pushed to org/m: "
    ) as caught:
        merge(out, here / "merged", push_to_hub="org/m")
    assert caught.value.hint == f"hf upload org/m {here / 'merged'}"
    assert "\n" not in caught.value.message
    assert (here / "merged/model.safetensors").is_file()


@pytest.mark.parametrize("repo", ["a/b/c", "", "-m", "내/모델", "org/m.git", "./m"])
def test_a_name_that_no_repository_has_is_refused(repo: str, run: Callable[..., Path], here: Path) -> None:
    out = run()
    with pytest.raises(ConfigError) as caught:
        merge(out, here / "merged", push_to_hub=repo)
    assert caught.value.hint == "--push-to-hub NAME or --push-to-hub OWNER/NAME"
    assert not (here / "merged").exists()


@pytest.mark.parametrize(
    ("what", "said", "hint"),
    [
        ("offline", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or leave --push-to-hub out"),
        ("silent", "cannot be reached", "mend the network, or leave --push-to-hub out"),
        ("no token", "there is no token", "hf auth login"),
        ("wrong token", "does not take the token", "hf auth login --force"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_any_work(
    what: str, said: str, hint: str, hub: Hub, run: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    elif what == "silent":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    elif what == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    else:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(here / "none"))
    out = run()
    with pytest.raises(EnvironmentUnfit, match=said) as caught:
        merge(out, here / "merged", push_to_hub="org/m")
    assert (caught.value.exit_code, caught.value.hint) == (4, hint)
    assert "\n" not in caught.value.message
    assert not (here / "merged").exists()
