"""Model directories whose files contradict each other are refused."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore_model_files.directory import model_problems

SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8, "C64": 8, "BOOL": 1}
EMBEDDING = "model.embed_tokens.weight"
CONFIG = {"vocab_size": 3, "hidden_size": 2, "num_hidden_layers": 2, "tie_word_embeddings": False}
GEMMA = {"vocab_size": 3, "hidden_size": 2, "num_hidden_layers": 2, "model_type": "gemma"}
TENSORS: Mapping[str, Any] = {
    EMBEDDING: ("F32", [3, 2]),
    "lm_head.weight": ("F32", [3, 2]),
    "model.layers.0.mlp.up_proj.weight": ("F32", [2]),
    "model.layers.1.mlp.up_proj.weight": ("F32", [2]),
}
INDEX = "model.safetensors.index.json"


def safetensors(tensors: Mapping[str, tuple[str, list[int]]], values: Mapping[str, bytes] | None = None) -> bytes:
    """A file of these tensors, of zeros but for `values`."""
    header, data = {}, b""
    for name, (dtype, shape) in tensors.items():
        length = SIZES[dtype]
        for size in shape:
            length *= size
        content = (values or {}).get(name, bytes(length))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + length]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def part(*names: str) -> bytes:
    return safetensors({name: TENSORS[name] for name in names})


NAMES = list(TENSORS)
TWO_FILES: dict[str, Any] = {
    "model.safetensors": None,
    "a.safetensors": part(*NAMES[:2]),
    "b.safetensors": part(*NAMES[2:]),
    INDEX: {"metadata": {}, "weight_map": {name: "a.safetensors" if name in NAMES[:2] else "b.safetensors" for name in NAMES}},
}
SECOND = {**TENSORS, "model.layers.2.mlp.up_proj.weight": ("F32", [2])}
PREDICTS = {"model.layers.2.eh_proj.weight": ("F32", [2])}
NARROW = {**TENSORS, "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [2])}
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
HEAD = {"lm_head.weight": b"\x01" * 24}


def write(directory: Path, changes: Mapping[str, Any]) -> list[str]:
    """Return the faults of a sound model directory with these files changed; None removes a file."""
    sound = {"config.json": CONFIG, "model.safetensors": safetensors(TENSORS), "tokenizer.json": {}}
    for name, content in (sound | dict(changes)).items():
        if content is not None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (directory / name).write_bytes(data)
    return [problem.found for problem in model_problems(str(directory))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        TWO_FILES,
        {**TWO_FILES, "model-00009-of-00009.safetensors": part(EMBEDDING)},
        {"pytorch_model.bin": b"x"},
        {"._model.safetensors": b"x"},
        {**TWO_FILES, "consolidated.safetensors": part(EMBEDDING)},
        {"config.json": {**CONFIG, "tie_word_embeddings": True}},
        {"config.json": {"text_config": CONFIG}},
        {"config.json": {"model_type": "unknown"}},
        {"config.json": {**CONFIG, "num_nextn_predict_layers": 1}, "model.safetensors": safetensors({**SECOND, **PREDICTS})},
        {"config.json": {**CONFIG, "quantization_config": {}, "vocab_size": 3}},
        {"config.json": {**CONFIG, "quantization_config": {"quant_method": "fp8"}}, "model.safetensors": safetensors(NARROW)},
        {"config.json": GEMMA},
        {"config.json": {**GEMMA, "tie_word_embeddings": False}, "model.safetensors": safetensors(TENSORS, HEAD)},
        {"config.json": {**GEMMA, "model_type": "llama"}, "model.safetensors": safetensors(TENSORS, HEAD)},
        {"model.safetensors": safetensors({**TENSORS, "model.position_ids": ("I64", [2])})},
        {"model.safetensors": safetensors({**TENSORS, "model.layers.0.attn.bias": ("U8", [2])})},
        {"model.safetensors": safetensors({**TENSORS, f"model.layers.{'9' * 5000}.x": ("U8", [2])})},
    ],
)
def test_directories_that_say_one_thing(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    assert write(tmp_path, changes) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({**TWO_FILES, "model.safetensors": safetensors(TENSORS)}, "model.safetensors beside model.safetensors.index.json"),
        ({"model-00001-of-00002.safetensors": part(EMBEDDING)}, "model-00001-of-00002.safetensors beside model.safetensors"),
        ({"consolidated.safetensors": part(EMBEDDING)}, "consolidated.safetensors beside model.safetensors"),
        (
            {"config.json": {**CONFIG, "num_nextn_predict_layers": 1}, "model.safetensors": safetensors(SECOND)},
            "weights of 3 layers",
        ),
        ({"adapter_config.json": {}}, "adapter_config.json beside model.safetensors"),
        ({**TWO_FILES, INDEX: {"metadata": {}, "weight_map": {EMBEDDING: "../a.safetensors"}}}, "the file ../a.safetensors"),
        ({**TWO_FILES, INDEX: {"metadata": {}, "weight_map": {EMBEDDING: "/a.safetensors"}}}, "the file /a.safetensors"),
        ({**TWO_FILES, INDEX: {"metadata": {}, "weight_map": {EMBEDDING: ""}}}, "the file "),
        ({**TWO_FILES, INDEX: {"metadata": {}, "weight_map": {EMBEDDING: "a" * 300}}}, f"the file {'a' * 99}"),
        ({**TWO_FILES, INDEX: {"metadata": {}, "weight_map": {EMBEDDING: "pytorch_model.bin"}}}, "the file pytorch_model.bin"),
        ({**TWO_FILES, INDEX: {"metadata": {}, "weight_map": {EMBEDDING: "a\0.safetensors"}}}, "the file a\0.safetensors"),
        ({**TWO_FILES, INDEX: {"weight_map": {EMBEDDING: "a.safetensors"}}}, "no metadata"),
        ({**TWO_FILES, INDEX: {"metadata": None, "weight_map": {EMBEDDING: "a.safetensors"}}}, "no metadata"),
        (
            {"model.safetensors": safetensors({**TENSORS, "norm.weight": ("F32", [2]), "model.norm.weight": ("F32", [2])})},
            "model.norm.weight, and the same without the prefix",
        ),
        *(
            (
                {"model.safetensors": safetensors({**TENSORS, "h.0.w": ("F32", [2]), f"{prefix}.h.0.w": ("F32", [2])})},
                f"{prefix}.h.0.w, and the same without the prefix",
            )
            for prefix in ("transformer", "gpt_neox", "backbone", "model.decoder", "decoder")
        ),
        *(
            (
                {"model.safetensors": safetensors({**TENSORS, NAMES[2]: (dtype, [2])})},
                f"{NAMES[2]} in {dtype}, without a quantization_config in config.json",
            )
            for dtype in ("C64", "BOOL")
        ),
        (
            {"model.safetensors": safetensors({**TENSORS, "model.layers.0.q_proj.bias": ("I64", [2])})},
            "model.layers.0.q_proj.bias in I64, without a quantization_config in config.json",
        ),
        ({**TWO_FILES, "b.safetensors": part(NAMES[2])}, f"{NAMES[3]} in no file that it names"),
        (
            {**TWO_FILES, "a.safetensors": part(*NAMES[:3]), "b.safetensors": part(NAMES[3])},
            f"{NAMES[2]} in another file than it says",
        ),
        ({**TWO_FILES, "b.safetensors": safetensors({**TENSORS, "x": ("F32", [1])})}, "x that it does not name"),
        ({**TWO_FILES, "a.safetensors": part(*NAMES[:3])}, f"{NAMES[2]} in several files"),
        ({"config.json": {**CONFIG, "vocab_size": 4}}, f"{EMBEDDING} of shape [3, 2]"),
        ({"config.json": {**CONFIG, "hidden_size": 4}}, f"{EMBEDDING} of shape [3, 2]"),
        ({"config.json": {**CONFIG, "num_hidden_layers": 1}}, "weights of 2 layers"),
        ({"config.json": {**CONFIG, "num_hidden_layers": 3}}, "weights of 2 layers"),
        (
            {"config.json": {**CONFIG, "tie_word_embeddings": True}, "model.safetensors": safetensors(TENSORS, HEAD)},
            f"lm_head.weight that is not {EMBEDDING}",
        ),
        (
            {"config.json": GEMMA, "model.safetensors": safetensors(TENSORS, HEAD)},
            f"lm_head.weight that is not {EMBEDDING}",
        ),
        (
            {"model.safetensors": safetensors({**TENSORS, FUSED: ("F8_E4M3", [2])})},
            f"{FUSED} in F8_E4M3, without a quantization_config in config.json",
        ),
        (
            {"model.safetensors": safetensors({**TENSORS, "x.qweight": ("I64", [2])})},
            "x.qweight in I64, without a quantization_config in config.json",
        ),
        ({"model.safetensors": safetensors(NARROW)}, f"{NAMES[2]} in F8_E4M3, without a quantization_config in config.json"),
    ],
)
def test_directories_that_say_two_things(tmp_path: Path, changes: Mapping[str, Any], found: str) -> None:
    assert found in write(tmp_path, changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": 5},
        {"shape": "ab"},
        {"shape": [[3], 2]},
        {"shape": [-3, -2]},
        {"shape": [3, 2.0]},
        {"shape": [3, True]},
        {"shape": [6, *[1] * 40]},
        {"shape": [3, 3]},
        {"dtype": ["F32"]},
        {"dtype": None},
        {"dtype": "F64"},
        {"data_offsets": [0, 24, 24]},
        {"data_offsets": ["a", 24]},
        {"data_offsets": [-24, 24]},
        {"data_offsets": [10**30, 24]},
        {"data_offsets": [0, 24.0]},
        {"data_offsets": [0, float("nan")]},
        {"data_offsets": [8, 32]},
        {"data_offsets": [24, 0]},
    ],
)
@pytest.mark.parametrize("other", [{}, {"lm_head.weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}])
def test_headers_that_no_tensors_can_have(tmp_path: Path, changes: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    entry = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24], **changes}
    text = json.dumps({EMBEDDING: entry, **other}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(24)
    config = {**CONFIG, "tie_word_embeddings": True}
    assert write(tmp_path, {"model.safetensors": content, "config.json": config}) == ["a header that is none of safetensors"]
