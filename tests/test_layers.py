"""The layers of the package. Arrows point down, and within a layer to the left."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import dstool

ROOT = Path(dstool.__file__).parent

# A module imports what stands before it, and nothing else. A new module is put here, in its place.
LAYERS = (
    ("dstool", "dstool.errors", "dstool.log", "dstool.files"),
    (
        "dstool.config",
        "dstool.run_file",
        "dstool.ds_config",
        "dstool.ds_config.keys",
        "dstool.ds_config.glossary",
        "dstool.ds_config.options",
        "dstool.ds_config.presets",
        "dstool.ds_config.build",
        "dstool.ds_config.memory",
        "dstool.ds_config.source",
        "dstool.ds_config.read",
        "dstool.ds_config.looks",
        "dstool.ds_config.rules",
        "dstool.ds_config.run_rules",
        "dstool.ds_config.refusals",
        "dstool.ds_config.check",
        "dstool.new_run_file",
        "dstool.launch",
        "dstool.machine",
        "dstool.console",
    ),
    (
        "dstool.data",
        "dstool.data.files",
        "dstool.data.names",
        "dstool.data.batches",
        "dstool.preflight",
        "dstool.hub",
        "dstool.checkpoint.opcodes",
        "dstool.checkpoint.pickles",
        "dstool.checkpoint.layout",
        "dstool.checkpoint.swap",
        "dstool.checkpoint.sums",
        "dstool.checkpoint.reader",
        "dstool.checkpoint",
        "dstool.checkpoint.cast",
        "dstool.checkpoint.stream",
        "dstool.checkpoint.writer",
        "dstool.checkpoint.verify",
        "dstool.checkpoint.companions",
        "dstool.checkpoint.lora",
        "dstool.checkpoint.assemble",
        "dstool.models",
        "dstool.adapters",
        "dstool.card",
    ),
    (
        "dstool.init_config",
        "dstool.explain",
        "dstool.check",
        "dstool.plan",
        "dstool.train",
        "dstool.inspection",
        "dstool.consolidate",
        "dstool.merge",
        "dstool.infer",
    ),
    ("dstool.options", "dstool.cli", "dstool.__main__"),
)
ORDER = [name for layer in LAYERS for name in layer]
VERBS = LAYERS[3]

LIGHT = {*LAYERS[0], *LAYERS[1], *LAYERS[4]} | {
    "dstool.data",
    "dstool.data.files",
    "dstool.data.names",
    "dstool.preflight",
    "dstool.init_config",
    "dstool.explain",
    "dstool.check",
}
HEAVY = {"torch", "deepspeed", "transformers", "datasets"}
FOR_THE_COMMAND_LINE = {"typer", "rich"}


@dataclass(frozen=True)
class Import:
    """One imported name; `at_start` when the import of the module itself runs it."""

    name: str
    line: int
    at_start: bool


def imports(source: str) -> Iterator[Import]:
    yield from _imports(ast.parse(source), at_start=True)


def _imports(node: ast.AST, *, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: a relative import"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (Import(name, child.lineno, at_start) for name in names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) in {
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        }:
            for inner in child.body:
                yield from _imports(ast.Module([inner], []), at_start=False)
            for inner in child.orelse:
                yield from _imports(ast.Module([inner], []), at_start=at_start)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, at_start=at_start and not later)


def modules() -> dict[str, str]:
    """The source of every module, by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("dstool", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def own_module(name: str) -> str | None:
    """The module of dstool that an imported name lies in."""
    while name.partition(".")[0] == "dstool":
        if name in ORDER:
            return name
        name = name.rpartition(".")[0]
    return None


def violations(sources: Mapping[str, str]) -> list[str]:
    return [
        f"{module}, line {found.line}: {problem}"
        for module, source in sources.items()
        for found in imports(source)
        if (problem := _problem(module, found))
    ]


def _problem(module: str, found: Import) -> str | None:
    package, own = found.name.partition(".")[0], own_module(found.name)
    if own in VERBS and module in VERBS:
        return f"a verb imports the verb {own}: what two of them need moves down"
    if own is not None and ORDER.index(own) >= ORDER.index(module):
        return f"imports {own}, which stands above it"
    if module in LIGHT and found.at_start and (package in HEAVY or (own and own not in LIGHT)):
        return f"imports {found.name} at module level, and so torch or its like"
    if module not in LAYERS[4] and package in FOR_THE_COMMAND_LINE:
        lazy_console = module == "dstool.console" and package == "rich" and not found.at_start
        return None if lazy_console else f"imports {package}, which is for the command line"
    return None


def test_every_module_is_in_the_table():
    found = set(modules())
    assert found - set(ORDER) == set(), "not in a layer: put it into LAYERS in this file"
    assert set(ORDER) - found == set(), "in LAYERS and not in the package: take it out"


def test_no_module_stands_in_the_table_twice():
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("module", sorted(set(modules()) & set(ORDER)))
def test_a_module_keeps_to_its_layer(module):
    assert violations({module: modules()[module]}) == []


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("dstool.files", "from dstool import config", "stands above it"),
        ("dstool.files", "def f():\n from dstool.config import load", "stands above it"),
        ("dstool.launch", "import dstool.console", "stands above it"),
        ("dstool.merge", "from dstool.consolidate import consolidate", "a verb imports the verb"),
        ("dstool.train", "def f():\n import dstool.merge", "a verb imports the verb"),
        ("dstool.cli", "import torch.nn", "at module level"),
        ("dstool.config", "try:\n from transformers import Trainer\nexcept: pass", "at module level"),
        ("dstool.cli", "from dstool.train import train", "at module level"),
        ("dstool.preflight", "class A:\n import datasets", "at module level"),
        ("dstool.models", "def f():\n import typer", "for the command line"),
        ("dstool.console", "from rich import progress", "for the command line"),
    ],
)
def test_the_check_sees(module, source, said):
    (found,) = violations({module: source})
    assert said in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dstool.launch", "def f():\n import torch"),
        ("dstool.config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import torch"),
        ("dstool.models", "import torch\nfrom dstool.config import Task"),
        ("dstool.console", "def f():\n from rich import progress"),
        ("dstool.cli", "import typer\nfrom dstool import launch, log"),
    ],
)
def test_the_check_lets_pass(module, source):
    assert violations({module: source}) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["init-config", "--stage", "3", "--offload", "nvme"],
        ["explain", "stage"],
        ["check"],
    ],
    ids=" ".join,
)
def test_a_light_command_imports_nothing_heavy(arguments, tmp_path):
    if arguments == ["check"]:
        (tmp_path / "ds.json").write_text("{}")
        (tmp_path / "dstool.yaml").write_text("train: {max_steps: 3}\ndeepspeed: ds.json\n")
    argv = [sys.executable, "-X", "importtime", "-m", "dstool", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip() for line in lines}
    assert "dstool.cli" in names
    assert {name for name in names if name.partition(".")[0] in HEAVY} == set()
