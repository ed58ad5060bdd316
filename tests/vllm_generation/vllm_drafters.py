"""Drafters for a model whose tokens repeat: each guesses that the last token comes again."""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from decoder_families import TRAINED, make_family

EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def make_draft_model(directory: Path, model: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The model with other weights."""
    shutil.copytree(model, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def change_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Change a model's config.json, and its weights so that they are of as many layers, tokens and columns as that says."""
    file, weights = directory / "config.json", directory / "model.safetensors"
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps(content))
    layers = content["num_hidden_layers"]
    if not values or type(layers) is not int:
        return
    most = layers + content.get("num_nextn_predict_layers", 0)
    tensors = load_file(weights)
    numbered = {name: int(match[1]) for name in tensors if (match := LAYER.match(name))}
    tensors = {name: tensor for name, tensor in tensors.items() if numbered.get(name, 0) < most}
    if numbered:
        added = set(range(layers)) - set(numbered.values())
        tensors |= {f"model.layers.{number}.input_layernorm.weight": torch.zeros(1) for number in added}
    if EMBEDDING in tensors:
        embedding = torch.zeros(content["vocab_size"], content["hidden_size"])
        tensors[EMBEDDING] = tensors[EMBEDDING] if tensors[EMBEDDING].shape == embedding.shape else embedding
    if content.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, weights, metadata={"format": "pt"})


def make_head(directory: Path, method: str, model: Path) -> Path:
    """A head of EAGLE or EAGLE-3 whose layer adds nothing to what it reads: the embedding of a token. The first has the model's
    own output layer, the second one like it."""
    content = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = (content[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    width, head_dim = content["intermediate_size"], content["head_dim"]
    kept = ("vocab_size", "max_position_embeddings", "head_dim", "num_key_value_heads", "rms_norm_eps")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads")
    config = {name: content[name] for name in (*kept, *sizes)} | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    is_first = method == "eagle"
    layer, read = ("layers.0", hidden) if is_first else ("midlayer", 2 * hidden)
    shapes = {
        "self_attn.q_proj": (heads * head_dim, read),
        "self_attn.k_proj": (kv_heads * head_dim, read),
        "self_attn.v_proj": (kv_heads * head_dim, read),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    weights = {f"{layer}.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    weights[f"{layer}.post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, (1 if is_first else 2) * hidden)], dim=1)
    if not is_first:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": content["vocab_size"]}
        config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
            weights[f"{name}.weight"] = torch.ones(hidden)
        weights["lm_head.weight"] = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_with_own_head(directory: Path, num_layers: int = 2, **options: Any) -> Path:
    """A GLM-4.5 with a multi-token head in its files, whose layer adds nothing to the embedding of the token before: the head
    guesses that it comes again where the output layer is the embedding, which in the files it is not."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": num_layers}
    kept = {"tie_word_embeddings": False, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 256}
    make_family(directory, "glm4_moe", {**TRAINED["glm4_moe"], **sizes, **kept, **options})
    weights = load_file(directory / "model.safetensors")
    last, own = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    for name, value in list(weights.items()):
        if name.startswith(last):
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name.replace(last, own)] = torch.zeros_like(value) if adds else value.clone()
    size = sizes["hidden_size"]
    weights |= {f"{own}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{own}eh_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    for copy, name in {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}.items():
        weights[f"{own}{copy}.weight"] = weights[name].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
