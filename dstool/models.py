"""Models and tokenizers: loading them for a task, and what has to lie beside their weights."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from dstool.checkpoint import companions, layout, reader
from dstool.checkpoint.reader import Entry, Weights
from dstool.config import LoraSection, ModelSection, Task
from dstool.ds_config.memory import ModelShape
from dstool.errors import CheckpointError, ConfigError, ModelError, NoDevice

logger = logging.getLogger("dstool.models")

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
AUTO_CLASSES: Mapping[Task, str] = {
    "text-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
}
UNKNOWN, END, SEPARATOR = "<unk>", "</s>", "<sep>"
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ImportError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    safetensors.SafetensorError,
    StrictDataclassError,
)
"""What Transformers and the formats beneath it raise over a file that is missing, damaged or unfit."""


# --- tokenizers ----------------------------------------------------------------------------------


def load_tokenizer(section: ModelSection, corpus: Callable[[], Iterator[str]]) -> Any:
    """The tokenizer named in the run file, the model's own, or one trained on `corpus`.

    Raises:
        ModelError: there is none under that name.
    """
    source = section.tokenizer or section.name
    if source is None:
        return _train_tokenizer(corpus(), vocab_size=_fresh_config(section).vocab_size)
    options = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    hint = "name the folder of its tokenizer: model.tokenizer=FOLDER_OR_HUB_NAME"
    return ensure_pad_token(read_tokenizer(source, hint=hint, **options))


def read_tokenizer(source: str | Path, *, hint: str, **options: Any) -> Any:
    """The tokenizer in the folder, or of the hub name, `source`.

    For a folder without one Transformers makes up one that knows nothing but the special tokens
    (`BertTokenizer.__init__`, models/bert/tokenization_bert.py, 5.24, and others), silently.

    Args:
        hint: what to do where the folder has no tokenizer.

    Raises:
        ModelError: there is none, or one that cannot be read.
    """
    path = Path(source)
    absent = path.is_dir() and not any(file for pattern in VOCABULARY_FILES for file in path.glob(pattern))
    missing = ModelError(f"{source}: no tokenizer in the folder", hint=hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except UNREADABLE as error:
        raise missing if absent else _model_error(str(source), "tokenizer", error) from error
    if absent and type(tokenizer).vocab_files_names:  # ByT5 and CANINE read bytes, and need no files
        raise missing
    return tokenizer


def ensure_pad_token(tokenizer: Any) -> Any:
    """Pad with the end-of-text token where a tokenizer (GPT-2's, Llama's) has no padding token."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path} has no padding, end-of-text or unknown token",
            hint="name another with model.tokenizer=...",
        )
    return tokenizer


def _train_tokenizer(corpus: Iterator[str], *, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, the same one in every rank.

    Rank 0 trains it; the others are sent the result.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    text = [""]
    if not _distributed() or torch.distributed.get_rank() == 0:
        bpe = Tokenizer(models.BPE(unk_token=UNKNOWN))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator(
            corpus,
            trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=[UNKNOWN, END, SEPARATOR],
                initial_alphabet=alphabet,
                show_progress=False,
            ),
        )
        bpe.post_processor = processors.TemplateProcessing(
            single="$A", pair=f"$A {SEPARATOR} $B", special_tokens=[(SEPARATOR, bpe.token_to_id(SEPARATOR))]
        )
        text = [bpe.to_str()]
    if _distributed():
        torch.distributed.broadcast_object_list(text)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text[0]),
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=END,
        sep_token=SEPARATOR,
    )


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_vocabulary(tokenizer: Any, config: Any, *, hint: str) -> None:
    """Raise `ModelError` where the tokenizer has tokens that the model has no row for."""
    size = config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {size}", hint=hint
        )


