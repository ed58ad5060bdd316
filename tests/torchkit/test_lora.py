"""First values and merged weights of adapters."""

import numpy as np
import torch
from torch import Tensor

from rlcore.spi import LoraSpec
from rlcore_torchkit.adapters.lora import Dropout, initial_adapters, merged

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


def kept(dropout: Dropout, name: str, rows: slice = slice(0, 1000), columns: slice = slice(0, 32)) -> Tensor:
    states = torch.zeros(rows.stop - rows.start, columns.stop - columns.start)
    return dropout.kept(name, states, 32, num_rows=1000, first_row=rows.start, first_column=columns.start)


def test_dropped_inputs_have_the_share_and_keep_the_mean() -> None:
    """Padding is kept, and another layer or microbatch drops others."""
    dropout = Dropout(share=0.25, key=(0, 1), num_tokens=998)
    found = kept(dropout, "layer")
    np.testing.assert_allclose(sorted(set(found[:998].flatten().tolist())), [0.0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(float(found[:998].mean()), 1.0, atol=0.02)
    assert torch.equal(found, kept(dropout, "layer"))
    for other in (kept(dropout, "other"), kept(Dropout(share=0.25, key=(0, 2), num_tokens=998), "layer")):
        np.testing.assert_allclose(float((found != other).float().mean()), 2 * 0.25 * 0.75, atol=0.02)


def test_ranks_drop_parts_of_one_draw() -> None:
    dropout = Dropout(share=0.5, key=(3,), num_tokens=990)
    whole = kept(dropout, "layer")
    assert torch.equal(kept(dropout, "layer", rows=slice(500, 1000)), whole[500:])
    assert torch.equal(kept(dropout, "layer", columns=slice(16, 32)), whole[:, 16:])
