"""What a model says through DeepSpeed's engine, against plain Transformers and against itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dstool.config import Config, load
from dstool.consolidate import consolidate
from dstool.errors import ConfigError, DstoolError, InputError, ModelError, NoDevice
from dstool.infer import InferResult, infer, newest_model
from dstool.merge import merge

TEXTS = (
    "a lamp",
    "the worst kettle, it leaks and it leaks",
    "fine cups",
    "배송이 빠르고 좋아요",
    "x",
    "broken",
)
LABELS = {0: "나쁨", 1: "so so", 2: "좋음"}
SPREAD = {"initializer_range": 0.5}
"""Weights so large that a token more or less, padding among them, changes what comes out."""


@pytest.fixture
def classifier(tiny: Callable[..., Path]) -> Callable[..., Path]:
    """`classifier("gpt2")`: the folder of a tiny classifier of three classes with random weights."""

    def make(kind: str, **options: Any) -> Path:
        folder = tiny(kind, **SPREAD)
        values = {"id2label": LABELS, "label2id": {name: index for index, name in LABELS.items()}, **options}
        torch.manual_seed(1)
        auto = transformers.AutoModelForSequenceClassification
        auto.from_pretrained(folder, **values).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def llama(tiny: Callable[..., Path]) -> Path:
    """The folder of a tiny Llama."""
    return tiny("llama", **SPREAD)


def settings(*words: str) -> Config:
    """What a run file says; at most six tokens are generated."""
    return load(words=["infer.max_new_tokens=6", *(f"infer.{word}" for word in words)], required=False).config


def ask(model: Path, *texts: str, words: tuple[str, ...] = ()) -> InferResult:
    return infer(texts or TEXTS, settings(*words), model=model)


def refusal(error: type[DstoolError], *arguments: Any, **options: Any) -> DstoolError:
    """What `infer` raises: one line, and what to do."""
    with pytest.raises(error) as caught:
        ask(*arguments, **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


# --- classifiers -------------------------------------------------------------------------------------


def by_transformers(folder: Path, text: str) -> tuple[str, float]:
    """The likeliest label of one text and its probability, without dstool and DeepSpeed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        chances = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
    return model.config.id2label[int(chances.argmax())], float(chances.max())


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("bert", {}), ("gpt2", {}), ("gpt2", {"pad_token_id": 5}), ("llama", {"pad_token_id": 0})],
)
def test_I14_a_batch_of_texts_of_unequal_length_equals_plain_transformers_one_by_one(
    kind: str, options: dict[str, Any], batch: int, classifier: Callable[..., Path]
) -> None:
    """Also where the config names no padding token, or another one than the tokenizer pads with."""
    folder = classifier(kind, **options)
    result = ask(folder, words=(f"batch_size={batch}",))
    expected = [by_transformers(folder, text) for text in TEXTS]
    assert [each.text for each in result.predictions] == list(TEXTS)
    assert [each.label for each in result.predictions] == [label for label, _ in expected]
    assert [each.probability for each in result.predictions] == pytest.approx(
        [probability for _, probability in expected], abs=1e-5
    )
    assert len({round(probability, 4) for _, probability in expected}) > 3
    assert (result.model, result.device, result.dtype) == (folder, "cpu", "fp32")


