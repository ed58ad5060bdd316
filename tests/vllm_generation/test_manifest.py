"""What a refit announces survives the way to another process, and the checkpoint that it is compared with."""

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from rlcore.spi import TensorSpec
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.channels.manifest import Manifest, expected_shapes

FIRST, SECOND = (
    TensorSpec(name="a", shape=(2, 3), dtype="float32"),
    TensorSpec(name="b", shape=(4,), dtype="bfloat16", keeps_dtype=True),
)
MANIFEST = Manifest(weight_version=7, specs=(FIRST, SECOND), persistent=True)


def test_it_travels_in_plain_containers():
    assert Manifest.from_wire(MANIFEST.to_wire()) == MANIFEST


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("llama", False), ("qwen3_moe", True)])
def test_a_checkpoint_consists_of_what_is_in_the_models_file(architecture, tied, tmp_path):
    directory = make_model(tmp_path, architecture, tied=tied)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    assert expected_shapes(AutoConfig.from_pretrained(directory), trust_remote_code=False) == saved
    assert ("lm_head.weight" in saved) is not tied
