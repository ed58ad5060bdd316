"""What a refit announces: it survives the way to another process, and is compared with the model's checkpoint."""

import pytest
from attrs import evolve
from safetensors.torch import load_file
from transformers import AutoConfig

from rlcore.spi import RefitError, TensorSpec
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.channels.manifest import Manifest, expected_shapes

FIRST, SECOND = (
    TensorSpec(name="a", shape=(2, 3), dtype="float32"),
    TensorSpec(name="b", shape=(4,), dtype="bfloat16", keeps_dtype=True),
)
MANIFEST = Manifest(weight_version=7, specs=(FIRST, SECOND), persistent=True)
EXPECTED = {"a": (2, 3), "b": (4,)}


def test_it_travels_in_plain_containers():
    assert Manifest.from_wire(MANIFEST.to_wire()) == MANIFEST


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((FIRST, SECOND, FIRST), "listed more than once by the trainer: a"),
        ((FIRST,), "missing from what the trainer exports: b"),
        ((FIRST, SECOND, evolve(FIRST, name="c")), "unknown to the model: c"),
        ((FIRST, evolve(SECOND, shape=(2, 2))), r"b has shape \[2, 2\]; expected \[4\]"),
        ((FIRST, evolve(SECOND, dtype="int8")), "b has dtype int8; expected one of float32, "),
    ],
)
def test_what_is_not_the_models_is_named(specs, message):
    MANIFEST.check(EXPECTED)
    with pytest.raises(RefitError, match=message):
        evolve(MANIFEST, specs=specs).check(EXPECTED)


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("llama", False), ("qwen3_moe", True)])
def test_a_checkpoint_consists_of_what_is_in_the_models_file(architecture, tied, tmp_path):
    directory = make_model(tmp_path, architecture, tied=tied)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    assert expected_shapes(AutoConfig.from_pretrained(directory), trust_remote_code=False) == saved
    assert ("lm_head.weight" in saved) is not tied