SEVERAL = {"problem_type": "multi_label_classification"}
ONE = {"id2label": {0: "score"}, "label2id": {"score": 0}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (SEVERAL, "several"),
        ({**SEVERAL, **ONE}, "several"),
        (ONE, "number"),
        ({**ONE, "problem_type": "regression"}, "number"),
    ],
)
def test_what_the_outputs_mean_is_the_models_own(
    options: dict[str, Any], problem: str, classifier: Callable[..., Path]
) -> None:
    folder = classifier("bert", **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for each in ask(folder).predictions:
        with torch.no_grad():
            logits = model(**tokenizer(each.text, return_tensors="pt")).logits[0]
        if problem == "several":
            assert each.probability == pytest.approx(float(logits.sigmoid().max()), abs=1e-5)
            assert (each.label, each.value) == (model.config.id2label[int(logits.argmax())], None)
        else:
            assert (each.label, each.probability) == (None, None)
            assert each.value == pytest.approx(float(logits[0]), abs=1e-5)


def test_several_numbers_are_refused(classifier: Callable[..., Path]) -> None:
    folder = classifier("bert", problem_type="regression")
    assert "gives 3 numbers" in refusal(ModelError, folder).message


def test_a_number_is_shown_beside_its_text(
    classifier: Callable[..., Path], here: Path, command: Callable[..., Any]
) -> None:
    folder = classifier("bert", **ONE)
    done = command("dstool", "infer", "--model", str(folder), "--text", TEXTS[0], cwd=here)
    assert done.out == f"{ask(folder, TEXTS[0]).predictions[0].value:.3f}  {TEXTS[0]}\n"


@pytest.mark.distributed
def test_a_trained_model_says_what_the_pipeline_says(trained: Path) -> None:
    result = ask(trained / "out")
    pipeline = transformers.pipeline("text-classification", model=str(trained / "out"), device="cpu")
    for each, expected in zip(result.predictions, pipeline(list(TEXTS)), strict=True):
        assert (each.label, each.probability) == (expected["label"], pytest.approx(expected["score"]))


@pytest.mark.parametrize("limit", [None, 4])
def test_a_long_text_is_read_up_to_the_limit(limit: int | None, classifier: Callable[..., Path]) -> None:
    """Byte by byte: the two texts differ after the 64th position of the model, or the 4th."""
    folder = classifier("gpt2")
    start = "q" * (limit or 64)
    words = (f"max_length={limit}",) if limit else ()
    one, other, third = ask(folder, f"{start}qqq", f"{start}zzzz", "z" * 80, words=words).predictions
    assert one.probability == pytest.approx(other.probability)
    assert one.probability != pytest.approx(third.probability)


# --- generators --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [1, 8])
def test_I14_a_batch_continues_each_text_as_plain_transformers_does_alone(
    kind: str, batch: int, tiny: Callable[..., Path]
) -> None:
    folder = tiny(kind, **SPREAD)
    result = ask(folder, words=(f"batch_size={batch}",))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for each in result.predictions:
        ids = tokenizer(each.text, return_tensors="pt").input_ids
        with torch.no_grad():
            alone = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert each.generated == tokenizer.decode(alone, skip_special_tokens=True)
    assert len({each.generated for each in result.predictions}) > 3


def test_sampling_is_repeated_by_its_seed_and_leaves_greedy_alone(llama: Path) -> None:
    greedy = ask(llama).predictions
    sampled = ("do_sample=true", "temperature=2.0")
    first, again, other = (ask(llama, words=(*sampled, f"seed={seed}")).predictions for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != greedy == ask(llama, words=("temperature=2.0",)).predictions


@pytest.mark.parametrize(("limit", "read"), [(None, 58), (8, 8)])
def test_the_end_of_a_long_text_is_what_is_continued(limit: int | None, read: int, llama: Path) -> None:
    """Digits: each of them is a token."""
    words = (f"max_length={limit}",) if limit else ()
    end = "".join(str(n % 10) for n in range(read))
    one, other, shorter = ask(llama, end, f"{'Z' * 90}{end}", f"Z{end[1:]}", words=words).predictions
    assert one.generated == other.generated != shorter.generated


@pytest.mark.parametrize("count", [64, 200])
def test_I08_new_tokens_that_leave_no_room_for_the_text_are_refused(count: int, llama: Path) -> None:
    found = refusal(InputError, llama, words=(f"max_new_tokens={count}",))
    assert f"infer.max_new_tokens={count} leaves no room in 64 positions" in found.message
    assert found.hint == "infer.max_new_tokens=32"
    assert ask(llama, "z" * 90, words=("max_new_tokens=63",)).predictions[0].generated


@pytest.mark.parametrize("words", [(), ("do_sample=true",)])
@pytest.mark.parametrize(
    ("task", "weight"), [("classify", "classifier.bias"), ("continue", "lm_head.weight")]
)
def test_a_model_that_computes_no_numbers_is_refused(
    task: str, weight: str, words: tuple[str, ...], classifier: Callable[..., Path], llama: Path
) -> None:
    folder = classifier("bert") if task == "classify" else llama
    state = load_file(folder / "model.safetensors")
    state[weight] *= float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert "values that are no numbers" in refusal(ModelError, folder, words=words).message


# --- dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        ("fp16", None, "fp32"),
        ("bf16", None, "bf16"),
        ("fp32", None, "fp32"),
        ("fp32", "bf16", "bf16"),
        ("bf16", "fp32", "fp32"),
    ],
)
@pytest.mark.parametrize("task", ["classify", "continue"])
def test_I05_the_dtype_is_the_models_where_the_cpu_has_it(
    task: str, stored: Any, asked: str | None, used: str, classifier: Any, llama: Path, here: Path
) -> None:
    source = classifier("bert") if task == "classify" else llama
    merge(source, here / "merged", dtype=stored)
    result = ask(here / "merged", words=(f"dtype={asked}",) if asked else ())
    assert (result.device, result.dtype) == ("cpu", used)
    if task == "classify":
        exact = ask(source).predictions
        assert [each.probability for each in result.predictions] == pytest.approx(
            [each.probability for each in exact], abs=0.1
        )


