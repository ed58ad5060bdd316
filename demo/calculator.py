"""The calculator demo: warm-start a small model on a teacher who often guesses, then train it with GRPO to use its tool.

python demo/calculator.py --seed 0
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ending import run_to_end

import rlcore
from rlcore.spi import Message, Row, Tool
from rlcore_torchkit.testing.models import make_model

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ALPHABET = "0123456789*=+-/ \n:<>{}[]\"'.,;_" + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS: list[Tool] = [{"type": "function", "function": {"name": "calculator"}}]
"""As much of the tool as the template shows."""
DILIGENCE = 0.7
"""Share of the demonstrations that do right."""
COPIES = 100
"""Demonstrations of each problem, right or not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs"))
    parser.add_argument("--warm-start-steps", type=int, default=None, help="as the recipe says unless stated")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for the GRPO run")
    arguments = parser.parse_args()

    start = time.perf_counter()
    root = arguments.directory / f"calculator-seed{arguments.seed}"
    shutil.rmtree(root, ignore_errors=True)
    model = make_model(
        root / "model", seed=arguments.seed, hidden_size=64, num_heads=4, num_kv_heads=2, alphabet=ALPHABET, max_length=512
    )
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))

    common = [f"run.seed={arguments.seed}", f"run.directory={root}"]
    problems = rlcore.rows(RECIPES / "demo-calculator-grpo.toml", *common, f"model.path={model}", *arguments.overrides)
    tokenizer, chance = load_tokenizer(model), random.Random(arguments.seed)
    with (root / "demonstrations.jsonl").open("w") as file:
        for row in COPIES * list(problems):
            for prompt, completion in demonstrations(row, tokenizer, chance):
                file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")

    steps = [] if arguments.warm_start_steps is None else [f"run.num_steps={arguments.warm_start_steps}"]
    taught = f"data.train.path={root / 'demonstrations.jsonl'}"
    sft = rlcore.train(RECIPES / "demo-calculator-sft.toml", *common, f"model.path={model}", taught, *steps)
    rlcore.train(RECIPES / "demo-calculator-grpo.toml", *common, f"model.path={sft.model}", *arguments.overrides)
    print(f"calculator demo: {time.perf_counter() - start:.0f} s in all")


def load_tokenizer(model: Path) -> Any:
    """The model's tokenizer, with its chat template."""
    from transformers import AutoTokenizer  # which takes seconds

    return AutoTokenizer.from_pretrained(model)


def demonstrations(row: Row, tokenizer: Any, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Two turns for a problem: a call, or a guess in place of it; and, behind the right call, its result or a guess."""
    guess = str(chance.randrange(10, 100))
    conversation: list[Message] = [{"role": "user", "content": row["prompt"]}]
    arguments = {"name": "calculator", "arguments": {"expression": row["prompt"].rstrip("=")}}
    call = f"<tool_call>{json.dumps(arguments, separators=(',', ':'))}</tool_call>"
    yield rendered(tokenizer, conversation), call if chance.random() < DILIGENCE else guess
    conversation += [{"role": "assistant", "content": call}, {"role": "tool", "content": row["answer"]}]
    yield rendered(tokenizer, conversation), row["answer"] if chance.random() < DILIGENCE else guess


def rendered(tokenizer: Any, conversation: list[Message]) -> str:
    """A conversation as the policy reads it before its next turn."""
    text: str = tokenizer.apply_chat_template(conversation, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    return text


if __name__ == "__main__":
    run_to_end(main)
