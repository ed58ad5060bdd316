"""Small Hugging Face model directories with random weights and a character tokenizer, made in a second, without a download."""

import json
import string
from pathlib import Path
from typing import Any

from rlcore.spi.weights import Head
from rlcore_torchkit.transformers_import import import_transformers

END_OF_TEXT = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(directory: Path, alphabet: str = string.printable) -> int:
    """Write tokenizer.json and tokenizer_config.json: one token per byte of the alphabet's characters in UTF-8, which for ASCII
    is one per character, and one to end a text. Returns their number.

    It is a byte-level BPE without merges, since transformers reads the tokenizer of some architectures as one whatever it is.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {END_OF_TEXT: 0, "<|unknown|>": 1}
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for symbol in "".join(piece for character in alphabet for piece, _ in bytewise.pre_tokenize_str(character)):
        vocabulary.setdefault(symbol, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = bytewise
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "unk_token": "<|unknown|>",
        "pad_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return len(vocabulary)


def make_model(
    directory: Path,
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    tied: bool = True,
    alphabet: str = string.printable,
    max_length: int = 512,
    initializer_range: float = 0.08,
    dtype: str = "float32",
    head: Head = "tokens",
) -> Path:
    """Write config.json, generation_config.json, safetensors and a tokenizer; returns the directory. With `head` "value" the
    model is the architecture's *ForSequenceClassification with one label.

    `architecture` is a model_type that transformers knows. Weights are random, by default drawn wider than usual so that the
    model's distributions are far from uniform and a wrong log-probability shows.
    """
    import torch

    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    vocab_size = make_tokenizer(directory, alphabet)
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tied,
        "initializer_range": initializer_range,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    special = {
        "sliding_window": None,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden_size,
        "norm_topk_prob": True,
    }
    defaults = AutoConfig.for_model(architecture)
    options |= {key: value for key, value in special.items() if hasattr(defaults, key)}
    options |= {"num_labels": 1} if head == "value" else {}
    config = AutoConfig.for_model(architecture, **options)
    model_class = AutoModelForSequenceClassification if head == "value" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class.from_config(config, dtype=getattr(torch, dtype))
    if head == "tokens":
        model.generation_config.eos_token_id = 0
    _save_quietly(model, directory)
    return directory


def _save_quietly(model: Any, directory: Path) -> None:
    """Without a progress bar, which would stand between a test's or a demo's own lines."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
