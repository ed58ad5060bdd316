"""First values and merged weights of adapters."""

import numpy as np
import torch

from rlcore.spi import LoraSpec
from rlcore_torchkit.lora import initial_adapters, merged

LAYERS = {"a.q_proj": (8, 400), "b.q_proj": (8, 400)}
SPEC = LoraSpec(rank=50)


def test_first_values_are_uniform_and_depend_on_seed_and_name() -> None:
    first, again = (initial_adapters(LAYERS, SPEC, "base", 3) for _ in range(2))
    a, b = first["a.q_proj.lora_A.weight"], first["b.q_proj.lora_A.weight"]
    assert float(a.abs().max()) <= 0.05
    np.testing.assert_allclose(np.quantile(a.numpy(), [0.25, 0.5, 0.75]), [-0.025, 0.0, 0.025], atol=1e-3)
    assert not torch.equal(a, b)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(a, initial_adapters(LAYERS, SPEC, "base", 4)["a.q_proj.lora_A.weight"])
    assert not first["a.q_proj.lora_B.weight"].any()
    fewer = initial_adapters({"b.q_proj": (8, 400)}, SPEC, "base", 3)
    assert torch.equal(fewer["b.q_proj.lora_A.weight"], b), "other layers change a layer's values"


def test_merged_weights() -> None:
    """In float32 whatever the weight's dtype: small products are not rounded to nothing before they are added."""
    random = np.random.default_rng(0)
    weight, a, b = (random.normal(size=shape).astype(np.float32) for shape in ((6, 5), (2, 5), (6, 2)))
    narrow = torch.from_numpy(weight).bfloat16()
    found = merged(narrow, torch.from_numpy(a), torch.from_numpy(1e-4 * b), 0.5)
    expected = narrow.double().numpy() + 0.5 * (1e-4 * b.astype(np.float64)) @ a
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)
