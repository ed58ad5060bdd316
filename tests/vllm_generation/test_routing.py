"""Experts of tokens, from vLLM's outputs to the result."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ContractError, FinishReason, GenerateRequest, ModelSpec, RaggedTokens, SamplingParams
from rlcore_torchkit.generation import join_samples
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.checks.check import check
from rlcore_vllm.engines.routing import reported_experts, require_experts
from rlcore_vllm.engines.unfinished import Sample
from rlcore_vllm.replicas.request_dispatch import dispatch
from rlcore_vllm.setup.config import VllmConfig

NUM_LAYERS, TOP_K, DENSE_LAYER = 3, 2, 1


def chunks(prompt_length, num_tokens, seed=0, dtype=np.uint8):
    """As vLLM's outputs bring them: the prompt, then a token at a time up to the last but one; zeros in the dense layer."""
    random = np.random.default_rng(seed)
    rows = random.random((prompt_length + num_tokens - 1, NUM_LAYERS, 8)).argsort(-1)[..., :TOP_K].astype(dtype)
    rows[:, DENSE_LAYER] = 0
    return rows, np.split(rows, range(prompt_length, len(rows)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_of_a_sample(dtype):
    rows, parts = chunks(5, 4, dtype=dtype)
    found = reported_experts(parts, 9)
    assert found.dtype == np.int16
    assert found.shape == (9, NUM_LAYERS, TOP_K)
    np.testing.assert_array_equal(found[:8, ::2], rows[:, ::2])
    assert (found[:, DENSE_LAYER] == -1).all()
    assert (found[8] == -1).all()


def test_rows_beyond_a_stop_string_are_dropped():
    rows, parts = chunks(5, 4)
    found = reported_experts(parts, 7)
    np.testing.assert_array_equal(found[:, ::2], rows[:7, ::2])


def test_tokens_that_vllm_has_not_seen_are_unknown():
    _, parts = chunks(5, 4)
    parts[0][1] = 0
    found = reported_experts(parts, 9)
    assert (found[1] == -1).all()
    assert (found[[0, 2], 0] >= 0).all()


def finished(number, prompt_length, num_tokens, reason=FinishReason.LENGTH):
    sample = Sample(None, number, prompt_length, num_tokens, 3)
    sample.routed = chunks(prompt_length, num_tokens, seed=number)[1] if num_tokens else []
    sample.tokens, sample.logprobs, sample.reason = [1] * num_tokens, [-1.0] * num_tokens, reason
    return sample.finish()


def test_experts_of_samples_are_joined_in_order():
    """Those of a sample that vLLM said nothing of are unknown."""
    samples = [finished(2, 3, 4), finished(0, 5, 2), finished(1, 2, 0, FinishReason.ABORTED)]
    routed = join_samples(samples, routed_experts=True).routed_experts
    assert routed.offsets.tolist() == [0, 7, 9, 16]
    np.testing.assert_array_equal(routed.experts[:7], samples[1].routed_experts)
    assert (routed.experts[7:9] == -1).all()
    np.testing.assert_array_equal(routed.experts[9:], samples[0].routed_experts)


@pytest.mark.parametrize("silent", [np.zeros((4, 0, 0), np.int16), np.full((4, NUM_LAYERS, TOP_K), -1, np.int16)])
def test_a_kernel_that_hides_its_choice_is_noticed(silent):
    """In samples that ended; of one that was cut before it began nothing is known."""
    told, cut = finished(0, 3, 2), evolve(finished(2, 3, 1, FinishReason.ABORTED), routed_experts=silent)
    require_experts([told, cut])
    with pytest.raises(ContractError, match="no experts for sample 1.*moe_backend"):
        require_experts([told, evolve(finished(1, 3, 1, FinishReason.STOP), routed_experts=silent), cut])


def test_engines_are_asked():
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([[1, 2], [3]]),
        num_samples=2,
        seeds=np.arange(4),
        max_tokens=np.full(4, 5, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
        routed_experts=True,
    )
    assert all(part.routed_experts for part in dispatch(request, request.max_tokens, [0, 0]))


def test_what_keeps_vllm_from_reporting_is_found_before(tmp_path):
    def problems(architecture, **options):
        model = tmp_path / architecture
        if not model.exists():
            make_model(model, architecture, head_dim=32)
        context = CheckContext(
            model=ModelSpec(path=str(model)), device="cpu", world_size=1, max_sequence_length=64, replays_routing=True
        )
        return [problem.path for problem in check(context, VllmConfig(**options))]

    assert problems("qwen3_moe") == []
    assert problems("qwen3") == ["rollout.replay_routing"]
    assert problems("qwen3_moe", prefix_caching=False) == ["generator.vllm.prefix_caching"]