def check_own_vocabulary(path: Path, config: Any, *, hint: str) -> None:
    """Raise `ModelError` where the tokenizer in the folder `path`, if any, has tokens without a row."""
    if any(file for pattern in companions.TOKENIZER_FILES for file in path.glob(pattern)):
        with _one_line(str(path), "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(path)
        check_vocabulary(tokenizer, config, hint=hint)


def length_limit(tokenizer: Any, model: Any, default: int) -> int:
    """The tokens per text that both the tokenizer and the model take, and at most `default`."""
    limits = [default, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
    return min(int(limit) for limit in [*limits, _positions_after_padding(model)] if limit)


def _positions_after_padding(model: Any) -> int | None:
    """The positions of a model that counts them from the padding token's number, else None.

    RoBERTa and its kin start at pad_token_id + 1, so that 514 rows are 512 positions (models/roberta/
    modeling_roberta.py, 5.24); their table of positions alone has a padding row.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.num_embeddings) - int(module.padding_idx) - 1
    return None


# --- models for training -------------------------------------------------------------------------


def load_model(
    section: ModelSection, tokenizer: Any, *, labels: Sequence[str] | None, dtype: torch.dtype
) -> Any:
    """The model to train, with `labels` as its classes where the task is classification.

    Raises:
        ModelError: it is not there, does not fit the task, or lacks weights of its body.
    """
    auto = getattr(transformers, AUTO_CLASSES[section.task])
    config = _config_for(section, tokenizer, labels)
    if section.name is None:
        with _one_line(str(config.model_type), "config"):
            model = auto.from_config(config, dtype=dtype)
    else:
        model = _load_pretrained(auto, section, config, dtype)
    _mend_generation_config(model)
    return model


def _config_for(section: ModelSection, tokenizer: Any, labels: Sequence[str] | None) -> Any:
    config = _fresh_config(section) if section.name is None else _pretrained_config(section)
    check_vocabulary(
        tokenizer,
        config,
        hint="name the model's own tokenizer with model.tokenizer=..., or raise from_scratch.vocab_size",
    )
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        # The classifiers look for the last token that is no padding, by the model's config alone.
        config.pad_token_id = tokenizer.pad_token_id
        config.problem_type = "single_label_classification"
    return config


def _fresh_config(section: ModelSection) -> Any:
    if not section.from_scratch:
        raise ModelError("the run file names no model", hint="set model.name=PATH_OR_NAME")
    values = dict(section.from_scratch)
    kind = values.pop("model_type", None)
    if kind is None:
        raise ModelError("model.from_scratch has no model_type", hint="for example model_type: llama")
    if str(kind) not in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"model.from_scratch: Transformers {transformers.__version__} knows no model_type {kind}",
            hint="for example model_type: llama",
        )
    with _one_line(str(kind), "config"):
        return AutoConfig.for_model(kind, **values)


def _pretrained_config(section: ModelSection) -> Any:
    with _one_line(str(section.name), "config"):
        return AutoConfig.from_pretrained(
            section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
        )


def known_labels(section: ModelSection) -> tuple[str, ...] | None:
    """The names of the classes that a pretrained classifier already has, in its own order."""
    if section.name is None:
        return None
    config = _pretrained_config(section)
    names = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
    return None if all(name.startswith("LABEL_") for name in names) else names


def _load_pretrained(auto: Any, section: ModelSection, config: Any, dtype: torch.dtype) -> Any:
    with _one_line(str(section.name), "model"):
        model, info = auto.from_pretrained(
            section.name,
            config=config,
            dtype=dtype,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_body(model, section, [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    return model


def _check_body(model: Any, section: ModelSection, missing: Sequence[str]) -> None:
    """Refuse a model whose body came without its weights; a new head is what fine-tuning starts with.

    Under ZeRO-3 more than one version of the loader has left a whole model at random weights, silently.
    """
    body = f"{model.base_model_prefix}."
    names = [name for name, _ in model.named_parameters() if name.startswith(body)]
    lost = sorted(set(missing) & set(names))
    if len(lost) > len(names) / 10:
        raise ModelError(
            f"{section.name}: {len(lost)} of {len(names)} weights of the model's body are not in its files, "
            f"{lost[0]} among them",
            hint="the folder may hold another architecture's weights, or an adapter",
        )
    fresh = sorted(set(missing) - set(lost)) + lost
    if fresh:
        logger.info("new weights, to be trained: %s", ", ".join(fresh))


def _mend_generation_config(model: Any) -> None:
    """Make a generation config that Transformers would refuse to save fit for it, and say so.

    The usual case: sampling values (temperature, top_p) beside `do_sample: false`, which means that they
    are not used; they go, and what the model generates stays the same.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        plain = transformers.GenerationConfig()
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            if hasattr(plain, name):
                setattr(settings, name, getattr(plain, name))
        logger.info("generation config: dropped sampling values that do_sample: false leaves unused")


# --- LoRA ------------------------------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"
_TASK_TYPES: Mapping[Task, str] = {"text-classification": "SEQ_CLS", "causal-lm": "CAUSAL_LM"}
_SHOWN_MODULES = 12


def add_lora(model: Any, lora: LoraSection, section: ModelSection) -> Any:
    """`model` with its weights frozen and an adapter beside them; the head of a classifier is trained too.

    Raises:
        ConfigError: a module that the model has not, or whose kind peft has no adapter for.
    """
    from peft import LoraConfig, get_peft_model

    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        _check_modules(model, key, getattr(lora, key))
    settings = LoraConfig(task_type=_TASK_TYPES[section.task], **lora.arguments())
    try:
        # peft would keep the adapter of a 16-bit model in fp32; DeepSpeed has fp32 masters of its own.
        made = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"lora: {' '.join(str(error).split())[:300]}", hint="lora.target_modules=all-linear"
        ) from error
    if section.name is not None and Path(section.name).is_dir():
        made.peft_config["default"].base_model_name_or_path = str(Path(section.name).resolve())
    return made


def _check_modules(model: Any, key: str, names: Sequence[str] | str | None) -> None:
    """Refuse a name that no module ends in; peft passes over one of several without a word."""
    if names is None or isinstance(names, str):
        return
    here = [name for name, _ in model.named_modules() if name]
    for name in names:
        if not any(module == name or module.endswith(f".{name}") for module in here):
            linear = {
                n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)
            }
            some = ", ".join(sorted(linear)[:_SHOWN_MODULES]) or ", ".join(here[:_SHOWN_MODULES])
            raise ConfigError(
                f"lora.{key}: {type(model).__name__} has no module {name!r}; it has {some}",
                hint="lora.target_modules=all-linear" if key == "target_modules" else f"correct lora.{key}",
            )


