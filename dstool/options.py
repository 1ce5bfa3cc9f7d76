"""The options of the commands: how each is typed, and what `--help` says of it.

A command in `cli.py` names them with their defaults, one a line. Those of several commands come first.
Nothing heavier than typer is imported here, as `dstool --help` would wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dstool.ds_config import options as ds

_Dtype = Literal["fp32", "bf16", "fp16"]


def _folder(text: str) -> Path:
    """The path; one that is empty, as of an unset "$OUT", would be the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


# --- of several commands -------------------------------------------------------------------------------

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The run file; by default dstool.yaml.", show_default=False, readable=False
    ),
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values over those of the run file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Replace = Annotated[bool, typer.Option("--force", help="Replace a model that is there.")]
MaxShardSize = Annotated[
    str | None, typer.Option(help="The largest file written, for example 2GB. Default: 5GB.")
]
Tag = Annotated[str | None, typer.Option(help="The folder inside, in place of that in `latest`.")]

# --- init-config: what --auto plans for ----------------------------------------------------------------

Auto = Annotated[
    bool, typer.Option("--auto", help="Take stage and offload from dstool plan: the fastest that fits.")
]
AutoGpus = Annotated[int | None, typer.Option(help="For --auto: GPUs here. Default: those found.")]
AutoGpuMemory = Annotated[
    str | None, typer.Option(help="For --auto: of each GPU, 80GB. Default: what is found.")
]
AutoNodes = Annotated[int | None, typer.Option(help="For --auto: machines. Default: 1.")]
AutoCpuMemory = Annotated[
    str | None, typer.Option(help="For --auto: of each node, 512GB. Default: that of this one.")
]
AutoNvmeSpace = Annotated[
    str | None, typer.Option(help="For --auto: of each node, 2TB. Default: not looked at.")
]
AutoSeqLen = Annotated[int | None, typer.Option(help="For --auto: tokens in a row. Default: the run file's.")]
AutoLora = Annotated[
    bool, typer.Option("--lora", help="For --auto: train an adapter alone; a new run file says so.")
]

# --- init-config: the JSON -----------------------------------------------------------------------------

Preset = Annotated[
    str | None, typer.Option(help="A ready set of options, over which the others go: see configs/.")
]
Stage = Annotated[int | None, typer.Option(min=0, max=3, help="The ZeRO stage. Default: 2.")]
Offload = Annotated[
    ds.Offload | None, typer.Option(help="Where optimizer and, at stage 3, parameters go. Default: none.")
]
OffloadOptimizer = Annotated[
    ds.Offload | None, typer.Option(help="Where the optimizer goes. Default: --offload.")
]
OffloadParam = Annotated[ds.Offload | None, typer.Option(help="Where the parameters go. Default: --offload.")]
NvmePath = Annotated[str | None, typer.Option(help="The folder on the NVMe. Default: /local_nvme.")]
Precision = Annotated[
    ds.Precision | None, typer.Option(help="auto: what the run file or the machine says. Default: auto.")
]
ActivationCheckpointing = Annotated[
    bool | None,
    typer.Option(
        "--activation-checkpointing", help="Compute activations again: train.gradient_checkpointing."
    ),
]
CommunicationDataType = Annotated[
    _Dtype | None,
    typer.Option(help="The type in which gradients travel. Default: the run's."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Any other key of the JSON. Can be repeated."),
]

_OPTIMISING, _NUMBERS, _FILES = "Optimizer and scheduler", "Numbers, else the run file's", "The files"

Optimizer = Annotated[
    ds.OptimizerName | None,
    typer.Option(help="none: Trainer's own, by train.optim. Default: AdamW.", rich_help_panel=_OPTIMISING),
]
Scheduler = Annotated[
    ds.SchedulerName | None,
    typer.Option(
        help="none: Trainer's own, by train.lr_scheduler_type. Default: WarmupLR.",
        rich_help_panel=_OPTIMISING,
    ),
]
Lr = Annotated[float | None, typer.Option(help="The learning rate.", rich_help_panel=_NUMBERS)]
Warmup = Annotated[
    float | None,
    typer.Option(help="Steps until the full rate; below 1 a share of all steps.", rich_help_panel=_NUMBERS),
]
MicroBatch = Annotated[int | None, typer.Option(help="Rows per rank and step.", rich_help_panel=_NUMBERS)]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        help="Rows per update of all ranks; what is not given of the other two follows from it.",
        rich_help_panel=_NUMBERS,
    ),
]
Accumulation = Annotated[
    int | None, typer.Option(help="Steps that accumulate into one update.", rich_help_panel=_NUMBERS)
]
Clip = Annotated[
    float | None, typer.Option(help="The norm that gradients are clipped to.", rich_help_panel=_NUMBERS)
]

# --- init-config: the files ----------------------------------------------------------------------------

Model = Annotated[str | None, typer.Option(help="The model: a folder or hub name.", rich_help_panel=_FILES)]
Data = Annotated[
    str | None,
    typer.Option(help="The training data: a file, folder, glob or hub name.", rich_help_panel=_FILES),
]
Task = Annotated[
    Literal["text-classification", "causal-lm"] | None,
    typer.Option(
        help="What the model is trained to do. Default: text-classification.", rich_help_panel=_FILES
    ),
]
Output = Annotated[
    str, typer.Option("--output", "-o", help="The JSON file; - prints it.", rich_help_panel=_FILES)
]
OverwriteJson = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Write over the JSON; with --model, --data or --task over the run file too.",
        rich_help_panel=_FILES,
    ),
]

# --- check and explain ---------------------------------------------------------------------------------

