"""The run file `dstool.yaml`: its sections, and the one loader that every command uses.

Values come from, each over the one before: defaults < the file < `KEY=VALUE` words < flags.
The fields of `train:` are those of `transformers.TrainingArguments`, read from the source of the
installed version, since importing it takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import glob
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from dstool import files
from dstool.errors import ConfigError, MissingDependency

RUN_FILE = "dstool.yaml"
COMMAND_LINE = "command line"
RECORD = "run.json"
"""What a finished run leaves beside its weights: the result, and the versions that made it."""

Task = Literal["text-classification", "causal-lm"]
LENGTH_KEYS: Mapping[Task, str] = {"text-classification": "max_length", "causal-lm": "block_size"}
"""The key of `data:` that says how many tokens a row has."""
MAX_LENGTH, BLOCK_SIZE = 512, 1024
"""What these are by default, where the model has as many positions."""
Dtype = Literal["fp32", "bf16", "fp16"]
ConsolidateDtype = Literal["fp32", "bf16", "fp16", "keep"]
Engine = Literal["stream", "deepspeed"]
Delimiter = Literal[",", ";", "\t", "|"]
FileFormat = Literal["safetensors", "bin"]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), ser_json_inf_nan="constants"
    )


class ModelSection(_Section):
    """What is trained, and for which task."""

    task: Task = Field("text-classification", description="what the model is trained to do")
    name: str | None = Field(None, description="a model folder, or a name on the Hugging Face hub")
    from_scratch: dict[str, Any] | None = Field(
        None, description="instead of a name: the model's config (`model_type` and sizes), for random weights"
    )
    tokenizer: str | None = Field(
        None, description="a tokenizer's folder or name; default: the model's, or one trained on the data"
    )
    revision: str | None = Field(None, description="the branch, tag or commit on the hub")
    trust_remote_code: bool = Field(False, description="run the Python code that comes with the model")


class DataSection(_Section):
    """Where the text is, and how it becomes batches."""

    train: str | list[str] | None = Field(
        None, description="a file, folder, glob, list of these, hub name, or sample:NAME"
    )
    eval: str | list[str] | None = Field(None, description="held-out data, in the same forms")
    eval_split: float = Field(
        0.0, ge=0.0, lt=1.0, description="without `eval`: this fraction of train is held out"
    )
    text_column: str = Field("text", description="the column with the text")
    text_pair_column: str | None = Field(None, description="the column with a second text, for pairs")
    label_column: str = Field("label", description="the column with the label (classification)")
    encoding: str = Field("utf-8", description="of csv, tsv, jsonl and text files; Korean files may be cp949")
    delimiter: Delimiter = Field(",", description="between the columns of csv files")
    skip_bad_rows: bool = Field(
        False, description="leave out rows without text or label, instead of stopping"
    )
    max_length: int | None = Field(None, gt=0, description="tokens per text (classification); default: 512")
    block_size: int | None = Field(None, gt=1, description="tokens per block (causal-lm); default: 1024")
    hub_config: str | None = Field(None, description="the configuration of a hub data set")
    hub_train_split: str = Field("train", description="the split of a hub data set to train on")
    hub_eval_split: str | None = Field(None, description="the split of the hub data set to evaluate on")


class TrainSection(_Section):
    """dstool's own keys of `train:`; those of `TrainingArguments` are added to them by the loader."""

    output_dir: str = Field("out", description="the run's folder: checkpoints, final model, settings")
    save_fp32: bool = Field(False, description="also leave the fp32 weights, in OUTPUT_DIR/fp32")
    save_first_step: bool = Field(False, description="also save a checkpoint after the first step")

    def arguments(self) -> dict[str, Any]:
        """The fields given for `transformers.TrainingArguments`, under its own names."""
        own = {"save_fp32", "save_first_step"}
        return {"output_dir": self.output_dir, **self.model_dump(exclude_unset=True, exclude=own)}


class LoraSection(_Section):
    """Train a small adapter beside frozen weights. Each key has the name it has in `peft.LoraConfig`."""

    r: int = Field(8, gt=0, description="the rank of the adapter: more learns more, and costs more")
    lora_alpha: int = Field(8, gt=0, description="the adapter's output is scaled by lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout in front of the adapter")
    target_modules: list[str] | Literal["all-linear"] | None = Field(
        None, description="names of the layers that get one, or all-linear; default: peft's for the model"
    )
    exclude_modules: list[str] | None = Field(None, description="names of layers that get none")
    modules_to_save: list[str] | None = Field(
        None, description="layers to train in full as well; the head of a classifier always is"
    )
    bias: Literal["none", "all", "lora_only"] = Field("none", description="which biases to train")
    use_rslora: bool = Field(False, description="scale by lora_alpha / sqrt(r) instead")

    def arguments(self) -> dict[str, Any]:
        """What `peft.LoraConfig` takes."""
        return self.model_dump(exclude_none=True)