def save_base_config(model: Any, folder: Path) -> None:
    """Write the base model's config beside its adapter: the task and the labels, which peft leaves out."""
    base = model.get_base_model()
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(folder)


def is_adapter(path: Path) -> bool:
    """Whether `path` holds a LoRA adapter, whose base model is elsewhere."""
    return (path / ADAPTER_CONFIG).is_file() and not has_weights(path)


def read_adapter(path: Path) -> Weights:
    """Where every tensor of the adapter in `path` lies, by name.

    Raises:
        ModelError: it is not there, or cannot be read.
    """
    if layout.adapter_file(path) is None:
        raise ModelError(
            f"{path} has {ADAPTER_CONFIG} and no {layout.ADAPTER_FILES[0]}", hint="copy the adapter again"
        )
    return read_weights(path)


def _load_adapter(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """The base model that the adapter in `folder` names, with the adapter added to its weights."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    with _one_line(str(folder.path), "adapter"):
        base = PeftConfig.from_pretrained(folder.path).base_model_name_or_path
        held = set(read_adapter(folder.path))
    with _one_line(str(base), "base model"):
        plain = folder.auto_class().from_pretrained(
            base, config=folder.config, dtype=dtype, ignore_mismatched_sizes=True
        )
    with _one_line(str(folder.path), "adapter"):
        model = PeftModel.from_pretrained(plain, folder.path, autocast_adapter_dtype=False)
    check_loading(
        folder.path,
        {
            "missing_keys": set(get_peft_model_state_dict(model)) - held,
            "unexpected_keys": held - set(get_peft_model_state_dict(model)),
            "mismatched_keys": (),
        },
    )
    return model.merge_and_unload().eval()


# --- the shape of a model ----------------------------------------------------------------------------

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Trainer's second group of parameters (trainer.py `get_decay_parameter_names`, 5.24)."""
_QUANTISED_BITS: Mapping[str, int] = {"fp8": 8, "fbgemm_fp8": 8, "compressed-tensors": 8, "mxfp4": 4}


def shape_of(section: ModelSection, lora: LoraSection | None, *, own_optimizer: bool = False) -> ModelShape:
    """What memory needs to know of the model; none of its weights is loaded.

    Its parameters come from its config on the meta device or, where Transformers has no such architecture,
    from the headers of its safetensors files.

    Args:
        own_optimizer: whether Trainer makes the optimizer, with a group for what is not decayed; DeepSpeed's
            gets all parameters in one (transformers 5.24 integrations/deepspeed.py `deepspeed_optim_sched`).

    Raises:
        ModelError: there is none under that name, or it is quantised and no adapter is asked for.
        ConfigError: an adapter for a module that the model has not.
    """
    config = _config_of(section)
    folder = Path(section.name) if section.name is not None else None
    bits = _quantised_bits(config)
    if bits and lora is None:
        raise ModelError(
            f"{section.name}: its weights are quantised to {bits} bits, and cannot be trained themselves",
            hint="--lora, or lora: in the run file, trains an adapter beside them",
        )
    auto = getattr(transformers, AUTO_CLASSES[section.task])
    try:
        with _one_line(str(section.name or config.model_type), "config"), torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=section.trust_remote_code)
    except ModelError:
        if folder is None or not list(folder.glob("*.safetensors")):
            raise
        if lora is not None:
            raise ModelError(
                f"{folder}: Transformers has no {config.model_type or 'such'} model for the task, so where "
                "an adapter would go is not known",
                hint="plan without lora, or name another model",
            ) from None
        logger.info("%s: not an architecture for the task, so the sizes are those of its files", folder)
        sizes = _header_sizes(folder)
        gated = any("gate_proj" in name for name in sizes)
        return _shape(section, config, _groups(sizes, own_optimizer), (), gated=gated)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    if lora is not None:
        with torch.device("meta"):
            model = add_lora(model, lora, section)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    return _shape(
        section,
        config,
        _groups(trained, own_optimizer),
        tuple(p.numel() for p in model.parameters() if not p.requires_grad),
        frozen_bytes=_frozen_bytes(model, folder, linear, bits),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        gated=any("gate_proj" in name or "gate_up_proj" in name for name, _ in model.named_parameters()),
    )


