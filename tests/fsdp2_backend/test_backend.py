"""A step on one rank against plain transformers and torch."""

import gc

import pytest
from attrs import evolve
from fsdp2_support import Reference, assert_same, assert_stepped_alike, exported, make_backend, make_batch, split, step_request
from transformers import PreTrainedModel

from rlcore.spi import BoundError, CloseRequest, ContractError, LossSpec, NonFiniteError

NUM_SEQUENCES = 6


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_several_steps_equal_plain_torch(architecture, model_directory, backend, tmp_path):
    directory = model_directory(architecture, tied=False)
    trainer, reference = backend(directory), Reference(directory)
    for version in range(3):
        batch = make_batch(seed=version)
        result = trainer.train_step(step_request(split(batch, [[4, 0], [1, 5, 3], [2]]), batch.counts(), version))
        loss, norm = reference.step(batch)
        assert result.weight_version == version + 1
        assert result.learning_rate == 1e-3
        assert result.loss == pytest.approx(loss, abs=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert norm > 0.5, "clipping is part of what is compared"
        assert result.metrics["tokens"] == pytest.approx(1.0)
    assert_stepped_alike(exported(trainer, 3), reference.saved(tmp_path))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (LossSpec(path="fsdp2_support:nan_loss", config=-1e9, token_columns=("advantages",)), "loss is nan"),
        (LossSpec(path="fsdp2_support:steep_loss", config=None), r"gradient's norm is nan.*embed_tokens.weight"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_non_finite_step_is_refused_and_the_state_kept(loss, message, dtype, backend):
    trainer, untouched = backend(dtype=dtype), backend(dtype=dtype)
    batch = make_batch()
    for one in (trainer, untouched):
        one.train_step(step_request([batch], batch.counts()))
    with pytest.raises(NonFiniteError, match=f"weight version 1.*{message}"):
        trainer.train_step(step_request([batch], batch.counts(), 1, loss))
    assert_same(exported(trainer, 1), exported(untouched, 1), tolerance=0.0)
    results = [one.train_step(step_request([batch], batch.counts(), 1)) for one in (trainer, untouched)]
    assert results[0] == results[1]
    assert_same(exported(trainer, 2), exported(untouched, 2), tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_over_a_bound_is_refused_and_the_state_kept(dtype, backend):
    trainer, untouched = backend(dtype=dtype), backend(dtype=dtype)
    batch = make_batch()
    requests = [step_request([batch], batch.counts(), version) for version in range(2)]
    for one in (trainer, untouched):
        one.train_step(requests[0])
    with pytest.raises(BoundError, match="version 1: .* entropy is [0-9.]+, above 0.5") as raised:
        trainer.train_step(evolve(requests[1], bounds={"entropy": 0.5, "longest": 1e3, "absent": 0.0}))
    assert_same(exported(trainer, 1), exported(untouched, 1), tolerance=0.0)
    results = [one.train_step(requests[1]) for one in (trainer, untouched)]
    assert results[0] == results[1]
    assert raised.value.metrics == {"entropy": results[1].metrics["entropy"]}
    assert_same(exported(trainer, 2), exported(untouched, 2), tolerance=0.0)


def test_bfloat16_computes_close_to_float32_with_float32_masters(model_directory, backend):
    batch = make_batch()
    narrow, wide = backend(dtype="bfloat16"), backend(dtype="float32")
    results = [one.train_step(step_request(split(batch, [[0, 1, 2], [3, 4, 5]]), batch.counts())) for one in (narrow, wide)]
    assert results[0].loss == pytest.approx(results[1].loss, abs=0.05)
    assert results[0].loss != results[1].loss
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=0.05)
    weights = exported(narrow, 1)
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values()), "masters hold more than bfloat16"
    assert_same(weights, exported(wide, 1), tolerance=2.5e-3)


def test_wrong_version_and_missing_column_are_contract_errors(backend):
    trainer, batch = backend(), make_batch()
    with pytest.raises(ContractError):
        trainer.train_step(step_request([batch], batch.counts(), 3))
    bare = split(batch, [range(NUM_SEQUENCES)])[0]
    bare.token_columns.pop("advantages")
    with pytest.raises(ContractError, match=r"expected \['advantages'\] too"):
        trainer.train_step(step_request([bare], batch.counts()))
    assert trainer.train_step(step_request([batch], batch.counts())).weight_version == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_that_fails_midway_leaks_no_gradients(dtype, backend):
    trainer, untouched = backend(dtype=dtype), backend(dtype=dtype)
    batch = make_batch()
    with pytest.raises(ZeroDivisionError):
        trainer.train_step(step_request([batch], batch.counts(), 0, LossSpec(path="fsdp2_support:raising_loss", config=None)))
    request = step_request([batch], batch.counts())
    assert trainer.train_step(request) == untouched.train_step(request)


def live_models():
    """Models of this process that something refers to."""
    return sum(issubclass(type(each), PreTrainedModel) for each in gc.get_objects())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_close_frees_the_models(dtype, model_directory):
    gc.collect()  # what tests before have left
    before, batch = live_models(), make_batch()
    trainer = make_backend(model_directory(), dtype=dtype, needs_reference=True)
    trainer.train_step(step_request([batch], batch.counts()))
    assert live_models() > before
    gc.disable()  # closing is to be enough
    try:
        trainer.close(CloseRequest())
        assert live_models() == before
    finally:
        gc.enable()
