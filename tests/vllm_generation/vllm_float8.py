"""8-bit weights worked out by themselves, from the definition of the format, to compare with what an engine holds.

E4M3 (arXiv:2209.05433, table 1): a sign, 4 bits of exponent with bias 7, 3 of mantissa, 448 at most, no infinity. A block W of
a weight is held as the nearest codes to W / s with s = max |W| / 448 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

import re

import numpy as np
import torch

BLOCK = 128
LARGEST = 448.0
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROUND_OFF = 1e-6
"""Relative, of a quotient in float32: so close to the middle between two codes either of them is right."""


def _value(code):
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


VALUES = np.array([np.nan if code & 127 == 127 else _value(code) for code in range(256)])
GRID = np.unique(VALUES[np.isfinite(VALUES)])


def held_weights(worker):
    """In a rank of an engine: name to [codes uint8, scales float32] of layers in 8 bits, or to the weight in float32. The
    weights of experts are named w13_weight and w2_weight."""
    held = {}
    for prefix, layer in worker.model_runner.get_model().named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if not name.endswith("weight"):
                continue
            key = f"{prefix}.{name}".replace(".routed_experts", "").removesuffix(".weight")
            if parameter.dtype == torch.float8_e4m3fn:
                scales = [getattr(layer, name + end, None) for end in ("_scale_inv", "_scale")]
                (scale,) = [each for each in scales if each is not None]
                codes = parameter.detach().view(torch.uint8) if parameter.is_contiguous() else parameter.t().view(torch.uint8)
                held[key] = [codes.cpu().numpy().copy(), scale.detach().float().cpu().numpy().copy()]
            else:
                held[key] = parameter.detach().float().cpu().numpy().copy()
    return held


def assert_holds(tensors, held, *, per_block):
    """That the layers in 8 bits hold the nearest codes to these tensors of a checkpoint, under the scales that belong to them,
    and that embeddings, norms, routers and the head hold the tensors themselves. Returns how many layers of each kind."""
    numbers = {name: tensor.float().cpu().numpy().astype(np.float64) for name, tensor in tensors.items()}
    num_quantized, num_plain = 0, 0
    for name, found in held.items():
        expected = _checkpoint_weight(numbers, name)
        if isinstance(found, list):
            assert re.search(r"\.(self_attn|mlp)\.(?!gate$)", name)
            _assert_nearest(expected, *found, per_block=per_block)
            num_quantized += 1
        else:
            # What vLLM adds to a vocabulary comes last; of a router on CPU it keeps a form of its own alone.
            assert found.size == 0 or np.array_equal(found[: len(expected)], expected), name
            num_plain += 1
    return num_quantized, num_plain


def _checkpoint_weight(numbers, name):
    """The weight of one of vLLM's layers, as it puts the checkpoint's together."""
    prefix, _, last = name.rpartition(".")
    if last in ("w13_weight", "w2_weight"):
        parts = ("gate_proj", "up_proj") if last == "w13_weight" else ("down_proj",)
        num_experts = sum(bool(re.fullmatch(rf"{re.escape(prefix)}\.\d+\.{parts[0]}\.weight", each)) for each in numbers)
        names = [[f"{prefix}.{index}.{part}.weight" for part in parts] for index in range(num_experts)]
        return np.stack([np.concatenate([numbers[part] for part in each]) for each in names])
    if last == "lm_head" or name == "lm_head":
        return numbers.get("lm_head.weight", numbers["model.embed_tokens.weight"])
    if last in FUSED:
        return np.concatenate([numbers[f"{prefix}.{part}.weight"] for part in FUSED[last]])
    return numbers[f"{name}.weight"]


def _assert_nearest(weight, codes, scales, *, per_block):
    if weight.ndim == 3:
        for one_weight, one_codes, one_scales in zip(weight, codes, scales, strict=True):
            _assert_nearest(one_weight, one_codes, one_scales, per_block=per_block)
        return
    expected = _block_scales(weight) if per_block else np.abs(weight).max() / LARGEST
    np.testing.assert_allclose(scales.reshape(np.shape(expected)), expected, rtol=ROUND_OFF)
    spread = np.kron(expected, np.ones((BLOCK, BLOCK)))[: weight.shape[0], : weight.shape[1]] if per_block else expected
    quotients = weight / spread
    above = np.clip(np.searchsorted(GRID, quotients), 1, len(GRID) - 1)
    nearest = np.minimum(np.abs(quotients - GRID[above - 1]), np.abs(quotients - GRID[above]))
    assert codes.shape == weight.shape
    assert (np.abs(VALUES[codes] - quotients) <= nearest + ROUND_OFF * np.maximum(np.abs(quotients), 1)).all()


def _block_scales(weight):
    rows, columns = (range(0, size, BLOCK) for size in weight.shape)
    tops = [[np.abs(weight[row : row + BLOCK, column : column + BLOCK]).max() for column in columns] for row in rows]
    return np.array(tops) / LARGEST