def _groups(sizes: Mapping[str, int], own_optimizer: bool) -> tuple[tuple[int, ...], ...]:
    """The sizes in the optimizer's groups."""
    groups: tuple[list[int], list[int]] = ([], [])
    for name, size in sizes.items():
        groups[own_optimizer and bool(_NO_DECAY.search(name.lower()))].append(size)
    return tuple(tuple(group) for group in groups if group)


def _shape(
    section: ModelSection,
    config: Any,
    trained: tuple[tuple[int, ...], ...],
    frozen: tuple[int, ...],
    **rest: Any,
) -> ModelShape:
    text = config.get_text_config()

    def of(*names: str, default: int = 0) -> int:
        values = (getattr(text, name, None) for name in names)
        return next((int(value) for value in values if isinstance(value, int) and value), default)

    hidden, heads = of("hidden_size", "d_model"), of("num_attention_heads", default=1)
    width = of("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff", default=4 * hidden)
    return ModelShape(
        trained,
        frozen,
        hidden_size=hidden,
        layers=of("num_hidden_layers", "num_layers") + of("num_decoder_layers"),
        heads=heads,
        key_value_heads=of("num_key_value_heads", default=heads),
        intermediate_size=width * of("num_experts_per_tok", default=1),
        unfused_gelu="gelu_new"
        in (getattr(text, name, None) for name in ("hidden_act", "activation_function")),
        logits=of("vocab_size") if section.task == "causal-lm" else 0,
        attention_matrix=getattr(config, "_attn_implementation", None) == "eager",
        **rest,
    )


