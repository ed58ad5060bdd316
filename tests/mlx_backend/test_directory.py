"""Model directories: what is written is what was held, and what is wrong is named."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_support import edited, loaded, spec_of

from rlcore.spi import ModelError, StorageError
from rlcore_mlx.decoder import Decoder
from rlcore_mlx.directory import load_weights, save_weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_written_directory_is_the_same_model(dtype, model_directory, tmp_path):
    _, weights = loaded(model_directory(), dtype)
    files = save_weights(weights, spec_of(model_directory(), dtype), tmp_path)
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    _, again = loaded(tmp_path, dtype)
    assert again.keys() == weights.keys()
    assert all(mx.array_equal(again[name], weight) for name, weight in weights.items())


def test_a_tied_head_that_is_stored_again_and_what_no_reader_takes_are_left_out(model_directory, tmp_path):
    _, weights = loaded(model_directory())
    target = edited(model_directory(), tmp_path / "model")
    twice = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"], "mtp.norm.weight": mx.ones(32)}
    twice["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.ones(4)
    mx.save_safetensors(str(target / "model.safetensors"), twice)
    assert loaded(target)[1].keys() == weights.keys()


def test_tensors_that_do_not_fit_are_named(model_directory, tmp_path):
    _, weights = loaded(model_directory())
    target = edited(model_directory(), tmp_path / "model")
    wrong = {**weights, "model.norm.weight": mx.ones(3), "other": mx.ones(1)}
    del wrong["model.layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(target / "model.safetensors"), wrong)
    with pytest.raises(ModelError) as raised:
        loaded(target)
    found = " ".join(problem.found for problem in raised.value.problems)
    for part in ("missing: model.layers.1.mlp.up_proj.weight", "unknown to the model: other", "model.norm.weight of [3]"):
        assert part in found


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(number, model_directory, tmp_path):
    _, weights = loaded(model_directory())
    target = edited(model_directory(), tmp_path / "model")
    mx.save_safetensors(str(target / "model.safetensors"), {**weights, "model.norm.weight": mx.full(32, number)})
    with pytest.raises(ModelError, match="NaN or infinite numbers in model.norm.weight"):
        loaded(target)


def test_a_file_that_lost_its_end_is_refused(model_directory, tmp_path):
    target = edited(model_directory(), tmp_path / "model")
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="readable safetensors"):
        load_weights(Decoder.of(spec_of(target)), spec_of(target), "float32")


def test_a_folder_that_is_not_there_is_an_error_of_storage(model_directory, tmp_path):
    _, weights = loaded(model_directory())
    with pytest.raises(StorageError):
        save_weights(weights, spec_of(model_directory()), tmp_path / "none")
    assert np.array(weights["model.norm.weight"]).shape == (32,)