class ConsolidateSection(_Section):
    """How a ZeRO checkpoint becomes weights."""

    output_dir: str | None = Field(None, description="default: consolidated/NAME in the run's folder")
    dtype: ConsolidateDtype = Field("fp32", description="of the weights written; keep: as they are")
    max_shard_size: str = Field("5GB", description="the largest file written")
    format: FileFormat = Field("safetensors", description="of the files written")


class MergeSection(_Section):
    """How a folder that `from_pretrained` loads is made."""

    input_dir: str | None = Field(None, description="a checkpoint, run folder or model folder")
    output_dir: str | None = Field(None, description="where the model goes")
    dtype: Dtype | None = Field(None, description="default: the dtype that the model was trained in")
    max_shard_size: str = Field("5GB", description="the largest file written")


class InferSection(_Section):
    """How the model is put to work."""

    model: str | None = Field(None, description="default: the newest weights of the run")
    dtype: Dtype | None = Field(None, description="default: the model's, where this machine supports it")
    batch_size: int = Field(8, gt=0, description="texts at a time")
    max_length: int | None = Field(None, gt=0, description="tokens of a text that are read")
    max_new_tokens: int = Field(64, gt=0, description="tokens that are generated at most")
    do_sample: bool = Field(False, description="sample, rather than take the likeliest token")
    temperature: float = Field(1.0, gt=0, description="of the sampling")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this mass")
    seed: int = Field(42, description="of the sampling")
    chat: bool | None = Field(
        None,
        description="put each text into the chat template; default: where the run was trained on messages",
    )


class Config(_Section):
    """A whole run file."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    deepspeed: str | dict[str, Any] | None = Field(
        None, description="the DeepSpeed JSON: a path, or the same mapping written here"
    )
    lora: LoraSection | None = Field(None, description="train an adapter (LoRA) alone; without it, the model")
    consolidate: ConsolidateSection = Field(default_factory=ConsolidateSection)
    merge: MergeSection = Field(default_factory=MergeSection)
    infer: InferSection = Field(default_factory=InferSection)


@dataclass(frozen=True)
class Loaded:
    """A config, the file it came from, and for each key given the place that gave it."""

    config: Config
    path: Path | None
    sources: Mapping[str, str]


# --- the loader ----------------------------------------------------------------------------------


def load(
    path: Path | str | None = None,
    *,
    words: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    required: bool = True,
) -> Loaded:
    """Read the run file and lay the words and flags of the command line over it.

    Args:
        path: the run file; by default `dstool.yaml` in the current folder.
        words: `section.key=value`, the value as YAML.
        flags: values by dotted key; None means not given.
        required: whether a run file must exist.

    Raises:
        ConfigError: with every problem of the file, words and flags, one a line.
    """
    file = _find_run_file(path, required=required)
    values, sources = _read_file(file) if file else ({}, {})
    if file and file.parent.resolve() != Path.cwd():
        _rebase(values, file.parent)
    for word in words:
        key, value = _parse_word(word)
        _put(values, key, value)
        sources = {**_outside(sources, key), key: COMMAND_LINE}
    for key, value in (flags or {}).items():
        if value is not None:
            _put(values, key, value)
            sources = {**_outside(sources, key), key: f"--{key.rpartition('.')[2].replace('_', '-')}"}
    config = _validate(values, str(file or RUN_FILE), sources)
    return Loaded(config, file, sources)


def _outside(sources: Mapping[str, str], key: str) -> dict[str, str]:
    """`sources` without those of the keys below `key`, which has a new value as a whole."""
    return {name: source for name, source in sources.items() if not name.startswith(f"{key}.")}


def _find_run_file(path: Path | str | None, *, required: bool) -> Path | None:
    if path is not None or Path(RUN_FILE).exists():
        return Path(path or RUN_FILE)
    if required:
        raise ConfigError(
            f"no {RUN_FILE} in {Path.cwd()}", hint="dstool init-config writes one, --config names another"
        )
    return None


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values, and `FILE:LINE` for each dotted key in it."""
    text = _text(file)
    try:
        root = yaml.compose(text, Loader=Loader)
        content = Loader("").construct_document(root) if root else None
        lines = dict(_lines(root, str(file))) if isinstance(root, yaml.MappingNode) else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise ConfigError(f"{place}: {error.problem or 'not YAML'}", hint=f"correct {file}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: what looks like a number and is none, such as 0x_
        raise ConfigError(f"{file}: {' '.join(str(error).split())}", hint=f"correct {file}") from None
    if root is None:
        raise ConfigError(f"{file} is empty", hint="dstool init-config --force")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}: must hold `section: ...` lines", hint="dstool init-config --force")
    return dict(content or {}), {key: f"{file}:{line}" for key, line in lines.items()}