def _config_of(section: ModelSection) -> Any:
    """The model's config; of an architecture that Transformers does not know, what config.json says."""
    if section.name is None:
        return _fresh_config(section)
    try:
        return _pretrained_config(section)
    except ModelError:
        folder = Path(section.name)
        if not list(folder.glob("*.safetensors")):
            raise
        with _one_line(section.name, "config"):
            return transformers.PretrainedConfig.from_json_file(folder / "config.json")


def task_of(section: ModelSection) -> Task:
    """The task that a model's architecture is for; classification where that does not say."""
    names = list(_config_of(section).architectures or [])
    generator = any(name.endswith(_GENERATORS) for name in names)
    return "causal-lm" if generator else "text-classification"


def tasks_of(section: ModelSection) -> list[Task]:
    """The tasks that Transformers has a class for, of the model's architecture; those of its own code too."""
    config = _config_of(section)
    own = getattr(config, "auto_map", None) or {}
    return [
        task
        for task, name in AUTO_CLASSES.items()
        if name in own or type(config) in getattr(transformers, name)._model_mapping
    ]


def positions_of(section: ModelSection) -> int | None:
    """The longest text that the model takes, in tokens, where its config says so."""
    config = _config_of(section)
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _quantised_bits(config: Any) -> int:
    """Bits of a weight where the config says that they are quantised, else 0."""
    found = getattr(config, "quantization_config", None)
    values = found if isinstance(found, dict) else found.to_dict() if found is not None else {}
    if not values:
        return 0
    if values.get("load_in_4bit") or values.get("_load_in_4bit"):
        return 4
    if values.get("load_in_8bit") or values.get("_load_in_8bit"):
        return 8
    return int(values.get("bits") or _QUANTISED_BITS.get(str(values.get("quant_method")), 8))


def _frozen_bytes(model: Any, folder: Path | None, linear: int, bits: int) -> int | None:
    """Bytes of the frozen weights of a quantised model: those of its files, or an estimate from the bits.

    Below 8 bits a block of 64 weights comes with an fp32 scale (bitsandbytes).
    """
    if not bits:
        return None
    if folder is not None and (files := list(folder.glob("*.safetensors"))):
        return sum(file.stat().st_size for file in files)
    whole: int = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return linear * bits // 8 + (linear // 16 if bits < 8 else 0) + 2 * max(0, whole - linear)


def _header_sizes(folder: Path) -> dict[str, int]:
    """Elements of every tensor in the safetensors files of `folder`, from their headers."""
    sizes: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                sizes |= {name: math.prod(opened.get_slice(name).get_shape()) for name in names}
        except UNREADABLE as error:
            raise ModelError(f"{file}: cannot be read: {error}", hint="copy the file again") from error
    return sizes


