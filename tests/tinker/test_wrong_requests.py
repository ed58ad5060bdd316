"""Requests that the server refuses, through the client: each with the protocol's error, after which the server goes on."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_server import KEY, MAX_LENGTH, RANK, Address, forward_backward, serving

tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")

TOKENS = [3, 4, 74, 5, 2, 82, 6, 4]
Make = Callable[..., Any]
Attempt = Callable[[Any, Make], Any]


def _send(training: Any, data: Any, loss: str = "cross_entropy", config: Any = None) -> None:
    training.forward_backward([data], loss, config).result()


def _image() -> Any:
    chunk = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=2)
    return tinker.types.Datum(model_input=tinker.types.ModelInput(chunks=[chunk]), loss_fn_inputs={"target_tokens": [1, 2]})


RL = {"logprobs": [-1.0] * 7, "advantages": [1.0] * 7}
WRONG_DATA: dict[str, tuple[Attempt, str]] = {
    "longer than the context": (
        lambda t, d: _send(t, d([1] * (MAX_LENGTH + 1))),
        f"found {MAX_LENGTH + 1} tokens.*at most {MAX_LENGTH}",
    ),
    "weights of another length": (
        lambda t, d: _send(t, d(TOKENS, weights=[1.0] * 6)),
        r"weights: found shape \[6\]; expected \[7\]",
    ),
    "a weight that is NaN": (
        lambda t, d: _send(t, d(TOKENS, weights=[1.0] * 3 + [float("nan")] + [1.0] * 3)),
        "weights: found nan at position 3",
    ),
    "an infinite advantage": (
        lambda t, d: _send(t, d(TOKENS, logprobs=[-1.0] * 7, advantages=[float("inf")] * 7), "ppo"),
        "advantages: found inf at position 0",
    ),
    "no such token": (lambda t, d: _send(t, d([3, 4, 9999])), "found the token 9999; expected ids from 0"),
    "a loss that nobody knows": (
        lambda t, d: _send(t, d(TOKENS), "squared"),
        "loss_fn: found 'squared'; expected one of cross_entropy",
    ),
    "a loss that is not published": (lambda t, d: _send(t, d(TOKENS, **RL), "stable_reinforce"), "not published"),
    "a loss that runs on servers": (lambda t, d: _send(t, d(TOKENS), "custom", {"loss_id": "x"}), "no uploaded losses"),
    "an input too few": (lambda t, d: _send(t, d(TOKENS), "importance_sampling"), "found no logprobs; expected one"),
    "an input too many": (
        lambda t, d: _send(t, d(TOKENS, mask=np.ones(7, np.float32))),
        "found 'mask', which cross_entropy does not read",
    ),
    "a key of no loss": (lambda t, d: _send(t, d(TOKENS, **RL), "ppo", {"clip": 0.1}), "loss_fn_config: found 'clip'"),
    "thresholds upside down": (
        lambda t, d: _send(t, d(TOKENS, **RL), "ppo", {"clip_low_threshold": 1.3}),
        "clip_low_threshold of at most clip_high_threshold",
    ),
    "targets of another text": (
        lambda t, d: _send(t, d(TOKENS, target_tokens=[4, 74, 5, 9, 82, 6, 4])),
        "target_tokens: found 9 at position 3, where model_input goes on with 2",
    ),
    "several targets for each place": (
        lambda t, d: _send(t, d(TOKENS, target_tokens=[[1, 2]] * 7)),
        r"target_tokens: found shape \[7, 2\]; expected \[7\]",
    ),
    "an image": (lambda t, d: _send(t, _image()), "found a chunk of image; expected tokens alone"),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_wrong_data_name_what_is_wrong_and_spoil_the_step_alone(training: Any, datum: Make, case: str) -> None:
    attempt, words = WRONG_DATA[case]
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=words):
        attempt(training, datum)
    # A step of the rest alone would not be the client's.
    with pytest.raises(tinker.RequestFailedError, match="optim_step: .* forward_backward .* failed"):
        training.optim_step(tinker.AdamParams()).result()
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    first = training.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    assert training.optim_step(tinker.AdamParams(learning_rate=0.0)).result() == first


def test_all_problems_of_a_request_are_named_at_once(training: Any, datum: Make) -> None:
    wrong = [datum(TOKENS, weights=[1.0] * 6), datum([3, 9999]), datum([1] * 99)]
    with pytest.raises(tinker.RequestFailedError) as error:
        training.forward_backward(wrong, "cross_entropy").result()
    assert all(f"data[{number}]" in str(error.value) for number in range(3))
    assert error.value.category == "user"


WRONG_STEPS: dict[str, tuple[Attempt, str]] = {
    "two steps in a row": (
        lambda t, d: (t.optim_step(tinker.AdamParams()).result(), t.optim_step(tinker.AdamParams()).result()),
        "found no gradients",
    ),
    "a rate below 0": (lambda t, d: t.optim_step(tinker.AdamParams(learning_rate=-1.0)).result(), "learning_rate: found -1.0"),
    "a beta of 1": (lambda t, d: t.optim_step(tinker.AdamParams(beta1=1.0)).result(), "beta1: found 1.0"),
    "an eps of 0": (lambda t, d: t.optim_step(tinker.AdamParams(eps=0.0)).result(), "eps: found 0.0"),
    "a rate beyond float32": (
        lambda t, d: t.optim_step(tinker.AdamParams(learning_rate=1e39)).result(),
        r"learning_rate: found 1e\+39; expected a number of float32",
    ),
    "another optimizer": (
        lambda t, d: t.optim_step(tinker.types.DimuonParams(learning_rate=0.1)).result(),
        "trains with AdamW",
    ),
    "a name of no folder": (lambda t, d: t.save_state("../out").result(), r"path: found '\.\./out'"),
    "a name that is taken": (
        lambda t, d: (t.save_state("one", overwrite=True).result(), t.save_state("one").result()),
        "saved before",
    ),
    "a time to live of a minute": (lambda t, d: t.save_state("short", ttl_seconds=60).result(), "ttl_seconds: found 60"),
    "a state of nowhere": (lambda t, d: t.load_state(f"tinker://{t.model_id}/weights/none").result(), "has no checkpoint"),
    "an encrypted export": (
        lambda t, d: t.save_weights_external("e", age_encryption_recipients=["age1x"]).result(),
        "does not encrypt",
    ),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_wrong_steps_and_states_are_refused(training: Any, datum: Make, case: str) -> None:
    attempt, words = WRONG_STEPS[case]
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=words):
        attempt(training, datum)
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    assert training.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] > 0


WRONG_SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a prompt without room": ({"max_tokens": 4}, {"prompt": [1] * MAX_LENGTH}, "prompt: found"),
    "a prompt of no such token": ({"max_tokens": 4}, {"prompt": [9999]}, "the token 9999"),
    "a temperature below 0": ({"temperature": -1.0}, {}, "temperature: found -1.0"),
    "a temperature of almost 0": ({"temperature": 1e-300}, {}, "temperature: found 1e-300"),
    "a stop token beyond int32": ({"stop": [2**31]}, {}, r"stop: found \[2147483648\]"),
    "a top_p of 0": ({"top_p": 0.0}, {}, "top_p: found 0.0"),
    "a top_p above 1": ({"top_p": 1.5}, {}, "top_p: found 1.5"),
    "the most probable tokens": ({}, {"topk_sample_logprobs": 3}, "topk_sample_logprobs: found 3"),
    "those of the prompt": ({}, {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}, "topk_prompt_logprobs: found 3"),
    "alternatives": ({}, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: found 2"),
}


@pytest.mark.parametrize("case", WRONG_SAMPLES)
def test_wrong_sample_requests_are_refused(service: Any, server: Address, case: str) -> None:
    params, arguments, words = WRONG_SAMPLES[case]
    client = service.create_sampling_client(base_model=server.model).result()
    asked = {"prompt": [3, 4]} | arguments
    prompt = tinker.ModelInput.from_ints(asked.pop("prompt"))
    with pytest.raises(tinker.RequestFailedError, match=words):
        client.sample(prompt, 1, tinker.SamplingParams(**params), **asked).result()
    good = client.sample(tinker.ModelInput.from_ints([3, 4]), 1, tinker.SamplingParams(max_tokens=2)).result()
    assert len(good.sequences[0].tokens) <= 2


def test_samplers_of_weights_never_saved_and_of_other_models_are_refused(service: Any, server: Address) -> None:
    with pytest.raises(tinker.NotFoundError, match="has no checkpoint"):
        service.create_sampling_client(model_path="tinker://abc:train:0/sampler_weights/none").result()
    with pytest.raises(tinker.BadRequestError, match="base_model: found 'Qwen/Qwen3-8B'"):
        service.create_sampling_client(base_model="Qwen/Qwen3-8B").result()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, "base_model: found 'Qwen/Qwen3-8B'; expected"),
        ({"rank": 32}, f"rank: found 32; expected 1 to {RANK}, the recipe's lora.rank. Or start the server with lora.rank=32"),
        ({"rank": 0}, "rank: found 0; expected at least 1"),
        ({"train_mlp": False}, "train_mlp: found False"),
        ({"optimizer": tinker.types.DimuonOptimizerConfig()}, 'expected type "adamw"'),
    ],
)
def test_models_that_the_server_does_not_have_are_refused(service: Any, server: Address, changed: Any, words: str) -> None:
    with pytest.raises(tinker.BadRequestError, match=words):
        service.create_lora_training_client(**({"base_model": server.model, "rank": RANK} | changed)).result()


@pytest.mark.parametrize("version", ["0.20.1", "1.0.0", "latest"])
def test_another_protocol_is_refused(server: Address, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("tinker.lib.internal_client_holder.tinker_sdk_version", version)
    with pytest.raises(tinker.BadRequestError, match=f"sdk_version: found '{version}'; expected 0.34 to 0.38"):
        tinker.ServiceClient(base_url=server.url, api_key=KEY).get_server_capabilities()


@pytest.mark.parametrize("key", ["tml-another", None])
def test_a_key_is_needed(server: Address, key: str | None) -> None:
    if key is not None:
        with pytest.raises(tinker.AuthenticationError, match="found another key"):
            tinker.ServiceClient(base_url=server.url, api_key=key).get_server_capabilities()
    else:
        status, body = server.post("create_session", {}, {"X-API-Key": ""})
        assert (status, "found no key" in body["error"]) == (401, True)
    assert server.get("healthz") == (200, {"status": "ok"})


@pytest.fixture
def forgetful(model: Path, tmp_path: Path) -> Iterator[Address]:
    """A server that keeps results for a moment."""
    with serving(tmp_path / "served", model, keep_s=0.3) as address:
        yield address


def test_an_expired_future_is_an_error(forgetful: Address) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    session = forgetful.post("create_session", body)[1]["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": forgetful.model, "lora_config": {"rank": RANK}}
    model_id = forgetful.result(forgetful.post("create_model", wanted)[1]["request_id"])["model_id"]
    request = forward_backward(model_id, 1, TOKENS, [1.0] * 7)
    request_id = forgetful.post("forward_backward", request)[1]["request_id"]
    forgetful.result(request_id)
    time.sleep(0.5)
    for name, sent in (("retrieve_future", {"request_id": request_id}), ("forward_backward", request)):
        status, refused = forgetful.post(name, sent)
        assert (status, "expired" in refused["error"]) == (410, True)


@pytest.mark.parametrize(
    ("name", "body", "status", "words"),
    [
        ("copy_weights", {"source_path": "x"}, 404, "POST /api/v1/copy_weights, which this server does not serve"),
        ("create_model", [1], 400, "create_model: found list; expected an object"),
        ("create_session", {"tags": [], "sdk_version": "0.38.0", "more": 1}, 400, "create_session.more: found 1"),
        ("get_info", {"model_id": "abc:train:0"}, 404, "which is not under training here"),
        ("session_heartbeat", {"session_id": "abc"}, 404, "which this server does not know"),
        ("forward_backward", {}, 415, "found a body of 'application/json'"),
        ("forward_backward", b"\xff\xff", 400, "is no ForwardBackwardRequest"),
        ("asample", {"sampling_session_id": "x", "seq_id": 0}, 404, "expected one of create_sampling_session"),
        ("retrieve_future", {"request_id": "never"}, 410, "that this server never made"),
        ("checkpoints?limit=" + "0" * 5000, None, 400, "expected whole numbers"),
        ("optim_step", {"model_id": 3}, 400, "request.model_id: found 3; expected a text"),
    ],
)
def test_requests_of_no_client_are_answered_too(server: Address, name: str, body: Any, status: int, words: str) -> None:
    found, answered = server.get(name) if body is None else server.post(name, body)
    assert (found, words in answered["error"]) == (status, True)
    assert answered["category"] == "user"


@pytest.mark.parametrize(
    "path",
    [
        "samplers/x%2Ffiles%2Fy?signature=0",
        "training_runs/*/checkpoints",
        "training_runs/*/checkpoints/weights/x%2Ffiles%2Fy?signature=0&until=1",
        "sessions?signature=0",
    ],
)
def test_no_path_goes_around_the_key_or_out_of_the_folder(server: Address, path: str) -> None:
    request = urllib.request.Request(f"{server.url}/api/v1/{path}")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert error.value.code == 401
    assert server.get("training_runs/*/checkpoints") == (200, {"checkpoints": []})
