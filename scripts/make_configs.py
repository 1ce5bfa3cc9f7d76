"""Write configs/: the JSON of every preset, and the README with the command that each is made by.

python scripts/make_configs.py           writes the folder anew
"""

from __future__ import annotations

from pathlib import Path

from dstool.ds_config.presets import PRESETS
from dstool.init_config import generate

CONFIGS = Path(__file__).parents[1] / "configs"

HEAD = """\
# Presets

DeepSpeed JSON files for the decisions that people most often make. Each is made by the command beside it, in
an empty folder, together with a run file. Options go over a preset:
`dstool init-config --preset zero3-offload --lr 2e-5`.

What nobody decides is `"auto"`: any script with a Trainer fills that in, and `dstool train` does.

| file | when | command |
|---|---|---|
"""


def readme() -> str:
    """The text of configs/README.md."""
    return HEAD + "".join(_row(name, preset.use) for name, preset in PRESETS.items())


def _row(name: str, use: str) -> str:
    return f"| [{name}.json]({name}.json) | {use} | `dstool init-config --preset {name} -o {name}.json` |\n"


def main() -> None:
    """Write every file."""
    CONFIGS.mkdir(exist_ok=True)
    for name, preset in PRESETS.items():
        (CONFIGS / f"{name}.json").write_text(generate(preset.options), encoding="utf-8")
    (CONFIGS / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
