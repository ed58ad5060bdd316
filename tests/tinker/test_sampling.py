"""Samples and log-probabilities through the client."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_server import Address

tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")

PROMPT = [3, 4, 74, 5]
TOKENS = [3, 4, 74, 5, 2, 82, 6, 4]
Make = Callable[..., Any]


def _prompt(tokens: list[int] = PROMPT) -> Any:
    return tinker.ModelInput.from_ints(tokens)


def _own(model: Path, tokens: list[int]) -> Any:
    """float64 [T-1, V]: transformers' log-probabilities of each next token."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return torch.log_softmax(plain(torch.tensor([tokens])).logits[0].double(), -1).detach().numpy()


def test_samples_and_their_log_probabilities_are_the_models(service: Any, server: Address, model: Path) -> None:
    client = service.create_sampling_client(base_model=server.model).result()
    reply = client.sample(_prompt(), 3, tinker.SamplingParams(max_tokens=5, seed=1), include_prompt_logprobs=True).result()
    assert len({tuple(sample.tokens) for sample in reply.sequences}) > 1
    assert len({sample.sequence_id for sample in reply.sequences}) == 3
    for sample in reply.sequences:
        table = _own(model, [*PROMPT, *sample.tokens])
        expected = [table[len(PROMPT) - 1 + place][token] for place, token in enumerate(sample.tokens)]
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-5)
        assert sample.stop_reason == ("length" if len(sample.tokens) == 5 else "stop")
    own = _own(model, PROMPT)
    assert reply.prompt_logprobs[0] is None
    np.testing.assert_allclose(reply.prompt_logprobs[1:], [own[i][token] for i, token in enumerate(PROMPT[1:])], atol=2e-5)


def test_a_prompt_of_one_token_has_no_log_probability(service: Any, server: Address, training: Any) -> None:
    base = service.create_sampling_client(base_model=server.model).result()
    for client in (base, training.save_weights_and_get_sampling_client().result()):
        assert client.compute_logprobs(_prompt([3])).result() == [None]


def test_a_seed_repeats_samples_and_none_draws_anew(service: Any, server: Address) -> None:
    client = service.create_sampling_client(base_model=server.model).result()

    def drawn(seed: int | None) -> list[list[int]]:
        params = tinker.SamplingParams(max_tokens=8, seed=seed)
        return [sample.tokens for sample in client.sample(_prompt(), 4, params).result().sequences]

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_greedy_samples_take_the_most_probable_token(service: Any, server: Address, model: Path) -> None:
    client = service.create_sampling_client(base_model=server.model).result()
    (sample,) = client.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=4, temperature=0.0)).result().sequences
    table = _own(model, [*PROMPT, *sample.tokens])
    assert sample.tokens == table[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_token_ids_and_texts_stop_a_sample(service: Any, server: Address, training: Any) -> None:
    client = service.create_sampling_client(base_model=server.model).result()
    params = {"max_tokens": 12, "temperature": 0.0}
    (free,) = client.sample(_prompt(), 1, tinker.SamplingParams(stop=[], **params)).result().sequences
    assert len(free.tokens) == 12
    (by_id,) = client.sample(_prompt(), 1, tinker.SamplingParams(stop=[free.tokens[2]], **params)).result().sequences
    first = free.tokens.index(free.tokens[2])
    assert (by_id.tokens, by_id.stop_reason) == (free.tokens[: first + 1], "stop")
    text = training.get_tokenizer().decode([free.tokens[2]])
    (by_text,) = client.sample(_prompt(), 1, tinker.SamplingParams(stop=text, **params)).result().sequences
    assert (by_text.tokens, by_text.stop_reason) == (free.tokens[: first + 1], "stop")


def test_only_the_last_tokens_are_scored_where_a_client_asks_that(service: Any, server: Address) -> None:
    client = service.create_sampling_client(base_model=server.model).result()
    whole = client.compute_logprobs(_prompt(TOKENS)).result()
    last = client.compute_logprobs(_prompt(TOKENS), prompt_logprobs_last_n=2).result()
    assert last == [None] * (len(TOKENS) - 2) + whole[-2:]


def test_many_requests_at_once_are_answered(service: Any, server: Address) -> None:
    client = service.create_sampling_client(base_model=server.model).result()
    futures = [client.sample(_prompt(TOKENS[: 2 + number % 6]), 2, tinker.SamplingParams(max_tokens=4)) for number in range(40)]
    assert all(len(future.result().sequences) == 2 for future in futures)


def test_samplers_keep_their_weights_while_the_model_trains_on(
    service: Any, training: Any, server: Address, datum: Make
) -> None:
    """Samplers of older weights make the server change weights, and training goes on to the bit."""
    data = [datum(TOKENS)]

    def trained(*, looks_back: bool) -> tuple[list[Any], list[Any]]:
        base = service.create_sampling_client(base_model=server.model).result()
        looks: list[Any] = [base.compute_logprobs(_prompt(TOKENS)).result()]
        saved, steps = [], []
        for number in range(3):
            steps.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(tinker.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
            name = f"look-{looks_back}-{number}"
            path = training.save_weights_for_sampler(name).result().path
            saved.append(service.create_sampling_client(model_path=path).result())
            looks.append(saved[-1].compute_logprobs(_prompt(TOKENS)).result())
            if looks_back:
                again = [client.compute_logprobs(_prompt(TOKENS)).result() for client in (base, *saved)]
                assert again == looks
                for client in (base, *saved):
                    (sample,) = client.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=3, seed=2)).result().sequences
                    scored = client.compute_logprobs(_prompt([*PROMPT, *sample.tokens])).result()
                    np.testing.assert_allclose(sample.logprobs, scored[len(PROMPT) :], atol=2e-5)
        return steps, looks

    first = trained(looks_back=True)
    released = server.post("unload_model", {"model_id": training.model_id, "type": "unload_model"})[1]
    assert server.result(released["request_id"])["model_id"] == training.model_id
    training = service.create_lora_training_client(base_model=server.model, rank=4).result()
    assert trained(looks_back=False) == first