def _text(file: Path) -> str:
    """The text of the run file, without a byte-order mark."""
    try:
        text = files.text_of(file, "run file")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{file}: no such run file", hint="dstool init-config") from None
    except IsADirectoryError:
        inside = file / RUN_FILE
        hint = f"--config {files.typed(inside)}" if inside.is_file() else "name a run file: --config FILE"
        if file == Path(RUN_FILE):
            hint = f"mv {RUN_FILE} {RUN_FILE}.old, then dstool init-config"
        raise ConfigError(f"{file}: a folder, not a run file", hint=hint) from None
    return text.removeprefix("\ufeff")


def _lines(node: yaml.MappingNode, file: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each dotted key below `node` with its line, from 1; a key given twice is an error."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in seen:
            raise ConfigError(
                f"{file}: {key}: given twice, in lines {seen[key]} and {line}", hint="delete one of the two"
            )
        seen[key] = line
        yield key, line
        if isinstance(value_node, yaml.MappingNode):
            yield from _lines(value_node, file, f"{key}.")


def _rebase(values: dict[str, Any], base: Path) -> None:
    """Make the paths of a run file in another folder, which are relative to it, fit the current one."""
    for key in _PATHS_OR_NAMES + _PATHS:
        section, _, name = key.rpartition(".")
        holder = values.get(section) if section else values
        if not isinstance(holder, dict):
            continue
        value = holder.get(name)
        if isinstance(value, str) and (key in _PATHS or _is_there(base / value)):
            holder[name] = str(base / value)
        elif isinstance(value, list):
            holder[name] = [
                str(base / item) if isinstance(item, str) and _is_there(base / item) else item
                for item in value
            ]


def _is_there(path: Path) -> bool:
    return path.exists() or bool(glob.glob(str(path), recursive=True))  # noqa: PTH207 (an absolute pattern)


# A model or data set that is not there may be a name on the hub, and stays as it is; and the checkpoint to
# merge may be named as it is in the run's folder.
_PATHS_OR_NAMES = (
    "model.name",
    "model.tokenizer",
    "data.train",
    "data.eval",
    "merge.input_dir",
    "infer.model",
    "train.resume_from_checkpoint",
)
_PATHS = ("deepspeed", "train.output_dir", "consolidate.output_dir", "merge.output_dir")


class Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: `2e-5` is a number, and `no` (as in `save_strategy: no`) is a word."""


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that either version of YAML would take for something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML 6 writes a lone U+0085 as it is, and reads it as a line end.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


_NOT_IN_1_2 = {f"tag:yaml.org,2002:{name}" for name in ("bool", "timestamp", "value")}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _NOT_IN_1_2]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
for _class in (Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def is_word(text: str) -> bool:
    """Whether `text` is meant as `section.key=value`, rather than as a path."""
    return bool(re.match(r"[A-Za-z_]\w*(\.[\w-]+)*=", text))


def _parse_word(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[\w-]+)*", key):
        raise ConfigError(f"{word}: not KEY=VALUE", hint="for example train.learning_rate=2e-5")
    try:
        return key, yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError):
        return key, text


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in nested `values`.

    Raises:
        ConfigError: the path of a JSON file stands where a mapping would have to be.
    """
    *parents, last = key.split(".")
    for parent in parents:
        if isinstance(values.get(parent), str) and parent == "deepspeed":
            raise ConfigError(
                f"{key}: deepspeed: is the file {values[parent]} here, and its keys are set in it",
                hint=f"edit {values[parent]}, or dstool init-config --force",
            )
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    values[last] = value


def _validate(values: Mapping[str, Any], file: str, sources: Mapping[str, str]) -> Config:
    # A section whose lines are all commented out is an empty one.
    values = {
        key: value for key, value in values.items() if value is not None or key not in Config.model_fields
    }
    try:
        return _config_model().model_validate(values)
    except ValidationError as error:
        # A key written with a wrong type fails once for every type it may have: say it once.
        problems = {_key_of(item["loc"]): item for item in error.errors()}
        lines = [_problem(key, item, file, sources) for key, item in problems.items()]
        places = dict.fromkeys(line.partition(": ")[0] for line in lines)
        named = ["the command line" if place == COMMAND_LINE else place for place in places]
        raise ConfigError("\n".join(lines), hint=f"correct {' and '.join(named)}") from None


def _key_of(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The section and key in `("data", "train", "list[str]", 0)`; `deepspeed` has no keys of ours."""
    return tuple(map(str, location[: 1 if location[0] == "deepspeed" else 2]))


def _problem(path: tuple[str, ...], item: Any, file: str, sources: Mapping[str, str]) -> str:
    key = ".".join(path)
    given = sources.get(key) or next((s for k, s in sources.items() if k.startswith(f"{key}.")), file)
    place = file if given.startswith(f"{file}:") else given
    line = f" (line {given.rpartition(':')[2]})" if place != given else ""
    if item["type"] in {"extra_forbidden", "invalid_key"}:
        return f"{place}: {key}: unknown key{_suggestion(path)}{line}"
    if key == "deepspeed" and item["loc"][-1] == "[key]":
        return f"{place}: {key}: the key {item['input']!r} is no text, as JSON needs it{line}"
    if key == "deepspeed":
        return f"{place}: {key}: should be the path of a JSON file or a mapping, not {item['input']!r}{line}"
    if item["type"] in {"model_type", "dict_type", "model_attributes_type"}:
        return f"{place}: {key}: must be a section with keys of its own, not {item['input']!r}{line}"
    reason = item["msg"].removeprefix("Input should be ").partition(", unable ")[0]
    return f"{place}: {key}: should be {reason}, not {item['input']!r}{line}"


def _suggestion(path: tuple[str, ...]) -> str:
    section, name = (path[0] if len(path) == 2 else ""), path[-1]
    above, dot, below = name.partition(".")
    if not section and dot and above in Config.model_fields:
        return f", in the file {below} stands on a line below {above}:"
    if section == "train" and name in REMOVED_ARGUMENTS:
        return f": {REMOVED_ARGUMENTS[name]}"
    elsewhere = [s for s in Config.model_fields if s != section and name in _known_keys(s)]
    if elsewhere:
        return f", it belongs in {elsewhere[0]}:"
    close = difflib.get_close_matches(name, _known_keys(section), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def _known_keys(section: str) -> list[str]:
    if not section:
        return list(Config.model_fields)
    annotation = _config_model().model_fields[section].annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")]
    return list(kinds[0].model_fields) if kinds else []


# --- the fields of TrainingArguments ---------------------------------------------------------------

REMOVED_ARGUMENTS: Mapping[str, str] = {
    "evaluation_strategy": "Transformers calls it eval_strategy",
    "warmup_ratio": "gone in Transformers 5, warmup_steps below 1 is the ratio",
    "no_cuda": "gone in Transformers 5, its name is use_cpu",
    "fp16_backend": "gone in Transformers 5",
    "half_precision_backend": "gone in Transformers 5",
    "save_safetensors": "gone in Transformers 5, which always saves safetensors",
    "logging_dir": "gone in Transformers 5, set the environment variable TENSORBOARD_LOGGING_DIR",
    "group_by_length": "gone in Transformers 5, use train_sampling_strategy: group_by_length",
    "overwrite_output_dir": "gone in Transformers 5, use dstool train --force",
    "per_gpu_train_batch_size": "its name is per_device_train_batch_size",
    "per_gpu_eval_batch_size": "its name is per_device_eval_batch_size",
    "adafactor": "gone in Transformers 5, use optim: adafactor",
    "deepspeed": "it has a section of its own, `deepspeed: ds_config.json` at the top level",
    "local_rank": "the launcher sets it",
}
_NOT_OURS = frozenset({"deepspeed", "local_rank", "fsdp", "fsdp_config", "parallelism_config"})
_TYPES: Mapping[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict}


@cache
def _config_model() -> type[Config]:
    """`Config` with a `train` section that has the fields of the installed TrainingArguments."""
    fields: dict[str, Any] = {
        name: (annotation, Field(None, description="see transformers.TrainingArguments"))
        for name, annotation in training_arguments().items()
        if name not in TrainSection.model_fields and name not in _NOT_OURS
    }
    train = create_model("Train", __base__=TrainSection, **fields)
    section: Any = (train, Field(default_factory=train))
    return create_model("RunFile", __base__=Config, train=section)


@cache
def training_arguments() -> dict[str, Any]:
    """The name and type of each field of `transformers.TrainingArguments`, without importing it.

    Types that are not built in come out as `Any`; Trainer checks those itself.

    Raises:
        MissingDependency: transformers is not installed, or keeps the class somewhere else.
    """
    spec = importlib.util.find_spec("transformers")
    source = Path(spec.origin).with_name("training_args.py") if spec and spec.origin else None
    if source is None or not source.is_file():
        raise MissingDependency("transformers is not installed", hint='pip install "transformers>=5"')
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            named = {n.target.id: _type_of(n.annotation) for n in fields if isinstance(n.target, ast.Name)}
            return {**named, "resume_from_checkpoint": str | bool | None}
    version = importlib.metadata.version("transformers")
    raise MissingDependency(
        f"transformers {version} has no TrainingArguments in {source}",
        hint='pip install "transformers>=5,<6"',
    )


def _type_of(node: ast.expr) -> Any:
    """The type that an annotation names: `float | None`, `list[str]`, ..., or `Any`."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _TYPES.get(node.value.id, Any)
    if isinstance(node, ast.BinOp):
        parts = [_type_of(node.left), _type_of(node.right)]
        return Any if Any in parts else reduce(or_, parts)
    return _TYPES.get(node.id, Any) if isinstance(node, ast.Name) else Any


# --- the resolved config ---------------------------------------------------------------------------


def dump(config: Config) -> str:
    """The config as a run file: everything that was given, and dstool's defaults."""
    values = config.model_dump(mode="json", exclude_none=True)
    own = {name: getattr(config.train, name) for name in TrainSection.model_fields}
    values["train"] = {**config.train.model_dump(mode="json", exclude_unset=True), **own}
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def scalar(text: str) -> str:
    """`text` as a run file has it: on one line, and in quotes where it would not be read as text."""
    return yaml.dump(text, Dumper=_Dumper, allow_unicode=True, width=1 << 20).splitlines()[0]


def resolve(config: Config) -> Config:
    """The same config with absolute paths, for a copy of the run file in another folder."""
    values = config.model_dump(mode="json", exclude_unset=True)
    values.setdefault("train", {})["output_dir"] = config.train.output_dir
    _rebase(values, Path.cwd())
    return _config_model().model_validate(values)


_SECRET = re.compile(r"(?:.*_)?(?:token|api_key|password|secret)")
"""The names of `train:` and of a monitor in the JSON whose values are for nobody's eyes (hub_token, ...)."""


def without_secrets(config: Config) -> Config:
    """The same config without tokens and passwords, for a file that is shared along with the weights."""
    values = config.model_dump(mode="json", exclude_unset=True)
    for section in ("train", "deepspeed"):
        _drop_secrets(values.get(section))
    return _config_model().model_validate(values)


def _drop_secrets(values: Any) -> None:
    if isinstance(values, dict):
        for name in [name for name in values if _SECRET.fullmatch(name)]:
            del values[name]
        for value in values.values():
            _drop_secrets(value)


def explain(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """Every key that has a value, with the value and where it came from. Secrets are shown as stars."""
    values = yaml.load(dump(loaded.config), Loader=Loader)  # noqa: S506 - a SafeLoader
    return [
        (key, _starred(key, value), _origin(key, loaded.sources))
        for section, content in values.items()
        for key, value in _leaves(section, content)
    ]


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The dotted keys below `key` that hold no mapping, or an empty one."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _starred(key: str, value: Any) -> Any:
    secret = key.startswith(("train.", "deepspeed.")) and _SECRET.fullmatch(key.rpartition(".")[2])
    return "***" if secret else value


def _origin(key: str, sources: Mapping[str, str]) -> str:
    """Where the key was given, or the mapping around it that was given as a whole."""
    while key not in sources and "." in key:
        key = key.rpartition(".")[0]
    whole = "." in key or key == "deepspeed"  # of any other section, the line of its name says nothing
    return sources.get(key, "default") if whole else "default"