def test_I05_fp16_on_the_cpu_is_refused(llama: Path) -> None:
    found = refusal(NoDevice, llama, words=("dtype=fp16",))
    assert found.exit_code == 4
    assert "bf16" in str(found.hint)


# --- pairs and chats ----------------------------------------------------------------------------------------


def test_a_pair_is_read_as_plain_transformers_does(classifier: Callable[..., Path]) -> None:
    folder = classifier("bert")
    seconds = tuple(f"second {n}" for n in range(len(TEXTS)))
    found = infer(TEXTS, settings(), model=folder, pairs=seconds).predictions
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for each, text, second in zip(found, TEXTS, seconds, strict=True):
        with torch.no_grad():
            chances = model(**tokenizer(text, second, return_tensors="pt")).logits[0].softmax(-1)
        assert (each.text, each.text_pair) == (text, second)
        assert each.probability == pytest.approx(float(chances.max()), abs=1e-5)
    assert [each.probability for each in found] != [each.probability for each in ask(folder).predictions]


def test_texts_that_make_no_pairs_are_refused(classifier: Callable[..., Path], llama: Path) -> None:
    for folder, pairs, said in [
        (classifier("bert"), ["one"], "6 --text and 1 --text-pair make no pairs"),
        (classifier("bert"), [*"abcde", ""], "a text is empty"),
        (llama, [*"abcdef"], "takes no --text-pair"),
    ]:
        with pytest.raises(DstoolError, match=said) as caught:
            infer(TEXTS, settings(), model=folder, pairs=pairs)
        assert caught.value.hint


def test_a_model_of_pairs_that_is_asked_one_text_is_warned_of(
    classifier: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = classifier("bert")
    (folder / "run.json").write_text('{"rows": "pairs"}')
    ask(folder)
    assert "was trained on pairs of texts: --text-pair gives the second" in caplog.text


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatty(llama: Path) -> Path:
    """The folder of a tiny Llama with a chat template."""
    (llama / "chat_template.jinja").write_text(TEMPLATE)
    return llama


def said(folder: Path, text: str, *words: str) -> str | None:
    return ask(folder, text, words=words).predictions[0].generated


@pytest.mark.parametrize("rows", [None, "texts", "messages"])
@pytest.mark.parametrize("given", [None, True, False])
def test_a_model_of_messages_is_asked_in_its_template_unless_told_otherwise(
    given: bool | None, rows: str | None, chatty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if rows:
        (chatty / "run.json").write_text(json.dumps({"rows": rows}))
    caplog.set_level("INFO", "dstool")
    found = ask(chatty, "a lamp", words=(f"chat={str(given).lower()}",) if given is not None else ())
    chat = rows == "messages" if given is None else given
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatty)
    model = transformers.AutoModelForCausalLM.from_pretrained(chatty).eval()
    text = "<user>a lamp<end><assistant>" if chat else "a lamp"
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)
    out = model.generate(**encoded, max_new_tokens=6, do_sample=False, pad_token_id=0)[
        0, encoded.input_ids.shape[1] :
    ]
    assert found.chat == chat
    assert found.predictions[0].generated == tokenizer.decode(out, skip_special_tokens=True)
    assert ("--chat asks it that way" in caplog.text) == (given is None and rows is None)