# --- models from a folder --------------------------------------------------------------------------

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.*.json", "tekken.json", "*vocab*", "*.model", "*.tiktoken")
"""One of these is there wherever a tokenizer is; tokenizer_config.json and its like are none."""
"""DeepSpeed copies its scripts into every checkpoint (runtime/engine.py); they belong to no model."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a config, and what the config says of the model in it."""

    path: Path
    config: Any
    task: Task

    def auto_class(self) -> Any:
        """The Transformers class that loads the model for its task."""
        return getattr(transformers, AUTO_CLASSES[self.task])

    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in order; empty unless it is a classifier."""
        if self.task != "text-classification":
            return ()
        return tuple(str(self.config.id2label[index]) for index in sorted(self.config.id2label))

    def problem(self) -> str:
        """What a classifier's outputs are: of one class, of several, or a number (`config.problem_type`).

        Where the config leaves it open, a single output is a number (loss/loss_utils.py, 5.24).
        """
        one = self.config.num_labels == 1
        return str(self.config.problem_type or ("regression" if one else "single_label_classification"))


def open_folder(path: Path) -> ModelFolder:
    """Read the config of the model in `path`.

    Raises:
        ModelError: no such folder, no config.json in it, or an architecture for none of the tasks.
    """
    if path.is_file():
        raise ModelError(f"{path} is a file", hint=f"name its folder: {path.parent}")
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder", hint="dstool train makes one")
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json", hint="name a folder that save_pretrained or dstool made"
        )
    with _one_line(str(path), "config"):
        config = AutoConfig.from_pretrained(path)
    names = list(config.architectures or [])
    if any(name.endswith("ForSequenceClassification") for name in names):
        return ModelFolder(path, config, "text-classification")
    if any(name.endswith(_GENERATORS) for name in names):
        return ModelFolder(path, config, "causal-lm")
    raise ModelError(
        f"{path} holds {', '.join(names) or 'an unnamed architecture'}, "
        f"which is for none of the tasks {', '.join(AUTO_CLASSES)}",
        hint="name a folder that dstool train made",
    )


def load_folder(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """The model in `folder`, for inference, in `dtype`, with no weight missing or left over.

    Raises:
        ModelError: a weight is missing, left over or of another shape; a file cannot be read.
    """
    if is_adapter(folder.path):
        return _load_adapter(folder, dtype)
    with _one_line(str(folder.path), "model"):
        model, info = folder.auto_class().from_pretrained(
            folder.path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_loading(folder.path, info)
    return model.eval()


def check_loading(path: Path, info: Mapping[str, Any]) -> None:
    """Raise `ModelError` for any key that `from_pretrained` found missing, unexpected or mis-shaped."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(key if isinstance(key, str) else key[0] for key in info[kind])
        if keys:
            raise ModelError(
                f"{path}: {len(keys)} {kind.replace('_', ' ')} among its weights, {keys[0]} is one",
                hint="weights and config.json are not of one model: take both from the same folder",
            )


def has_weights(path: Path) -> bool:
    """Whether `path` holds a model's weights in a form that `from_pretrained` reads."""
    return layout.plain_weights(path) is not None


