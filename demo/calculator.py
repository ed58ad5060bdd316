"""The calculator demo: warm-start a small model on a teacher who often guesses, then train it with GRPO to use its tool.

python demo/calculator.py --seed 0
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlcore.cli.display import open_display
from rlcore.cli.errors import notes_of
from rlcore.cli.errors import report as report_error
from rlcore.config.model import ModelConfig
from rlcore.run.data.tokenizer import PretrainedTokenizer, load_tokenizer
from rlcore.run.plan.prepare import prepare
from rlcore.run.train import train
from rlcore.spi import Message, RlcoreError, Row, Tool
from rlcore.testing.models import make_model
from rlcore.transformers_import import import_transformers

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
    import_transformers()
    model = make_model(
        root / "model", seed=arguments.seed, hidden_size=64, num_heads=4, num_kv_heads=2, alphabet=ALPHABET, max_length=512
    )
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))

    common = [f"run.seed={arguments.seed}", f"run.directory={root}"]
    grpo = prepare(RECIPES / "demo-calculator-grpo.toml", [*common, f"model.path={model}", *arguments.overrides])
    assert grpo.environment is not None
    tokenizer, chance = load_tokenizer(ModelConfig(path=str(model))), random.Random(arguments.seed)
    with (root / "demonstrations.jsonl").open("w") as file:
        for row in COPIES * list(grpo.environment.rows("train") or ()):
            for prompt, completion in demonstrations(row, tokenizer, chance):
                file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")

    steps = [] if arguments.warm_start_steps is None else [f"run.num_steps={arguments.warm_start_steps}"]
    learn("sft", [*common, f"model.path={model}", f"data.train.path={root / 'demonstrations.jsonl'}", *steps])
    learn("grpo", [*common, f"model.path={root / 'sft' / 'model'}", *arguments.overrides])
    print(f"calculator demo: {time.perf_counter() - start:.0f} s in all")


def demonstrations(row: Row, tokenizer: PretrainedTokenizer, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Two turns for a problem: a call, or a guess in place of it; and, behind the right call, its result or a guess."""
    guess = str(chance.randrange(10, 100))
    conversation: list[Message] = [{"role": "user", "content": row["prompt"]}]
    arguments = {"name": "calculator", "arguments": {"expression": row["prompt"].rstrip("=")}}
    call = f"<tool_call>{json.dumps(arguments, separators=(',', ':'))}</tool_call>"
    yield tokenizer.render_chat(conversation, TOOLS), call if chance.random() < DILIGENCE else guess
    conversation += [{"role": "assistant", "content": call}, {"role": "tool", "content": row["answer"]}]
    yield tokenizer.render_chat(conversation, TOOLS), row["answer"] if chance.random() < DILIGENCE else guess


def learn(recipe: str, overrides: list[str]) -> None:
    """What `rlcore train` does."""
    with open_display("auto", {}) as progress:
        train(prepare(RECIPES / f"demo-calculator-{recipe}.toml", overrides), resume=False, progress=progress)


if __name__ == "__main__":
    try:
        main()
    except RlcoreError as error:
        report_error(f"{error}{notes_of(error)}")
        sys.exit(error.exit_code)
