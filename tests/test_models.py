"""Tokenizers and models as they are loaded for training and inference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dstool import models
from dstool.config import ModelSection
from dstool.errors import ModelError


def tokenizer_of(**section: Any) -> Any:
    return models.load_tokenizer(ModelSection(**section), lambda: iter(()))


# --- tokenizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("left", [(), ("tokenizer_config.json", "special_tokens_map.json")])
def test_a_folder_without_a_tokenizer_is_refused_rather_than_given_an_empty_one(
    kind: str, left: tuple[str, ...], here: Path
) -> None:
    transformers.AutoConfig.for_model(kind).save_pretrained(here / "model")
    for name in left:
        (here / "model" / name).write_text("{}")
    with pytest.raises(ModelError, match=r"^model: no tokenizer in the folder$") as caught:
        tokenizer_of(name="model")
    assert "model.tokenizer=" in str(caught.value.hint)


def test_another_folder_gives_the_tokenizer_that_the_model_lacks(
    tiny: Callable[..., Path], here: Path
) -> None:
    transformers.AutoConfig.for_model("bert").save_pretrained(here / "model")
    assert len(tokenizer_of(name="model", tokenizer=str(tiny("bert")))) > 200


def test_a_tokenizer_of_bytes_needs_no_vocabulary(here: Path) -> None:
    transformers.AutoConfig.for_model("t5").save_pretrained(here / "model")
    config = here / "model/tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    assert tokenizer_of(name="model")("ab")["input_ids"][:2] == [100, 101]


# --- lengths -----------------------------------------------------------------------------------------


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        ("roberta", {"max_position_embeddings": 514}, 512),
        ("roberta", {"max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ("xlm-roberta", {"max_position_embeddings": 514}, 512),
        ("mpnet", {"max_position_embeddings": 514}, 512),
        ("bert", {"max_position_embeddings": 512}, 512),
        ("llama", {"max_position_embeddings": 64}, 64),
    ],
)
def test_a_text_of_the_longest_length_has_a_position_for_every_token(
    kind: str, options: dict[str, int], limit: int, tokenizer: Any
) -> None:
    config = transformers.AutoConfig.for_model(kind, vocab_size=300, **SMALL, **options)
    model = transformers.AutoModel.from_config(config)
    assert models.length_limit(tokenizer, model, 1000) == limit
    assert models.length_limit(tokenizer, model, 40) == 40
    model(input_ids=torch.full((1, limit), 7))