def test_the_record_of_the_run_is_found_from_its_checkpoints(chatty: Path, here: Path) -> None:
    (here / "run.json").write_text('{"rows": "messages"}')
    for place in ("checkpoint-1", "consolidated/checkpoint-1"):
        assert ask(Path(shutil.copytree(chatty, here / place)), "a lamp").chat


def test_a_long_text_is_cut_and_its_template_is_not(chatty: Path) -> None:
    """Digits: each of them is a token, as each letter of the template is."""
    end = "".join(str(n % 10) for n in range(9))
    frame = "<user><end><assistant>"
    limit = 9 + len(transformers.AutoTokenizer.from_pretrained(chatty)(frame).input_ids)
    words = ("chat=true", f"max_length={limit}", "max_new_tokens=6")
    assert said(chatty, f"{'Z' * 90}{end}", *words) == said(chatty, end, *words)


def test_a_chat_without_a_template_is_refused(llama: Path) -> None:
    assert refusal(ConfigError, llama, words=("chat=true",)).hint == "--no-chat"
    (llama / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    found = refusal(ModelError, llama, words=("chat=true",))
    assert "no system message" in found.message


@pytest.mark.distributed
def test_a_run_on_conversations_answers_in_its_template(
    tiny: Callable[..., Path], write: Callable[..., Path], train_here: Callable[..., Any]
) -> None:
    model = tiny("llama")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "a lamp?"}, {"role": "assistant", "content": "warm light"}]
    write("chats.jsonl", *[json.dumps({"messages": turns})] * 60)
    run = train_here(
        *(f"model.name={model}", "model.from_scratch=null", "model.task=causal-lm", "data.train=chats.jsonl"),
        *("data.text_column=messages", "data.block_size=32", "train.max_steps=1", "train.save_strategy=no"),
    )
    assert ask(run.output_dir, "a lamp?").chat
    merged = merge(run.output_dir, run.output_dir.parent / "merged").output_dir
    assert "conversational" in (merged / "README.md").read_text()
    assert ask(merged, "a lamp?").chat


@pytest.mark.parametrize(
    "text",
    [
        "",
        "---\ntags: [conversational]\n---\n",
        "---\ntags: other\n---\n",
        "---\n: [\n---\n",
        "---\n- 1\n---\n",
    ],
)
def test_a_model_card_says_whether_to_ask_in_the_template(text: str, chatty: Path) -> None:
    (chatty / "README.md").write_text(text)
    assert ask(chatty, "a lamp?").chat == ("conversational" in text)


# --- which model -------------------------------------------------------------------------------------------


def test_without_a_model_yet_the_hint_says_how_to_get_one(here: Path) -> None:
    with pytest.raises(ModelError, match="out holds no model yet") as caught:
        infer(TEXTS, settings())
    assert "dstool train" in str(caught.value.hint)
    (here / "out/checkpoint-2/global_step2").mkdir(parents=True)
    with pytest.raises(ModelError) as caught:
        infer(TEXTS, settings())
    assert caught.value.hint == "dstool consolidate out/checkpoint-2"


def test_the_newest_weights_of_the_run_are_taken_unless_another_is_named(llama: Path, here: Path) -> None:
    words = ["merge.output_dir=merged", "consolidate.output_dir=gathered"]
    config = load(words=words, required=False).config
    places = [here / name for name in ("out", "out/consolidated/checkpoint-1", "gathered", "merged")]
    for age, place in enumerate(places):
        shutil.copytree(llama, place)
        os.utime(place / "model.safetensors", (1000 + age, 1000 + age))
        assert newest_model(config).resolve() == place
    (here / "merged/config.json").unlink()
    assert newest_model(config) == Path("gathered")
    os.utime(here / "out/model.safetensors", (5000, 5000))
    assert newest_model(config) == Path("out")
    assert newest_model(load(words=[*words, "infer.model=merged"], required=False).config) == Path("merged")


