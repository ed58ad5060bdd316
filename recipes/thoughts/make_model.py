"""The directory of a small model without any skill, whose chat template drops earlier thoughts, as Qwen3.5's does.

    python recipes/thoughts/make_model.py runs/thoughts/model

Its tokens are the ten digits, the marks of messages and those of thoughts. The template begins each answer with a thought. Of
earlier answers it shows only what stands behind the thought.
"""

import argparse
from pathlib import Path

MARKS, THOUGHTS = ("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>{% endif %}"
)


def write(directory: Path, seed: int) -> None:
    """Write config.json, random weights and the tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE(vocab={digit: number for number, digit in enumerate("0123456789")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.add_tokens(list(THOUGHTS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[1], clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.directory, arguments.seed)
    print(f"{arguments.directory}: ready for `rlcore train recipes/thoughts.toml`")


if __name__ == "__main__":
    main()
