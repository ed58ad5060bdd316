"""Clients of a server whose vLLM holds several adapters: their samplers answer beside each other."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tinker_server import KEY, RANK, Address, serving

from rlcore_torchkit.testing.models import make_model

tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")
pytest.importorskip("vllm", reason="needs the engine")
pytestmark = pytest.mark.wide

TOKENS = {1: [3, 1, 4, 1, 5, 9, 2, 6], 2: [2, 7, 1, 8, 2, 8], 3: [1, 6, 1, 8, 0]}
STEP = tinker.AdamParams(learning_rate=0.05)
PARAMS = tinker.SamplingParams(max_tokens=12, seed=4)
PROMPT = [3, 1, 4]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server whose generator holds two adapters."""
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(folder / "model", hidden_size=64, num_heads=2)  # heads as wide as vLLM's attention on CPU wants them
    generator = {"name": "vllm", "vllm": {"cpu_kv_cache_gib": 0.1}}
    with serving(folder, model, generator=generator, refit={"adapters": "unmerged", "max_adapters": 2}) as address:
        yield address


@pytest.fixture
def clients(vllm_server: Address) -> Iterator[dict[int, Any]]:
    """Three clients, each with a model under training, by their seeds."""
    services = {seed: tinker.ServiceClient(base_url=vllm_server.url, api_key=KEY) for seed in TOKENS}
    create = {seed: one.create_lora_training_client for seed, one in services.items()}
    yield {seed: create[seed](base_model=vllm_server.model, rank=RANK, seed=seed).result() for seed in TOKENS}
    for one in services.values():
        one.close("success").result()


def trained_sampler(training: Any, seed: int, datum: Any) -> Any:
    """A sampler of the model after a step."""
    training.forward_backward([datum(TOKENS[seed])], "cross_entropy").result()
    training.optim_step(STEP).result()
    return training.save_weights_and_get_sampling_client().result()


def request(sampler: Any) -> Any:
    """The future of samples."""
    return sampler.sample(tinker.ModelInput.from_ints(PROMPT), 4, PARAMS)


def flat(sequences: Any) -> list[float]:
    """The log-probabilities of all samples."""
    return [logprob for one in sequences for logprob in one.logprobs]


def require_own(sampler: Any, sequences: Any) -> None:
    """Compare the log-probabilities of samples with those that the trainer computes with the sampler's weights."""
    for one in sequences:
        scored = sampler.compute_logprobs(tinker.ModelInput.from_ints([*PROMPT, *one.tokens])).result()
        np.testing.assert_allclose(one.logprobs, scored[len(PROMPT) :], atol=TOLERANCE)


def test_samplers_of_several_clients_answer_beside_each_other(
    clients: dict[int, Any], vllm_server: Address, datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, brought = vllm_server.session, []
    sync = session.sync
    monkeypatch.setattr(session, "sync", lambda name=None: (brought.append(name), sync(name))[1])
    samplers = {seed: trained_sampler(clients[seed], seed, datum) for seed in (1, 2)}
    assert len(session.sampler_adapters) == 2
    brought.clear()
    for _ in range(2):
        calls = {seed: request(sampler) for seed, sampler in samplers.items()}
        drawn = {seed: call.result().sequences for seed, call in calls.items()}
    assert not brought, "samplers whose weights the generator holds took turns"
    for seed, sequences in drawn.items():
        require_own(samplers[seed], sequences)
    assert flat(drawn[1]) != flat(drawn[2])

    samplers[3] = trained_sampler(clients[3], 3, datum)  # in the place of the first
    first, second = drawn[1], drawn[2]
    for seed, expected in ((2, second), (1, first), (2, second)):
        again = request(samplers[seed]).result().sequences
        assert [one.tokens for one in again] == [one.tokens for one in expected]
        np.testing.assert_allclose(flat(again), flat(expected), atol=TOLERANCE)
    require_own(samplers[3], request(samplers[3]).result().sequences)


def test_a_snapshot_comes_again_from_files_while_its_model_trains_on(
    clients: dict[int, Any], vllm_server: Address, datum: Any
) -> None:
    old = trained_sampler(clients[1], 1, datum)
    expected = request(old).result().sequences
    new = trained_sampler(clients[1], 1, datum)
    other = trained_sampler(clients[2], 2, datum)
    for sampler in (other, new):
        require_own(sampler, request(sampler).result().sequences)
    assert len(vllm_server.session.sampler_adapters) == 2
    again = request(old).result().sequences
    np.testing.assert_allclose(flat(again), flat(expected), atol=TOLERANCE)
