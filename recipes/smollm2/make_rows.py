"""Rows for the recipes smollm2-*.toml: problems of reasoning-gym, and word problems, whose answers are whole numbers.

    pip install reasoning-gym==0.1.25
    python recipes/smollm2/make_rows.py runs/smollm2
    python recipes/smollm2/make_rows.py runs/smollm2 --families chain_sum gcd letter_counting word_problems

writes train.jsonl and held-out.jsonl, in which families take turns. A row has a prompt of messages, the answer and
reasoning-gym's own entry, by which scoring.py rewards; and what the other recipes learn from: the answer as a completion, and
as the better of a pair. No held-out prompt is trained on. The same seed gives the same rows. This script makes the family
`word_problems` itself: problems of one or two steps in the form of GSM8K's, with small numbers.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

FAMILIES: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_value": 1, "max_value": 50},
    "letter_counting": {"min_words": 1, "max_words": 2},
}
"""Families that SmolLM2-135M-Instruct solves sometimes: at a temperature of 1, of 32 of each 4, 4 and 2."""
WORD_PROBLEMS = "word_problems"
STORIES: dict[str, Callable[[int, int], int]] = {
    "{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?": lambda a, b: a + b,
    "{who} has {a} {things} and sells {b} of them. How many {things} are left?": lambda a, b: a - b,
    "{who} fills {a} boxes with {b} {things} each. How many {things} are in the boxes?": lambda a, b: a * b,
    "{who} sells {a} {things} in the morning and {b} fewer in the afternoon. How many {things} are sold on that day?": (
        lambda a, b: 2 * a - b
    ),
    "{who} has {a} {things} and buys {b} more each day. How many {things} does {who} have after two days?": (
        lambda a, b: a + 2 * b
    ),
}
"""Problems with two numbers, of which the first is the larger one, and their answers."""
WHO = ("The baker", "The farmer", "The teacher", "The gardener", "The librarian", "The cook", "The painter", "The sailor")
THINGS = ("apples", "books", "cards", "eggs", "flowers", "pencils", "stones", "tickets")
ASKS_FOR = "\nAnswer:"
BLOCK = 1000
"""Problems that one data set of reasoning-gym has here."""
MOST_REPEATED = 10 * BLOCK
"""Rounds of the families that bring no new problem."""


def problems(family: str, seed: int) -> Iterator[dict[str, Any]]:
    """Without end, in blocks: reasoning-gym makes problem i of a data set by the seed plus i, so the next begins behind."""
    if family == WORD_PROBLEMS:
        yield from word_problems(seed)
    import reasoning_gym

    while True:
        yield from reasoning_gym.create_dataset(family, size=BLOCK, seed=seed, **FAMILIES[family])
        seed += BLOCK


def word_problems(seed: int) -> Iterator[dict[str, Any]]:
    """Without end, in the form of reasoning-gym's entries."""
    source = random.Random(seed)
    while True:
        story, answer = source.choice(list(STORIES.items()))
        small, large = sorted(source.sample(range(2, 13 if "boxes" in story else 31), 2))
        question = story.format(who=source.choice(WHO), things=source.choice(THINGS), a=large, b=small)
        yield {
            "question": question.replace("does The", "does the"),
            "answer": str(answer(large, small)),
            "metadata": {"source_dataset": WORD_PROBLEMS},
        }


def row_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What the recipes read of a problem; the wrong answer of its pair is close to the right one."""
    answer = entry["answer"]
    wrong = int(answer) + random.Random(entry["question"]).choice((-10, -2, -1, 1, 2, 10))
    return {
        "prompt": [{"role": "user", "content": entry["question"].strip() + ASKS_FOR}],
        "answer": answer,
        "completion": answer,
        "chosen": [{"role": "assistant", "content": answer}],
        "rejected": [{"role": "assistant", "content": str(wrong)}],
        "entry": entry,
    }


def distinct(families: list[str], seed: int, known: set[str]) -> Iterator[dict[str, Any]]:
    """Problems of the families in turns, none of them known and each once; it adds them to `known`. SystemExit once there are
    no others."""
    last = 0
    for number, entries in enumerate(zip(*(problems(family, seed) for family in families), strict=True)):
        for entry in entries:
            if entry["question"] not in known:
                known.add(entry["question"])
                last = number
                yield row_of(entry)
        if number - last > MOST_REPEATED:
            raise SystemExit(f"found {len(known)} problems of {', '.join(families)}; expected more. Ask for fewer rows")


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--families", nargs="+", choices=[*sorted(FAMILIES), WORD_PROBLEMS], default=sorted(FAMILIES))
    parser.add_argument("--train", type=int, default=4000, help="rows")
    parser.add_argument("--held-out", type=int, default=256, help="rows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        raise SystemExit("found no reasoning-gym; pip install reasoning-gym==0.1.25") from None
    arguments.directory.mkdir(parents=True, exist_ok=True)
    rows = distinct(arguments.families, arguments.seed * 1_000_000, set())
    write(arguments.directory / "held-out.jsonl", islice(rows, arguments.held_out))
    write(arguments.directory / "train.jsonl", islice(rows, arguments.train))


if __name__ == "__main__":
    main()