def test_a_sampler_of_older_unsaved_weights_is_refused(training: Any, datum: Make) -> None:
    data = [datum(TOKENS)]

    def step() -> Any:
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-2))
        return training.save_weights_and_get_sampling_client().result()

    oldest, older, newer = step(), step(), step()
    with pytest.raises(tinker.RequestFailedError, match="whose weights are gone"):
        oldest.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=2)).result()
    for sampler in (older, newer, older):
        assert sampler.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=2)).result().sequences


def test_other_weights_wait_for_the_step(whole_service: Any, whole_training: Any, whole_server: Address, datum: Make) -> None:
    """Loading others would drop the gradients of the step."""
    data = [datum(TOKENS)]
    whole_training.forward_backward(data, "cross_entropy")
    whole_training.optim_step(tinker.AdamParams(learning_rate=1e-2))
    whole_training.save_weights_and_get_sampling_client().result()
    base = whole_service.create_sampling_client(base_model=whole_server.model).result()
    whole_training.forward_backward(data, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="gradients of a step"):
        base.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=2)).result()
    assert whole_training.optim_step(tinker.AdamParams()).result().metrics["grad_norm"] > 0
    assert base.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=2)).result().sequences


def test_an_inflight_sampler_takes_the_newest_weights(training: Any, datum: Make) -> None:
    sampler = training.save_weights_and_get_sampling_client(kind="inflight").result()
    params = tinker.SamplingParams(max_tokens=6, seed=4)
    before = sampler.sample(_prompt(), 4, params).result()
    data = [datum(TOKENS)]
    for _ in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-2))
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    after = sampler.sample(_prompt(), 4, params).result()
    assert [one.logprobs for one in before.sequences] != [one.logprobs for one in after.sequences]


def test_completions_of_a_sampling_session_are_told_once(service: Any, server: Address) -> None:
    client = service.create_sampling_client(base_model=server.model).result()
    (sampler_id,) = server.get(f"sessions/{service.holder.get_session_id()}")[1]["sampler_ids"]
    client.sample(_prompt(), 1, tinker.SamplingParams(max_tokens=2)).result()
    asked = {"target": {"type": "sampling_session", "sampling_session_id": sampler_id}, "timeout": 5.0}
    told = server.post("retrieve_futures", asked)[1]
    assert [one["state"] for one in told["completions"]] == ["finished"]
    asked |= {"prev_cursor": told["cursor"], "timeout": 0.1}
    assert server.post("retrieve_futures", asked)[1] == {"completions": [], "cursor": told["cursor"]}


def test_a_sample_that_nobody_waits_for_is_cancelled(service: Any, server: Address) -> None:
    service.create_sampling_client(base_model=server.model).result()
    (sampler_id,) = server.get(f"sessions/{service.holder.get_session_id()}")[1]["sampler_ids"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    body = {"sampling_session_id": sampler_id, "seq_id": 7, "prompt": prompt, "sampling_params": {"max_tokens": 16}}
    request_id = server.post("asample", body | {"num_samples": 512})[1]["request_id"]
    assert server.post("cancel_future", {"request_id": request_id})[0] == 204
    started = time.monotonic()
    assert "cancelled" in server.result(request_id)["error"]
    assert time.monotonic() - started < 5
