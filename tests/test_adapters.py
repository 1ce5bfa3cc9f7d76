"""Adapters of many kinds added to their base models, held against what peft computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from dstool.errors import CheckpointError, ModelError
from dstool.merge import merge

IDS = torch.arange(1, 13)[None]
MANY = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
EXPERTS = {**MANY, "num_experts_per_tok": 2, "max_position_embeddings": 64}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {**MANY, "intermediate_size": 37, "max_position_embeddings": 64},
    "qwen2": {**MANY, "intermediate_size": 37, "max_position_embeddings": 64},
    "bert": {**MANY, "intermediate_size": 37},
    "mixtral": {**EXPERTS, "intermediate_size": 24, "num_local_experts": 3},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 24, "num_experts": 3, "head_dim": 8},
}
TIED = {"tie_word_embeddings": True}
CAUSAL, CLASSIFIER = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification


def base_model(
    folder: Path, kind: str, auto: Any = CAUSAL, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """A model with random weights, none of them 0 or 1, in many shards."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=120, pad_token_id=0, bos_token_id=1, eos_token_id=2, **{**SIZES[kind], **options}
    )
    model = auto.from_config(config)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.05
    model.to(dtype).save_pretrained(folder / "base", max_shard_size="20KB")
    return folder / "base"


def trained(model: Any, settings: Any, name: str = "default") -> Any:
    """`model` with an adapter in which everything that is trained has learned something."""
    torch.manual_seed(1)
    made = get_peft_model(model, settings, adapter_name=name)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape) * 0.1
    return made.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def lora(*targets: str, **settings: Any) -> LoraConfig:
    values = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": list(targets), **settings}
    return LoraConfig(**values)


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`adapter("llama", lora("q_proj"))`: the folder of an adapter, and peft's model with it."""

    def make(
        kind: str, settings: Any, rows: int | None = None, saved: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Path, Any]:
        folder = base_model(tmp_path, kind, **options)
        model = CAUSAL.from_pretrained(folder)
        if rows:
            model.resize_token_embeddings(rows)
        whole = trained(model, settings)
        whole.save_pretrained(tmp_path / "adapter", **(saved or {}))
        return tmp_path / "adapter", whole

    return make


SAME = {
    "gpt2, whose linear layers are transposed": ("gpt2", lora("c_attn", "c_proj", fan_in_fan_out=True), {}),
    "gpt2, its tied embedding": ("gpt2", lora("c_attn", "wte"), {}),
    "grouped queries": ("llama", lora("q_proj", "k_proj", "v_proj", "down_proj"), {}),
    "all-linear": ("llama", lora(target_modules="all-linear", exclude_modules=["down_proj"]), TIED),
    "some layers": ("llama", lora("q_proj", "v_proj", layers_to_transform=[1]), {}),
    "embeddings": ("llama", lora("q_proj", "embed_tokens", "lm_head"), {}),
    "one of two tied": ("llama", lora("q_proj", "embed_tokens"), TIED),
    "the other of two tied": ("llama", lora("q_proj", "lm_head"), TIED),
    "kept tied": ("llama", lora("q_proj", "embed_tokens", ensure_weight_tying=True), TIED),
    "a head in full": ("llama", lora("q_proj", modules_to_save=["lm_head"]), {}),
    "a tied head in full": ("llama", lora("q_proj", modules_to_save=["lm_head"]), TIED),
    "layers in full": ("llama", lora("q_proj", modules_to_save=["input_layernorm", "mlp"]), {}),
    "tokens": ("llama", lora("q_proj", trainable_token_indices=[3, 7, 5]), {}),
    "tied tokens": ("llama", lora("q_proj", trainable_token_indices=[3, 7, 5]), TIED),
    "tokens of both": (
        "llama",
        lora("q_proj", trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [9, 2]}),
        TIED,
    ),
    "resized": ("llama", lora("q_proj"), {"rows": 133}),
    "resized, tied": ("llama", lora("q_proj"), {"rows": 133, **TIED}),
    "resized beneath an adapter": ("llama", lora("q_proj", "embed_tokens"), {"rows": 133, **TIED}),
    "resized in full": ("llama", lora("q_proj", modules_to_save=["embed_tokens", "lm_head"]), {"rows": 133}),
    "new tokens": ("llama", lora("q_proj", trainable_token_indices=[121, 122]), {"rows": 133}),
    "patterns": (
        "llama",
        lora(
            *("q_proj", "k_proj", "down_proj"),
            use_rslora=True,
            rank_pattern={"k_proj": 2, "layers.1.self_attn.q_proj": 7},
            alpha_pattern={"down_proj": 11, "^model.layers.0.self_attn.q_proj": 3},
        ),
        {},
    ),
    "all biases": ("qwen2", lora("q_proj", "v_proj", bias="all"), {}),
    "biases of its own": ("qwen2", lora("q_proj", "v_proj", bias="all", lora_bias=True), {}),
    "dora": ("qwen2", lora("q_proj", "down_proj", use_dora=True, use_rslora=True), {}),
    "a file of torch": ("llama", lora("q_proj"), {"saved": {"safe_serialization": False}}),
    "parameters": ("gpt2", lora(target_parameters=["attn.c_proj.weight", "c_fc.weight"]), {}),
    "a router": ("mixtral", lora(target_parameters=["mlp.gate.weight"]), {}),
    "attention beside experts": ("qwen3_moe", lora("q_proj"), {}),
    "mica": ("llama", lora("q_proj", init_lora_weights="mica"), {}),
}


