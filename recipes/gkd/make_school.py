"""A small student, a small teacher, and answers that the teacher wrote.

    python recipes/gkd/make_school.py runs/gkd

Both models are random, of different shapes and with one tokenizer. Rows of answers.jsonl have a prompt and the teacher's
completion, sampled at a temperature of 1.
"""

import argparse
import itertools
import json
from pathlib import Path

from rlcore_torchkit.testing.models import make_model

DIGITS = "0123456789+="
NUM_ANSWERS = 64
"""Answers to each prompt."""
MAX_TOKENS = 3


def write(directory: Path, seed: int) -> None:
    """Write the two models, and answers.jsonl."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = {"alphabet": DIGITS, "max_length": 64}
    make_model(directory / "student", "qwen3", seed=seed, hidden_size=64, **shape)
    folder = make_model(
        directory / "teacher", "llama", seed=seed + 1, hidden_size=48, num_layers=3, initializer_range=0.15, **shape
    )
    teacher, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True),
        AutoTokenizer.from_pretrained(folder),
    )
    torch.manual_seed(seed)
    with (directory / "answers.jsonl").open("w") as file:
        for pair in itertools.product("0123", repeat=2):
            prompt = "+".join(pair) + "="
            tokens = tokenizer(prompt, return_tensors="pt")
            options = {"max_new_tokens": MAX_TOKENS, "num_return_sequences": NUM_ANSWERS}
            answers = teacher.generate(**tokens, **options, do_sample=True, top_k=0, pad_token_id=0)
            for answer in answers[:, tokens["input_ids"].shape[1] :]:
                text = tokenizer.decode(answer, skip_special_tokens=True)
                if text.strip():
                    file.write(json.dumps({"prompt": prompt, "completion": text}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.directory, arguments.seed)
    print(f"{arguments.directory}: ready for `rlcore train recipes/gkd.toml`")


if __name__ == "__main__":
    main()
