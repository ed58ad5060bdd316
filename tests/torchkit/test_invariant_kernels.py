"""On CPU: the formulas against transformers' own."""

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from rlcore_torchkit.layers.invariant_kernels import multiplied_by_torch, rotary_table, rotate, silu_and_multiply

CONFIG = Qwen3Config(head_dim=16, max_position_embeddings=50)


def test_rotation_is_that_of_transformers():
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(9, heads, 16, generator=random) for heads in (4, 2))
    positions = torch.tensor([0, 1, 2, 3, 0, 49, 7, 8, 9])
    table = rotary_table(16, CONFIG.rope_parameters["rope_theta"], 50, torch.float32, torch.device("cpu"))
    found = rotate(query, key, positions, table)
    cosines, sines = Qwen3RotaryEmbedding(CONFIG)(query, positions[None])
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cosines, sines)
    for turned, right in zip(found, expected, strict=True):
        torch.testing.assert_close(turned, right[0].transpose(0, 1), rtol=0, atol=1e-5)


def test_the_gate_comes_first():
    gate, up = torch.randn(2, 3, 8)
    beside = torch.cat([gate, up], dim=-1)
    torch.testing.assert_close(silu_and_multiply(beside), gate * gate.sigmoid() * up, rtol=0, atol=1e-6)
    assert torch.equal(silu_and_multiply(beside), multiplied_by_torch(beside))