@pytest.mark.parametrize("case", SAME)
def test_the_sum_computes_what_peft_does(case: str, adapter: Callable[..., Any], tmp_path: Path) -> None:
    kind, settings, options = SAME[case]
    folder, whole = adapter(kind, settings, **options)
    merge(folder, tmp_path / "merged", dtype="fp32")
    merged, loading = CAUSAL.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading.values())
    torch.testing.assert_close(logits(merged.eval()), logits(whole), rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_head_of_a_classifier_comes_with_its_adapter(kind: str, tmp_path: Path) -> None:
    base = base_model(tmp_path, kind, auto=transformers.AutoModel)
    model = CLASSIFIER.from_pretrained(base, num_labels=5)
    whole = trained(model, lora("query", "q_proj", task_type="SEQ_CLS"))
    whole.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = CLASSIFIER.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), logits(whole), rtol=0, atol=5e-6)


def test_the_weights_are_those_of_peft_s_own_merging(adapter: Callable[..., Any], tmp_path: Path) -> None:
    folder, whole = adapter("llama", lora(target_modules="all-linear"))
    merge(folder, tmp_path / "merged", dtype="fp32")
    expected = whole.merge_and_unload().state_dict()
    found = CAUSAL.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """Within half a unit in the last place of the sum in 64 bits; but for the 32 bits that it is taken in."""
    base = base_model(tmp_path, "llama", dtype=dtype)
    whole = trained(CAUSAL.from_pretrained(base), lora("q_proj", "up_proj", trainable_token_indices=[7, 3]))
    whole.save_pretrained(tmp_path / "adapter")
    factors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert next(iter(factors.values())).dtype == torch.float32
    merge(tmp_path / "adapter", tmp_path / "merged")
    before, after = (CAUSAL.from_pretrained(folder).state_dict() for folder in (base, tmp_path / "merged"))
    for name in (f"model.layers.1.{end}" for end in ("self_attn.q_proj", "mlp.up_proj")):
        down, up = (factors[f"base_model.model.{name}.lora_{each}.weight"].double() for each in "AB")
        exact = before[f"{name}.weight"].double() + 6 / 4 * up @ down
        found = after[f"{name}.weight"]
        assert found.dtype == dtype
        kind = torch.finfo(dtype)
        unit = kind.eps * 2 ** exact.abs().clamp(min=kind.smallest_normal).log2().floor()
        assert ((found.double() - exact).abs() <= unit / 2 + 5e-8).all()
    rows = factors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(after["model.embed_tokens.weight"][[7, 3]], rows.to(dtype))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("mixtral", ["q_proj", "w1", "w2", "w3", "gate"]),
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_experts_that_an_earlier_transformers_trained_one_by_one(
    kind: str, targets: list[str], tmp_path: Path
) -> None:
    """It had a linear layer for each; the files still have a weight for each."""
    base, settings, state = base_model(tmp_path, kind), lora(*targets), {}
    for file in base.glob("*.safetensors"):
        for name, value in load_file(file).items():
            if name.split(".")[-2] in targets:
                module = f"base_model.model.{name.removesuffix('.weight')}"
                state[f"{module}.lora_A.weight"] = torch.randn(4, value.shape[1]) * 0.1
                state[f"{module}.lora_B.weight"] = torch.randn(value.shape[0], 4) * 0.1
    settings.base_model_name_or_path = str(base)
    settings.save_pretrained(tmp_path / "adapter")
    save_file(state, tmp_path / "adapter/adapter_model.safetensors")
    whole = PeftModel.from_pretrained(CAUSAL.from_pretrained(base), tmp_path / "adapter").eval()
    merge(tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    merged = CAUSAL.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), logits(whole), rtol=0, atol=5e-6)
    assert (logits(merged) - logits(CAUSAL.from_pretrained(base).eval())).abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (lora("q_proj", init_lora_weights="pissa"), "init_lora_weights=pissa"),
        (lora("q_proj", init_lora_weights="OLoRA"), "init_lora_weights=OLoRA"),
        (lora("q_proj", "embed_tokens", use_dora=True), "use_dora for an embedding"),
    ],
    ids=["pissa", "olora", "dora of an embedding"],
)
def test_what_peft_alone_merges_is_refused_with_the_command_that_does(
    settings: LoraConfig, said: str, adapter: Callable[..., Any], tmp_path: Path
) -> None:
    folder, whole = adapter("llama", settings)
    with pytest.raises(ModelError, match=said) as caught:
        merge(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    python, flag, code = (caught.value.hint or "").split(" ", 2)
    assert (python, flag) == ("python", "-c")
    subprocess.run([sys.executable, "-c", code.strip('"')], cwd=tmp_path, check=True, capture_output=True)
    merged = CAUSAL.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), logits(whole), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("kind", "settings", "said", "hint"),
    [
        (
            "gpt2",
            lora("c_attn", use_dora=True),
            "use_dora for transformer.h.0.attn.c_attn, a Conv1D",
            "python",
        ),
        ("llama", lora("q_proj", layer_replication=[(0, 2), (1, 2)]), "layer_replication", "peft runs it"),
        ("llama", lora("q_proj", lora_bias=True), "q_proj, which has none", "peft runs it"),
        ("llama", lora("q_proj", init_lora_weights="pissa_niter_2"), "pissa_niter_2", "path_initial_model"),
        (
            "mixtral",
            lora(target_parameters=["mlp.experts.gate_up_proj"]),
            r"parameters \(mlp.experts.gate_up_proj\)",
            "python",
        ),
    ],
)
def test_what_is_no_sum_of_products_is_refused(
    kind: str, settings: Any, said: str, hint: str, adapter: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = adapter(kind, settings)
    with pytest.raises(ModelError, match=said) as caught:
        merge(folder, tmp_path / "merged")
    assert (caught.value.hint or "").startswith(hint) or hint in (caught.value.hint or "")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("kind", "options", "hint"),
    [
        ("IA3", {"target_modules": ["q_proj"], "feedforward_modules": []}, "merge_and_unload"),
        ("AdaLora", {"target_modules": ["q_proj"], "total_step": 10}, "merge_and_unload"),
        ("PrefixTuning", {"num_virtual_tokens": 3}, "beside its base model"),
    ],
)
def test_an_adapter_of_another_method_is_refused_and_can_be_kept(
    kind: str, options: dict[str, Any], hint: str, adapter: Callable[..., Any], tmp_path: Path
) -> None:
    import peft

    folder, _ = adapter("llama", getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **options))
    with pytest.raises(ModelError, match="is an adapter of the kind") as caught:
        merge(folder, tmp_path / "merged")
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "merged").exists()
    merge(folder, tmp_path / "kept", keep_adapter=True)
    kept, before = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "kept", folder))
    assert all(torch.equal(kept[name], before[name]) for name in kept.keys() | before.keys())


