"""Run README's lines that train, with the rlcore that is installed: `release/first_run.py FOLDER`.

The folder gets a small model with random weights, a recipe, and the run. `make try-dist` calls it in a new environment.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """\
[run]
num_steps = 8

[model]
path = "model"

[algorithm]
name = "grpo"

[rollout]
max_prompt_tokens = 8
max_response_tokens = 2
samples_per_prompt = 128

[training]
prompts_per_step = 1
"""


def first_lines(readme: str) -> str:
    """Return README's Python block that trains. SystemExit where it has none, or several."""
    found = [
        block for block in re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL) if "rlcore.train(" in block
    ]
    if len(found) != 1:
        raise SystemExit(f"README.md has {len(found)} Python blocks that call rlcore.train; expected one")
    return str(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("folder", type=Path, help="an empty or new folder")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    program = first_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    os.chdir(folder)
    from rlcore_torchkit.testing.models import make_model

    make_model(Path("model"), "qwen3", alphabet="35789+=")
    Path("recipe.toml").write_text(RECIPE, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(program, "README.md", "exec"), names)
    if not max(names["run"].metrics["reward_mean"]) > 0:
        raise SystemExit("no sample of 8 steps was right, so that nothing was learned; expected one in a hundred")


if __name__ == "__main__":
    main()
