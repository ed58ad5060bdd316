"""Small Hugging Face models of text and images, with random weights, a character tokenizer and a chat template."""

import json
import string
from pathlib import Path
from typing import Any

from rlcore_torchkit.testing.models import END_OF_TEXT, _save_quietly, make_tokenizer
from rlcore_torchkit.transformers_import import import_transformers

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}" + END_OF_TEXT + "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PATCH = 4
"""Pixels of a patch's side; an image token stands for 2 x 2 patches."""
HEAD_DIM = 32
"""The smallest that engines compute on CPU."""


def make_image_model(
    directory: Path,
    architecture: str = "qwen2_5_vl",
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    tied: bool = False,
    alphabet: str = string.printable,
    max_length: int = 512,
    max_pixels: int = 64 * 64,
    initializer_range: float = 0.08,
    dtype: str = "float32",
) -> Path:
    """Write config.json, preprocessor_config.json, generation_config.json, safetensors and a tokenizer; returns the directory.

    `architecture` is "qwen2_vl", "qwen2_5_vl" or "qwen3_vl". An image has 8 x 8 pixels a token, and at most `max_pixels`.
    """
    import torch

    import_transformers()
    from transformers import AutoConfig, AutoModelForImageTextToText

    make_tokenizer(directory, alphabet)
    ids = _add_marks(directory)
    text = _text_options(architecture, hidden_size, num_layers, tied) | {
        "vocab_size": max(ids.values()) + 1,
        "max_position_embeddings": max_length,
        "initializer_range": initializer_range,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "initializer_range": initializer_range,
    }
    vision |= _vision_options(architecture, hidden_size)
    config = AutoConfig.for_model(
        architecture,
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = 0
    _save_quietly(model, directory)
    _write_preprocessor(directory, architecture, max_pixels)
    return directory


def _text_options(architecture: str, hidden_size: int, num_layers: int, tied: bool) -> dict[str, Any]:
    heads = hidden_size // HEAD_DIM
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": HEAD_DIM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": architecture == "qwen3_vl",
        },
        "tie_word_embeddings": tied,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _vision_options(architecture: str, hidden_size: int) -> dict[str, Any]:
    if architecture == "qwen2_vl":
        return {"embed_dim": 32, "hidden_size": hidden_size, "mlp_ratio": 2}
    options = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": hidden_size}
    if architecture == "qwen3_vl":
        return options | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return options | {"fullatt_block_indexes": [1], "window_size": 16}


def _add_marks(directory: Path) -> dict[str, int]:
    """Add the tokens around and of images; returns their numbers."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(file))
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings |= {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "Qwen2TokenizerFast", "bos_token": None}
    settings_file.write_text(json.dumps(settings, indent=2))
    return {mark: tokenizer.token_to_id(mark) or 0 for mark in MARKS}


def _write_preprocessor(directory: Path, architecture: str, max_pixels: int) -> None:
    processors = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processors[architecture],
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": max_pixels},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    video = settings | {
        "video_processor_type": "Qwen3VLVideoProcessor" if architecture == "qwen3_vl" else "Qwen2VLVideoProcessor"
    }
    del video["image_processor_type"]
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