DsConfig = Annotated[
    Path | None,
    typer.Argument(
        metavar="DS_CONFIG", help="The DeepSpeed JSON, or else that of the run file.", readable=False
    ),
]
WorldSize = Annotated[int | None, typer.Option(min=1, help="The number of ranks that the batch is to fit.")]
Fix = Annotated[bool, typer.Option("--fix", help="Make every mend that cannot change the meaning.")]
Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="A key of the JSON, any part of one, or a topic; without: a list."),
]
Lang = Annotated[
    Literal["en", "ko"] | None,
    typer.Option(help="The language; by default that of the locale.", show_default=False),
]

# --- plan ----------------------------------------------------------------------------------------------

PlanModel = Annotated[
    str | None,
    typer.Option(help="A model folder or hub name. [default: the run file's]", show_default=False),
]
PlanGpus = Annotated[int | None, typer.Option(help="GPUs on each node. [default: those here]")]
PlanNodes = Annotated[int, typer.Option(help="Machines.")]
PlanGpuMemory = Annotated[str | None, typer.Option(help="Of each GPU: 80GB (1000^3), 80GiB.")]
PlanCpuMemory = Annotated[str | None, typer.Option(help="Of each node. [default: that of this one]")]
PlanNvmeSpace = Annotated[str | None, typer.Option(help="Of each node. [default: not looked at]")]
PlanMicroBatch = Annotated[int | None, typer.Option(help="Rows for each GPU and forward pass.")]
PlanSeqLen = Annotated[int | None, typer.Option(help="Tokens in a row.")]
PlanPrecision = Annotated[_Dtype | None, typer.Option(help="Of the run.")]
PlanOptimizer = Annotated[ds.OptimizerName | None, typer.Option(help="none: train.optim.")]
PlanLora = Annotated[bool, typer.Option("--lora", help="Train an adapter alone.")]
GradientCheckpointing = Annotated[
    bool | None, typer.Option("--gradient-checkpointing", help="Compute activations twice, keep few.")
]

# --- train and inspect ---------------------------------------------------------------------------------

NumGpus = Annotated[
    int | None, typer.Option(help="Ranks on this machine: GPUs, or CPU ranks where there is none.")
]
Include = Annotated[
    str | None, typer.Option(help="The GPUs to use, as the launcher names them: localhost:0,2")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")]
ShowConfig = Annotated[bool, typer.Option("--show-config", help="Print the settings and their origin.")]
StartAnew = Annotated[bool, typer.Option("--force", help="Start anew where an earlier run lies.")]
Inspected = Annotated[
    Path | None,
    typer.Argument(
        parser=_folder,
        metavar="CHECKPOINT",
        help="A checkpoint-N or global_stepN folder, or a run's folder. Default: the run's.",
    ),
]

# --- consolidate ---------------------------------------------------------------------------------------

CheckpointAndWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CHECKPOINT] [KEY=VALUE",
        help="A checkpoint-N or global_stepN folder, or a run's folder; and values over those of the run "
        "file.",
    ),
]
WeightsDir = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", parser=_folder, metavar="<path>", help="Where the weights go."),
]
KeepDtype = Annotated[
    Literal["fp32", "bf16", "fp16", "keep"] | None,
    typer.Option(help="The type of the weights; keep: that of the checkpoint."),
]
FileFormat = Annotated[
    Literal["safetensors", "bin"] | None, typer.Option("--format", help="The type of the files.")
]
ExcludeFrozen = Annotated[bool, typer.Option("--exclude-frozen", help="Leave out what was not trained.")]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Compare all that is written with the checkpoint; write a manifest."),
]
Engine = Annotated[
    Literal["stream", "deepspeed"],
    typer.Option(help="deepspeed: put together by DeepSpeed's own functions, in memory."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan, and write nothing.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Read files that name classes of others; none is run.")
]

# --- merge ---------------------------------------------------------------------------------------------

InputDir = Annotated[
    Path | None,
    typer.Option(
        parser=_folder,
        metavar="<path>",
        help="A checkpoint, a run's folder or a model folder. Default: the run's folder.",
    ),
]
ModelDir = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", parser=_folder, metavar="<path>", help="Where the model goes."),
]
ZeroStage = Annotated[
    int | None, typer.Option(min=0, max=3, help="Refuse a checkpoint of another ZeRO stage.")
]
MergeDtype = Annotated[
    _Dtype | None,
    typer.Option(
        help="The type of the weights. Default: that in the model's config. fp32 of a 16-bit run is that of "
        "the checkpoint of its last step, where there is one."
    ),
]
BaseModel = Annotated[
    str | None, typer.Option(help="Of a LoRA adapter: the model it is added to. Default: what it names.")
]
KeepAdapter = Annotated[
    bool, typer.Option("--keep-adapter", help="Of a LoRA adapter: write it, not the sum.")
]
PushToHub = Annotated[
    str | None,
    typer.Option(metavar="REPO", help="Then upload it to this repository on the Hugging Face hub."),
]
Private = Annotated[
    bool, typer.Option("--private", help="A new repository is private. Default: as the account says.")
]

# --- infer ---------------------------------------------------------------------------------------------

Text = Annotated[list[str] | None, typer.Option("--text", "-t", help="A text; may be given again.")]
TextPair = Annotated[
    list[str] | None,
    typer.Option(help="The second text of a pair, for a classifier of pairs; one for each --text."),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put each text into the chat template, or not; by default where the run was trained on "
        "messages.",
        show_default=False,
    ),
]
InferModel = Annotated[
    Path | None,
    typer.Option(
        parser=_folder,
        metavar="<path>",
        help="A model folder; by default the run's newest weights.",
        show_default=False,
    ),
]
ComputeDtype = Annotated[_Dtype | None, typer.Option(help="The type to compute in.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Tokens that are generated at most.")]
