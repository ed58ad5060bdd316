"""The tensors of a dense family are those that transformers writes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore_model_files.directory import stored_shapes
from rlcore_torchkit.architectures.architecture import Architecture, tensor_shapes
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import find_architecture


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_shapes_are_those_of_a_written_model(model_directory: Callable[[str], Path], name: str) -> None:
    directory = model_directory(name)
    config = json.loads((directory / "config.json").read_text())
    family = find_architecture(config, str(directory))
    assert isinstance(family, Architecture)
    dims = ModelDims.of(family.standard(config))
    assert dims is not None
    assert tensor_shapes(family, dims) == stored_shapes(directory)
