"""A small model that copies a fact from its prompt and knows none by heart, and the facts that it is to learn.

    python recipes/facts/make_model.py runs/facts

A fact is a letter's digit: "a=3". The warm start is half of prompts such as "k=7;k=", whose answer is 7, and half of prompts
such as "k=", whose answer is any digit. Rows of facts.jsonl have a prompt such as "a=" and its fact as the demonstration.
"""

import argparse
import json
import random
import string
from pathlib import Path

import rlcore
from rlcore_torchkit.testing.models import make_model

LETTERS, DIGITS = string.ascii_lowercase, string.digits
NUM_ROWS = 8192
SFT = {
    "run": {"name": "warm-start", "num_steps": 80},
    "algorithm": {"name": "sft"},
    "data": {"train": {"source": "jsonl"}},
    "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 2},
    "training": {"prompts_per_step": 128},
    "optimizer": {"learning_rate": 4e-3},
    "schedule": {"warmup_steps": 10, "decay": "linear"},
    "sinks": {"names": []},
    "checkpoint": {"export": "hf", "at_end": False},
}


def write(directory: Path, seed: int, num_steps: int) -> Path:
    """Write facts.jsonl and the warm-started model; return the model's directory."""
    chance = random.Random(seed)
    model = make_model(directory / "untrained", seed=seed, hidden_size=64, alphabet=LETTERS + DIGITS + "=;", max_length=64)
    facts = [{"prompt": f"{letter}=", "privileged_context": chance.choice(DIGITS)} for letter in LETTERS]
    (directory / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    with (directory / "copies.jsonl").open("w") as file:
        for number in range(NUM_ROWS):
            question, digit = f"{chance.choice(LETTERS)}=", chance.choice(DIGITS)
            shown = f"{question}{digit};" if number % 2 else ""
            file.write(json.dumps({"prompt": shown + question, "completion": digit}) + "\n")
    overrides = [
        f"run.seed={seed}",
        f"run.num_steps={num_steps}",
        f"run.directory={directory}",
        f"model.path={model}",
        f"data.train.path={directory / 'copies.jsonl'}",
    ]
    trained = rlcore.train(SFT, *overrides).model
    assert trained is not None
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    model = write(arguments.directory, arguments.seed, arguments.steps)
    print(f"{model}: ready for `rlcore train recipes/facts-sdft.toml` and `rlcore train recipes/facts-sdpo.toml`")


if __name__ == "__main__":
    main()
