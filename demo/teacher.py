"""The warm start's data: solved sums from a teacher who often forgets to carry.

A model that imitates it adds without carrying, and is right mostly where there is nothing to carry. It has seen the right
answer too, though, so that exploring finds it and reinforcement can prefer it.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from rlcore.spi import Row

SLOPPINESS = 0.6
"""Share of the solutions in which nothing is carried."""
COPIES = 6
"""Solutions of each problem, each of them sloppy or not."""


def without_carrying(prompt: str) -> str:
    """The sum of "37+58=" digit by digit, each modulo ten: "85"."""
    first, second = (int(operand) for operand in prompt.rstrip("=").split("+"))
    tens, units = (first // 10 + second // 10) % 10, (first % 10 + second % 10) % 10
    return str(10 * tens + units)


def write_solutions(rows: Sequence[Row], path: Path, seed: int) -> None:
    """`prompt` and `completion` as JSONL, COPIES lines for each row."""
    chance = random.Random(seed)
    with path.open("w") as file:
        for row in rows:
            for _ in range(COPIES):
                sloppy = chance.random() < SLOPPINESS
                answer = without_carrying(row["prompt"]) if sloppy else row["answer"]
                file.write(json.dumps({"prompt": row["prompt"], "completion": answer}) + "\n")
