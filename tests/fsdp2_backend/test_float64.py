"""Training in float64 against transformers and torch in float64."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from float64_reference import Float64Reference
from fsdp2_support import TEMPERATURE, assert_same, exported, make_backend, make_batch, make_context, split, step_request
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import rlcore
from rlcore.run.plan.prepare import prepare
from rlcore.spi import (
    CheckContext,
    CloseRequest,
    LogprobsRequest,
    LoraSpec,
    ModelSpec,
    OptimizerSpec,
    PluginError,
    SaveStateRequest,
    TokenBatch,
)
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config

TOLERANCE = 1e-10


def logprobs_request(microbatches: Sequence[TokenBatch], version: int = 0) -> LogprobsRequest:
    options = {"temperature": TEMPERATURE, "entropy": True, "weight_version": version}
    return LogprobsRequest(microbatches=tuple(microbatches), model="policy", **options)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
def test_steps_equal_transformers_in_float64(architecture, model_directory, backend):
    directory = model_directory(architecture, tied=False)
    trainer, reference = backend(directory, dtype="float64"), Float64Reference(directory)
    for version in range(3):
        batch = make_batch(seed=version)
        request = step_request(split(batch, [[4, 0], [1, 5, 3], [2]]), batch.counts(), version)
        result = trainer.train_step(request)
        loss, norm = reference.step(batch)
        assert result.loss == pytest.approx(loss, abs=TOLERANCE)
        assert result.grad_norm == pytest.approx(norm, abs=TOLERANCE)
    weights = exported(trainer, 3, dtype="float64")
    if architecture != "qwen3_moe":  # of which transformers holds experts in other tensors
        assert_same(weights, reference.tensors(), TOLERANCE)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float64}


@pytest.fixture(scope="module")
def pair(model_directory) -> Iterator[tuple[Fsdp2Backend, Float64Reference]]:
    """Trainer and reference of one model."""
    trainer = make_backend(model_directory(), dtype="float64")
    yield trainer, Float64Reference(model_directory())
    trainer.close(CloseRequest())


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**16), data=st.data())
def test_log_probabilities_equal_transformers_in_float64_for_any_microbatches(seed, data, pair):
    trainer, reference = pair
    batch = make_batch(seed=seed)
    order = data.draw(st.permutations(range(batch.num_sequences)))
    cut = data.draw(st.integers(1, batch.num_sequences - 1))
    groups = [sorted(order[:cut]), sorted(order[cut:])]
    result = trainer.get_logprobs(logprobs_request(split(batch, groups)))
    with torch.no_grad():
        for group, logprobs, entropy in zip(groups, result.logprobs, result.entropy, strict=True):
            expected = reference.logprobs(batch.select(np.asarray(group)))
            for found, one in zip((logprobs, entropy), expected, strict=True):
                assert found.dtype == np.float64
                np.testing.assert_allclose(found, one.numpy(), rtol=0.0, atol=TOLERANCE)


def test_norms_of_gradients_and_what_is_saved_are_float64(model_directory, backend, tmp_path):
    directory, batch = model_directory("qwen3"), make_batch()
    trainer, reference = backend(directory, dtype="float64"), Float64Reference(directory)
    result = trainer.train_step(evolve(step_request([batch], batch.counts()), gradient_norms=True))
    reference.backward(batch)
    expected = {name: gradient.norm().item() for name, gradient in reference.gradients().items()}
    assert result.gradient_norms == pytest.approx(expected, abs=TOLERANCE)
    for kind in ("hf", "resume"):
        (tmp_path / kind).mkdir()
        trainer.save_state(SaveStateRequest(directory=tmp_path / kind, kind=kind))
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same(saved, exported(trainer, 1, dtype="float64"), 0.0)
    state = load_file(tmp_path / "resume" / "trainer-00000.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float64}
    again = backend(tmp_path / "hf", dtype="float64")
    assert_same(exported(again, 0, dtype="float64"), saved, 0.0)


def test_adapters_are_merged_and_saved_in_float64(model_directory, tmp_path):
    directory, batch = model_directory("qwen3"), make_batch()
    context = evolve(make_context(directory, dtype="float64"), lora=LoraSpec(rank=4, alpha=8.0))
    trainer = Fsdp2Backend(context, Fsdp2Config())
    for version in range(2):
        trainer.train_step(step_request([batch], batch.counts(), version))
    for kind in ("hf", "peft"):
        (tmp_path / kind).mkdir()
        trainer.save_state(SaveStateRequest(directory=tmp_path / kind, kind=kind))
    found = trainer.get_logprobs(logprobs_request([batch], version=2)).logprobs[0]
    merged = Float64Reference(tmp_path / "hf").logprobs(batch)[0].detach()
    np.testing.assert_allclose(found, merged.numpy(), rtol=0.0, atol=TOLERANCE)
    lora = evolve(context.lora, init_from=str(tmp_path / "peft"))
    again = Fsdp2Backend(evolve(context, lora=lora), Fsdp2Config())
    np.testing.assert_array_equal(again.get_logprobs(logprobs_request([batch])).logprobs[0], found)
    for one in (trainer, again):
        one.close(CloseRequest())


def problems(directory: Path, config: Fsdp2Config, optimizer: OptimizerSpec) -> list[str]:
    context = CheckContext(
        model=ModelSpec(path=str(directory), dtype="float64"),
        device="cpu",
        max_sequence_length=16,
        world_size=1,
        optimizer=optimizer,
    )
    return [one.path for one in check(context, config)]


@pytest.mark.parametrize("option", ["fp8", "batch_invariant", "compile_layers"])
def test_options_of_narrower_dtypes_are_refused(option, model_directory):
    paths = problems(model_directory(), Fsdp2Config(**{option: True}), OptimizerSpec(moments="8bit"))
    assert f"trainer.fsdp2.{option}" in paths
    assert "optimizer.moments" in paths


RECIPE = {
    "algorithm": {"name": "sft"},
    "run": {"name": "run", "num_steps": 2},
    "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 8},
    "training": {"prompts_per_step": 2},
    "checkpoint": {"export": "hf"},
    "sinks": {"names": []},
}


def test_sft_trains_and_exports_in_float64(model_directory, tmp_path):
    run = {**RECIPE["run"], "directory": str(tmp_path), "device": "cpu"}
    recipe = {**RECIPE, "run": run, "model": {"path": str(model_directory()), "dtype": "float64"}}
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}]
    done = rlcore.train(recipe, dataset=rows, progress="silent")
    saved = load_file(done.path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float64}


def test_a_recipe_with_rollouts_is_refused_since_no_generator_has_float64(model_directory):
    recipe = {
        **RECIPE,
        "algorithm": {"name": "grpo"},
        "environment": {"name": "arithmetic"},
        "model": {"path": str(model_directory()), "dtype": "float64"},
        "run": {"device": "cpu"},
    }
    with pytest.raises(PluginError) as error:
        prepare({**recipe, "generator": {"name": "transformers"}})
    assert str(error.value).startswith("generator 'transformers' is not usable: does not compute in float64")