def test_an_adapter_kept_as_it_is_of_a_kind_that_is_not_merged(
    adapter: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = adapter("llama", lora("q_proj", init_lora_weights="pissa"))
    merge(folder, tmp_path / "kept", keep_adapter=True)
    assert (tmp_path / "kept/adapter_model.safetensors").is_file()


def test_a_base_with_more_layers_than_the_adapter_was_trained_on(
    adapter: Callable[..., Any], tmp_path: Path
) -> None:
    """Of the same width, it would take the adapter for its first layers alone; peft does, with a warning."""
    folder, _ = adapter("llama", lora("q_proj"))
    more = base_model(tmp_path / "more", "llama", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"it lacks model.layers.2.self_attn.q_proj.lora_A.weight"):
        merge(folder, tmp_path / "merged", base_model=str(more))
    assert not (tmp_path / "merged").exists()


def test_a_head_that_was_resized_and_not_saved_is_missed(adapter: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = adapter("llama", lora("q_proj", "embed_tokens"), rows=133)
    with pytest.raises(ModelError, match=r"lm_head.weight is of shape \[120, 32\], and would have to be"):
        merge(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_tokenizer_of_more_tokens_than_the_sum_has_rows(
    adapter: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    folder, _ = adapter("llama", lora("q_proj"))
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"the tokenizer has \d+ tokens, the model's vocab_size is 120"):
        merge(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_name_lies_in_a_folder_of_that_name(tmp_path: Path) -> None:
    whole = trained(CAUSAL.from_pretrained(base_model(tmp_path, "llama")), lora("q_proj"), name="french")
    whole.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError) as caught:
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert caught.value.hint == f"dstool merge --input-dir {tmp_path}/adapter/french --output-dir DIR"
    merge(tmp_path / "adapter/french", tmp_path / "merged", dtype="fp32")
    merged = CAUSAL.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), logits(whole), rtol=0, atol=5e-6)


@pytest.mark.parametrize("part", ["lora_magnitude_vector", "lora_B.weight"])
def test_an_adapter_that_lacks_a_part_of_a_layer_is_refused(
    part: str, adapter: Callable[..., Any], tmp_path: Path
) -> None:
    """Without its lengths, DoRA would be taken for another adapter."""
    file = adapter("llama", lora("q_proj", use_dora=True))[0] / "adapter_model.safetensors"
    state = {name: value for name, value in load_file(file).items() if not name.endswith(part)}
    save_file(state, file)
    with pytest.raises(ModelError, match=f"has no {part.removesuffix('.weight')} for model.layers"):
        merge(file.parent, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_without_its_weights_is_named(adapter: Callable[..., Any], tmp_path: Path) -> None:
    folder, _ = adapter("llama", lora("q_proj"))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is missing"):
        merge(folder, tmp_path / "merged")


@pytest.mark.parametrize("options", [{}, TIED], ids=["untied", "tied"])
def test_a_base_in_a_file_of_torch(
    options: dict[str, Any], adapter: Callable[..., Any], tmp_path: Path
) -> None:
    folder, whole = adapter("llama", lora("q_proj"), **options)
    base = tmp_path / "base"
    state = CAUSAL.from_pretrained(base).state_dict()
    for file in base.glob("model*"):
        file.unlink()
    columns_first = {name: value.T.contiguous().T for name, value in state.items() if "q_proj" in name}
    torch.save(state | columns_first, base / "pytorch_model.bin")
    merge(folder, tmp_path / "merged", dtype="fp32")
    merged = CAUSAL.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), logits(whole), rtol=0, atol=5e-6)
