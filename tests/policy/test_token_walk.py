"""Few files of rlcore touch a generated token between the generator's answer and the loss."""

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("token_walk.py")
MOST = 8
MOST_GATHERS = 4
"""Of a column, from the answer to the microbatches that the models read: for the reference and for the update."""


def test_few_files_touch_a_token_between_the_generators_answer_and_the_loss(root: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, SCRIPT, root, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    walk = json.loads(ran.stdout.splitlines()[-1])
    touched = set(walk["touched"])
    assert walk["ended"]
    assert {
        "rlcore_torchkit/generation.py",
        "rlcore_rollout/sampler.py",
        "rlcore_torchkit/head/logprobs.py",
    } <= touched
    told = re.search(r"In one process, (\d+) files\s+read\s+or change a token", (root / "docs" / "design.md").read_text())
    assert told is not None
    assert len(touched) == int(told[1]) <= MOST, "these files touch the tokens: " + ", ".join(sorted(touched))
    # The generator's answer is one of the arrays.
    assert 2 < walk["gathered"]["tokens"] - 1 <= MOST_GATHERS
    assert 1 < walk["gathered"]["logprobs"] - 1 <= MOST_GATHERS
