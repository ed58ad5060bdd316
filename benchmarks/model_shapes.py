"""Model shapes of the benchmarks: directories with random weights, or with none, and a tokenizer to match."""

import json
import random
import string
import sys
import zlib
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "3m": {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen2-1.5B, Llama-3.1-8B, Qwen3-8B and Qwen3-30B-A3B, one for CPUs, and two to try the scripts with."""
END_OF_TEXT = "<|endoftext|>"


def require_device(device: str) -> None:
    """End the script where there is no such device, before it has done anything."""
    from rlcore.gpu import detect_device  # TRL's own environment has no rlcore

    if device == "cuda" and detect_device() != "cuda":
        sys.exit("found no CUDA device; expected one. On a CPU, `--quick --device cpu` tries the script with a tiny shape")


def config_of(shape: str) -> Any:
    """The transformers configuration of a shape."""
    from transformers import AutoConfig

    options = dict(SHAPES[shape])
    return AutoConfig.for_model(
        options.pop("model_type"),
        **options,
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


def write_config(directory: Path, shape: str, dtype: str) -> Path:
    """config.json and a tokenizer, without weights."""
    config = config_of(shape)
    names = {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
    config.architectures = [names[config.model_type]]
    config.dtype = dtype
    _write_tokenizer(directory, config.vocab_size)
    config.save_pretrained(directory)
    return directory


def write_model(directory: Path, shape: str, device: str, dtype: str) -> Path:
    """The same with random weights."""
    write_config(directory, shape, dtype)
    make_model(shape, device, dtype).save_pretrained(directory)
    return directory


def make_model(shape: str, device: str, dtype: str) -> Any:
    """A transformers model with random weights on a device."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=getattr(torch, dtype))


def num_parameters(shape: str) -> int:
    """Tied ones counted once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config_of(shape)).parameters())


def kv_bytes_per_token(shape: str, bytes_per_number: int = 2) -> int:
    """Keys and values of all layers."""
    options = SHAPES[shape]
    return 2 * options["num_hidden_layers"] * options["num_key_value_heads"] * head_dim(shape) * bytes_per_number


def head_dim(shape: str) -> int:
    """Numbers in a head."""
    options = SHAPES[shape]
    return int(options.get("head_dim") or options["hidden_size"] // options["num_attention_heads"])


def active_weights(shape: str) -> int:
    """Weights of the matrix products that a token takes part in; the head is one, the embedding is not."""
    options = SHAPES[shape]
    hidden, heads, keys = options["hidden_size"], options["num_attention_heads"], options["num_key_value_heads"]
    columns = options["intermediate_size"]
    if options.get("num_experts"):
        columns = options["num_experts_per_tok"] * options["moe_intermediate_size"]
    layer = hidden * head_dim(shape) * (2 * heads + 2 * keys) + 3 * hidden * columns + hidden * options.get("num_experts", 0)
    return options["num_hidden_layers"] * layer + hidden * options["vocab_size"]


def attention_flops(shape: str, squared: float) -> float:
    """Forward, of causal attention within sequences with this sum of squared lengths."""
    options = SHAPES[shape]
    return 2 * options["num_hidden_layers"] * options["num_attention_heads"] * head_dim(shape) * squared


def prompts(num_prompts: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, always the same for a seed; none is the token that ends a text."""
    import numpy as np

    return np.random.default_rng(seed).integers(2, vocab_size, (num_prompts, length)).tolist()


def reward(text: str) -> float:
    """In [0, 1): as good as random, yet always the same for a text."""
    return zlib.crc32(text.encode()) / 2**32


def texts(num_texts: int, length: int) -> list[str]:
    """Random letters, each of which is a token of its own."""
    source = random.Random(0)
    return ["".join(source.choices(string.ascii_lowercase, k=length)) for _ in range(num_texts)]


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Of bytes, and of words that no text is cut into but every decoded one is full of."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {END_OF_TEXT: 0}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    for token in range(len(vocabulary), vocab_size):
        vocabulary[f"Ġw{token}"] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