def lose_a_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop("model.norm.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def resize(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 41}))


def add_tokens(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)


def lose_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no such folder"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.touch()), "is a file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no tokenizer": (lose_tokenizer, "no tokenizer in the folder"),
    "tokens beyond the rows": (add_tokens, "the tokenizer has 301 tokens, the model's vocab_size is 300"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "the model cannot be loaded"),
    "an empty file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "the model cannot be loaded",
    ),
    "a weight missing": (lose_a_weight, "1 missing keys among its weights, model.norm.weight is one"),
    "weights of another shape": (resize, "6 mismatched keys among its weights, model.layers.0.mlp."),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused(case: str, llama: Path) -> None:
    change, said = BROKEN[case]
    change(llama)
    assert said in refusal(ModelError, llama).message


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.distributed
def test_a_consolidated_checkpoint_answers(form: Any, trained: Path, here: Path) -> None:
    folder = consolidate(
        trained / "out/checkpoint-16", here / "weights", file_format=form, max_shard_size="300KB"
    ).output_dir
    assert ask(folder).predictions == ask(trained / "out").predictions


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ((), "there is no text"),
        (("",), "a text is empty"),
        (("a lamp", " \n"), "a text is empty"),
        (("a lamp", "\udcc1\udcc1"), "is no Unicode text"),
    ],
)
def test_what_is_no_text_is_refused(texts: tuple[str, ...], said: str, llama: Path) -> None:
    with pytest.raises(InputError, match=said):
        infer(texts, settings(), model=llama)


@pytest.mark.distributed
def test_I19_a_generator_works_in_the_process_that_trained_at_stage_3(
    llama: Path, language_words: tuple[str, ...], train_here: Callable[..., Any]
) -> None:
    """A live HfDeepSpeedConfig would leave every weight of the next model partitioned."""
    before = ask(llama).predictions
    run = train_here(
        f"model.name={llama}", *language_words, "train.max_steps=2", "train.save_strategy=no", stage=3
    )
    assert not transformers.integrations.is_deepspeed_zero3_enabled()
    assert ask(llama).predictions == before
    assert all(each.generated is not None for each in ask(run.output_dir).predictions)


# --- as typed ------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_a_classifier_answers_with_label_probability_and_text(
    trained: Path, command: Callable[..., Any]
) -> None:
    done = command("dstool", "infer", "--text", TEXTS[0], "--text", TEXTS[3], cwd=trained)
    expected = ask(trained / "out", TEXTS[0], TEXTS[3]).predictions
    assert done.out == "".join(f"{each.label}  {each.probability:.3f}  {each.text}\n" for each in expected)


def test_a_generator_answers_with_the_text_and_what_follows(
    llama: Path, here: Path, command: Callable[..., Any]
) -> None:
    argv = ("dstool", "infer", "--model", str(llama), "--max-new-tokens", "6", "--text", TEXTS[0])
    (expected,) = ask(llama, TEXTS[0]).predictions
    assert command(*argv, cwd=here).out == f"{TEXTS[0]}{expected.generated}\n"


def test_json_is_one_object(llama: Path, here: Path, command: Callable[..., Any]) -> None:
    shutil.copytree(llama, here / "model")
    argv = ("dstool", "infer", "--model", "model", "--max-new-tokens", "6", "--text", TEXTS[3], "--json")
    found = command(*argv, cwd=here).json()
    seconds = found.pop("seconds")
    assert isinstance(seconds, float)
    assert found == {
        "model": str(here / "model"),
        "device": "cpu",
        "dtype": "fp32",
        "chat": False,
        "predictions": [
            {
                "text": TEXTS[3],
                "text_pair": None,
                "label": None,
                "probability": None,
                "value": None,
                "generated": ask(llama, TEXTS[3]).predictions[0].generated,
            }
        ],
    }


def test_I05_fp16_on_the_cpu_ends_with_4(llama: Path, here: Path, command: Callable[..., Any]) -> None:
    argv = ("dstool", "infer", "--model", str(llama), "--dtype", "fp16", "--text", "a lamp")
    done = command(*argv, cwd=here, code=4)
    assert done.err.startswith("error: fp16 needs a GPU")