def read_weights(path: Path) -> Weights:
    """Where every tensor of the model folder `path` lies, by name.

    Raises:
        ModelError: the index names a file that is not there, or a file cannot be read.
    """
    entries: dict[str, Entry] = {}
    for file in weight_files(path):
        try:
            entries |= reader.of_file(file)
        except (CheckpointError, OSError) as error:
            raise ModelError(f"{file}: cannot be read: {error}", hint="copy the file again") from error
    return reader.untied(entries)


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of the model in `path`, in the order `from_pretrained` prefers."""
    for name in layout.WEIGHT_FILES.values():
        if (path / name).is_file():
            return [path / name]
        index = path / f"{name}{layout.INDEX}"
        if index.is_file():
            names = _shards(index)
            lost = [shard for shard in names if not (path / shard).is_file()]
            if lost:
                raise ModelError(
                    f"{path / lost[0]} is missing, and {index.name} names it", hint="copy the folder again"
                )
            return [path / shard for shard in names]
    if adapter := layout.adapter_file(path):
        return [adapter]
    raise ModelError(f"{path} holds no weights", hint="name a folder with model.safetensors, or a checkpoint")


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weight files", hint="copy the folder again") from error


def meta_model(folder: ModelFolder) -> Any:
    """The model that the config in `folder` describes, on the meta device: names and shapes, no values."""
    with _one_line(str(folder.path), "config"), torch.device("meta"):
        model = folder.auto_class().from_config(folder.config)
        model.tie_weights()
    return model


def fit(weights: Weights, folder: ModelFolder) -> Weights:
    """`weights` as `save_pretrained` would store them for the config in `folder`: of tied ones, one alone.

    Raises:
        ModelError: a weight is of another shape than the config says, or the tokenizer has more tokens.
    """
    model = meta_model(folder)
    expected = model.state_dict()
    for name in weights:
        shape = weights.entry(name).shape
        if weights.entry(name).numel and name in expected and shape != tuple(expected[name].shape):
            raise ModelError(
                f"{name} is of shape {list(shape)}, {folder.path / 'config.json'} says "
                f"{list(expected[name].shape)}",
                hint="weights and config.json are not of one model: take both from the same folder",
            )
    check_own_vocabulary(folder.path, folder.config, hint=f"put the model's own tokenizer into {folder.path}")
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    kept = [name for name in weights if not (name in tied and reader.same(weights, name, tied[name]))]
    stored = [name for name in kept if name in weights.entries or name in expected]
    return Weights({name: replace(weights.entry(name), name=name) for name in stored}, {}, weights.checkpoint)


def prove_loadable(folder: ModelFolder, source: Path) -> None:
    """Compare the names and shapes of the weights in `folder` with those that its config asks for.

    Raises:
        ModelError: one is missing, left over or of another shape; names `source`, where they are from.
    """
    with _one_line(str(source), "model"):
        _, info = folder.auto_class().from_pretrained(
            folder.path, device_map={"": "meta"}, output_loading_info=True, ignore_mismatched_sizes=True
        )
    check_loading(source, info)


def usable_dtype(name: str | None, config: Any, device: str) -> torch.dtype:
    """The dtype to run in: `name`, or the config's where `device` supports it, else the nearest.

    Raises:
        NoDevice: fp16 was asked for on the CPU, where DeepSpeed has none (accelerator/cpu_accelerator.py).
    """
    if name == "fp16" and device == "cpu":
        raise NoDevice("fp16 needs a GPU, and none was found", hint="--dtype bf16 or --dtype fp32")
    if name is not None:
        return DTYPES[name]
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return torch.float32 if dtype == torch.float16 and device == "cpu" else dtype


# --- errors ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_line(name: str, what: str) -> Iterator[None]:
    """Turn what Transformers raises about `name` into a `ModelError` of one line."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _model_error(name, what, error) from error


def _model_error(name: str, what: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:300]
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        return ModelError(
            f"{name}: the folder has no config.json", hint="name a folder that save_pretrained or dstool made"
        )
    if what == "config" and (unfit := _unfit_config(path, reason, error)):
        return unfit
    if path.is_dir() or not isinstance(error, OSError):
        return ModelError(
            f"{name}: the {what} cannot be loaded: {reason}", hint="copy the folder again, or name another"
        )
    return ModelError(
        f"{name}: there is no such folder here, and the Hugging Face hub did not give a {what} of that name",
        hint=f"check the spelling and the network ({reason.partition('. ')[0]})",
    )


def _unfit_config(path: Path, reason: str, error: Exception) -> ModelError | None:
    """What is wrong with a config that can be read, in a folder or by model_type; None for another error."""
    file, another = path / "config.json", "or name another model"
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if file.is_file() and not isinstance(kind, str):
        return ModelError(
            f"{file} has no model_type, so it does not say which model it is of",
            hint="name a folder that save_pretrained or dstool made",
        )
    if isinstance(error, OSError | ImportError) or "auto_map" in (values or {}):
        return None
    if kind is not None and kind not in CONFIG_MAPPING_NAMES:
        return ModelError(
            f"{file}: Transformers {transformers.__version__} knows no model_type {kind}",
            hint=f"pip install --upgrade transformers, {another}",
        )
    if reason.startswith("Unrecognized configuration class"):
        return ModelError(
            f"{path}: a model of type {kind or path.name}, of which Transformers has none for this task",
            hint=f"name a text model, for {' or '.join(AUTO_CLASSES)}",
        )
    told = file if file.is_file() else path
    return ModelError(f"{told}: its values make no model: {reason}", hint=f"correct them, {another}")
