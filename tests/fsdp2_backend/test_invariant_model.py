"""Against the ordinary layers, on CPU, where both compute by torch."""

import pytest
import torch
from attrs import evolve
from fsdp2_support import TEMPERATURE, assert_same, make_backend, make_batch, make_config, split, step_request

from rlcore.spi import CloseRequest, ConfigError, LogprobsRequest
from rlcore_fsdp2.invariant_model import InvariantAttention, InvariantLinear, InvariantMlp, InvariantNorm
from rlcore_torchkit.testing.models import make_model

GROUPS = [[4, 0], [1, 5, 3], [2]]
BFLOAT16_BOUND = 0.05
"""Most relative L2 error of a parameter's gradient: bfloat16 rounds by up to 2⁻⁹ in each of some tens of products in a row."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of 128 tokens, with heads as wide as the kernels take."""
    shape = {"hidden_size": 48, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128}
    alphabet = "".join(map(chr, range(1, 127)))
    return make_model(tmp_path_factory.mktemp("invariant") / "qwen3", "qwen3", tied=False, alphabet=alphabet, **shape)


def gradients_of(directory, dtype, **options):
    """Gradients of the computing model's parameters, as the optimizer would get them, and the step's log-probabilities."""
    trainer = make_backend(directory, dtype=dtype, config=make_config(**options))
    batch, found = make_batch(max_length=40), {}
    trainer.update = lambda *_: found.update({name: p.grad.clone() for name, p in trainer.policy.named_parameters()}) or 0.0
    request = step_request(split(batch, GROUPS), batch.counts())
    result = trainer.train_step(evolve(request, logprobs=True))
    return found, result, trainer


@pytest.mark.parametrize(("checkpointing", "parts"), [(False, 1), (True, 1), (False, 2)])
def test_gradients_equal_those_of_the_ordinary_layers(directory, checkpointing, parts):
    expected, step, _ = gradients_of(directory, "float32")
    found, invariant_step, trainer = gradients_of(
        directory, "float32", batch_invariant=True, batch_invariant_parts=parts, activation_checkpointing=checkpointing
    )
    assert_same(found, expected, tolerance=2e-6)
    assert invariant_step.loss == pytest.approx(step.loss, abs=1e-5)
    kinds = {InvariantAttention, InvariantMlp, InvariantNorm, InvariantLinear}
    layer = trainer.policy.model.layers[0]
    assert {type(module) for module in layer.modules()} >= kinds
    assert type(trainer.policy.model.norm) is InvariantNorm


def test_products_of_several_ranks_are_rounded_and_added_in_their_order(directory):
    _, _, trainer = gradients_of(directory, "bfloat16", batch_invariant=True, batch_invariant_parts=2)
    layer = trainer.policy.model.layers[0]
    for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
        states, width = torch.randn(5, module.in_features).bfloat16(), module.in_features // 2
        weight = module.weight.data = module.weight.data.bfloat16()
        ranks = [states[:, own] @ weight[:, own].T for own in (slice(width), slice(width, None))]
        assert torch.equal(module(states), ranks[0] + ranks[1])
        assert not torch.equal(module(states), states @ weight.T)


def test_bfloat16_gradients_stay_within_the_bound_of_the_ordinary_ones_in_float32(directory):
    expected, *_ = gradients_of(directory, "float32")
    found, *_ = gradients_of(directory, "bfloat16", batch_invariant=True)
    errors = {name: ((found[name] - right).norm() / right.norm()).item() for name, right in expected.items()}
    assert max(errors.values()) < BFLOAT16_BOUND, errors


def test_a_step_and_a_request_of_log_probabilities_give_the_same_bits(directory):
    _, step, trainer = gradients_of(directory, "bfloat16", batch_invariant=True)
    microbatches = split(make_batch(max_length=40), GROUPS)
    for entropy in (False, True):
        request = LogprobsRequest(
            microbatches=microbatches, model="policy", temperature=TEMPERATURE, entropy=entropy, weight_version=1
        )
        for found, of_step in zip(trainer.get_logprobs(request).logprobs, step.logprobs, strict=True):
            assert torch.equal(torch.from_numpy(found), torch.from_numpy(of_step))


def test_weights_that_are_sharded_give_the_same_bits(directory):
    found, step, trainer = gradients_of(directory, "bfloat16", batch_invariant=True, cpu_offload=True)
    trainer.close(CloseRequest())
    expected, whole_step, _ = gradients_of(directory, "bfloat16", batch_invariant=True)
    for logprobs, right in zip(step.logprobs, whole_step.logprobs, strict=True):
        assert torch.equal(torch.from_numpy(logprobs), torch.from_numpy(right))
    assert_same({name: gradient.full_tensor() for name, gradient in found.items()}, expected, tolerance=1e-5)


def test_a_model_that_check_could_not_see_is_refused_once_it_is_loaded(tmp_path):
    other = make_model(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError) as raised:
        make_backend(other, dtype="bfloat16", config=make_config(batch_invariant=True))
    assert [problem.path for problem in raised.value.problems] == ["trainer.fsdp2.batch_invariant"]
