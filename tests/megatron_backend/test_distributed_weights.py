"""Checkpoints of Megatron's format as weights: of another model, and incomplete; test_initial reads those of Megatron-LM."""

from pathlib import Path

import pytest
from megatron_weights_cases import Opened, assert_equal, in_files, opened

from rlcore.spi import CheckpointError, ModelError
from rlcore_megatron.checkpoints import distributed_weights
from rlcore_megatron.checkpoints.checkpoint_check import read_metadata
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_torchkit.testing.models import make_model


def test_what_is_written_is_read_again(directory: Path, model: Opened, tmp_path: Path) -> None:
    model.load()
    distributed_weights.write(tmp_path / "kept", model.parts)
    shapes = distributed_weights.stored_shapes(read_metadata(tmp_path / "kept"))
    assert shapes["decoder.final_layernorm.weight"] == (16,)
    for part in model.parts:
        for parameter in part.parameters():
            parameter.data.zero_()
    distributed_weights.read(tmp_path / "kept", model.parts)
    assert_equal(model.exported(), in_files(directory))


def test_a_checkpoint_of_another_model(directory: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen3_moe", hidden_size=16, num_layers=3, alphabet="abc")
    with opened(other, ParallelLayout()) as opened_other:
        opened_other.load()
        distributed_weights.write(tmp_path / "kept", opened_other.parts)
        distributed_weights.read(tmp_path / "kept", opened_other.parts)
    with opened(directory, ParallelLayout()) as model, pytest.raises(ModelError) as raised:
        distributed_weights.read(tmp_path / "kept", model.parts)
    found = {problem.found: problem.expected for problem in raised.value.problems}
    assert found["embedding.word_embeddings.weight of shape [5, 16]"].startswith("[102, 16]")


def test_an_incomplete_checkpoint(model: Opened, tmp_path: Path) -> None:
    model.load()
    distributed_weights.write(tmp_path / "kept", model.parts)
    file = max((tmp_path / "kept").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="expected at least"):
        distributed_weights.read(tmp_path / "kept", model.parts)
