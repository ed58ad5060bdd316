"""The memory that a model takes."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ModelSpec
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.models import load_config, standard_config
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.setup.memory import model_size


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_size_of_a_model_is_that_of_its_weights(tmp_path: Path, architecture: Any, tied: bool) -> None:
    from safetensors.torch import load_file

    directory = make_model(tmp_path, architecture, tied=tied, hidden_size=64, num_heads=4, num_kv_heads=2)
    dims = ModelDims.of(standard_config(load_config(ModelSpec(path=str(directory)))))
    assert dims is not None
    size = model_size(dims, "float32")
    held = sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    assert size.weights == pytest.approx(held, rel=0.02)
    assert size.weights <= held
    assert size.kv_per_token == 2 * 2 * 2 * 16 * 4
    linear = size.weights - model_size(dims, "float32", fp8=True).weights
    names = ("self_attn", "mlp.down", "mlp.gate_proj", "mlp.up", "experts")
    weights = load_file(directory / "model.safetensors")
    in_8_bits = sum(
        weight.numel() for name, weight in weights.items() if any(f".{part}" in name for part in names) and weight.ndim > 1
    )
    assert linear == pytest.approx(3 * in_8_bits)
    assert model_size(dims, "float32", fp8_cache=True).kv_per_token == size.kv_per_token / 4
