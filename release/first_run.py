"""Run README's lines that train, with the rlcore that is installed: `release/first_run.py FOLDER`.

The folder gets the model and the run. `make try-dist` calls it in a new environment.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


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
    names: dict[str, Any] = {}
    exec(compile(program, "README.md", "exec"), names)
    before, after = (names["run"].summary[f"accuracy_{when}"] for when in ("before", "after"))
    if not after > before:
        raise SystemExit(f"the accuracy was {before} before and {after} after the run; expected a greater one")


if __name__ == "__main__":
    main()
