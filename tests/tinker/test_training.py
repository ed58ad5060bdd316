"""Training through the client: gradients, steps, and states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_losses import FORMULAS
from tinker_server import KEY, RANK, Address, forward_backward, serving

from rlcore_torchkit.testing.models import make_model

tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")

TOKENS = [3, 4, 74, 5, 2, 82, 6, 4]
OTHERS = [9, 8, 7, 6, 5]
Make = Callable[..., Any]


def _adam(**changed: Any) -> Any:
    return tinker.AdamParams(**({"learning_rate": 1e-2, "eps": 1e-8} | changed))


def _gradient_norm(training: Any) -> float:
    """The norm of the gradients held, which a step of learning rate 0 drops."""
    return float(training.optim_step(_adam(learning_rate=0.0)).result().metrics["grad_norm"])


def _logprobs(training: Any, datum: Any) -> Any:
    return training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()


def test_log_probabilities_and_loss_are_those_of_transformers(training: Any, datum: Make, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = [0.0, 1.0, 2.0, 0.5, 1.0, 1.0, -1.0]
    data = [datum(TOKENS, weights=weights), datum(OTHERS)]
    output = training.forward_backward(data, "cross_entropy").result()
    expected = 0.0
    for tokens, factors, found in zip((TOKENS, OTHERS), (weights, [1.0] * 4), output.loss_fn_outputs, strict=True):
        logits = plain(torch.tensor([tokens])).logits[0, :-1].double()
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(found["logprobs"].to_numpy(), own, atol=2e-5)
        expected -= (own * factors).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert training.forward(data, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_each_loss_trains(training: Any, datum: Make, name: str) -> None:
    """The sum that the client reads is the formula's, at the log-probabilities that it reads beside it."""
    length = len(TOKENS) - 1
    draw = np.random.default_rng(1)
    inputs: dict[str, Any] = {"weights": [1.0] * length}
    if name != "cross_entropy":
        own = _logprobs(training, datum(TOKENS)).astype(np.float64)
        inputs = {"logprobs": (own + draw.normal(0, 0.3, length)).tolist(), "advantages": draw.normal(0, 1, length).tolist()}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [0.0, *[1.0] * (length - 1)]
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if name in ("ppo", "cispo", "gspo") else None
    output = training.forward_backward([datum(TOKENS, **inputs)], name, config).result()
    found = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    columns = {
        "generation_logprobs": np.float32(inputs.get("logprobs", 0.0)),
        "advantages": np.float32(inputs.get("advantages", 0.0)),
        "clip_low_threshold": 0.9,
        "clip_high_threshold": 1.1,
        "sequence_ratio_mask": np.array(inputs.get("sequence_ratio_mask", 0.0)),
        "offsets": [0, length],
    }
    assert output.metrics["loss:sum"] == pytest.approx(FORMULAS[name](found, columns)[0].sum(), rel=1e-4)
    assert _gradient_norm(training) > 0


def test_updates_are_adamws(training: Any, datum: Make) -> None:
    """AdamW's first update moves each weight by the learning rate, so a tenth of the rate moves the loss about a tenth."""
    before = _logprobs(training, datum(TOKENS))
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    update = training.optim_step(_adam(learning_rate=1e-3, grad_clip_norm=0.5)).result()
    assert update.metrics["learning_rate"] == pytest.approx(1e-3)
    after = _logprobs(training, datum(TOKENS))
    assert (after - before).sum() > 0


def test_gradients_add_up_until_the_step_and_no_further(training: Any, datum: Make) -> None:
    once, twice = [datum(TOKENS)], [datum(TOKENS), datum(TOKENS)]
    training.forward_backward(once, "cross_entropy").result()
    norm = _gradient_norm(training)
    for requests in ([once, once], [twice]):
        for data in requests:
            training.forward_backward(data, "cross_entropy")
        assert _gradient_norm(training) == pytest.approx(2 * norm, rel=1e-4)
    training.forward_backward(once, "cross_entropy")
    assert _gradient_norm(training) == pytest.approx(norm, rel=1e-4)


def test_a_forward_adds_no_gradient(training: Any, datum: Make) -> None:
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    training.forward([datum(OTHERS)], "cross_entropy")
    norm = _gradient_norm(training)
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    assert _gradient_norm(training) == pytest.approx(norm, rel=1e-6)


def test_a_large_request_comes_in_parts_and_adds_up(training: Any, datum: Make) -> None:
    """The client sends at most 1024 data in one request, the first part last."""
    number = 1030
    output = training.forward_backward([datum([3, 4, 5])] * number, "cross_entropy").result()
    norm = _gradient_norm(training)
    one = training.forward_backward([datum([3, 4, 5])], "cross_entropy").result()
    assert len(output.loss_fn_outputs) == number
    assert output.metrics["loss:sum"] == pytest.approx(number * one.metrics["loss:sum"], rel=1e-4)
    assert norm == pytest.approx(number * _gradient_norm(training), rel=1e-3)


def test_a_loss_of_the_clients_own_has_its_gradient(training: Any, datum: Make) -> None:
    def entropy_like(data: Any, logprobs: Any) -> Any:
        loss = -sum(one.sum() for one in logprobs)
        return loss, {"own": 1.0}

    training.forward_backward([datum(TOKENS)], "cross_entropy")
    norm = _gradient_norm(training)
    output = training.forward_backward_custom([datum(TOKENS)], entropy_like).result()
    assert output.metrics["own"] == 1.0
    assert _gradient_norm(training) == pytest.approx(norm, rel=1e-5)


def test_data_of_no_weight_at_all_are_a_step_of_no_gradient(training: Any, datum: Make) -> None:
    output = training.forward_backward([datum(TOKENS, weights=[0.0] * 7)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == 0.0
    assert _gradient_norm(training) == 0.0


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_saved_state_trains_on_as_if_never_saved(
    service: Any, training: Any, server: Address, datum: Make, optimizer: bool
) -> None:
    def step(client: Any) -> None:
        client.forward_backward([datum(TOKENS)], "cross_entropy")
        client.optim_step(_adam()).result()

    step(training)
    path = training.save_state(f"here-{optimizer}").result().path
    step(training)
    expected = _logprobs(training, datum(OTHERS))
    service.close("success").result()
    with _client(server) as later:
        create = (
            later.create_training_client_from_state_with_optimizer if optimizer else later.create_training_client_from_state
        )
        resumed = create(path).result()
        step(resumed)
        found = _logprobs(resumed, datum(OTHERS))
    assert np.array_equal(found, expected) == optimizer  # without moments the second update is another first one


def test_a_model_begins_as_the_recipe_says_whatever_came_before(
    service: Any, training: Any, server: Address, datum: Make
) -> None:
    first = _logprobs(training, datum(TOKENS))
    training.forward_backward([datum(TOKENS)], "cross_entropy")
    training.optim_step(_adam())
    training.forward_backward([datum(OTHERS)], "cross_entropy").result()  # a gradient that nobody applies
    service.close("success").result()
    with _client(server) as later:
        fresh = later.create_lora_training_client(base_model=server.model, rank=RANK).result()
        assert np.array_equal(_logprobs(fresh, datum(TOKENS)), first)
        with pytest.raises(tinker.RequestFailedError, match="no gradients"):
            fresh.optim_step(_adam()).result()


def test_a_client_that_dies_leaves_its_model_and_no_gradient(
    server: Address, datum: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain HTTP client sends no heartbeats."""
    monkeypatch.setattr("rlcore_tinker.clients.SILENCE_S", 0.6)
    monkeypatch.setattr("rlcore_tinker.models.QUIET_S", 0.2)
    monkeypatch.setattr("rlcore_tinker.models.LOOK_S", 0.05)
    model_id = _raw_model(server)
    _, body = server.post("forward_backward", forward_backward(model_id, 1, TOKENS, [1.0] * 7))
    server.result(body["request_id"])
    with _client(server) as later:
        training = later.create_lora_training_client(base_model=server.model, rank=RANK).result()
        training.forward_backward([datum(OTHERS)], "cross_entropy")
        norm = _gradient_norm(training)
        training.forward_backward([datum(OTHERS)], "cross_entropy")
        assert norm == pytest.approx(_gradient_norm(training), rel=1e-6)
    assert server.post("get_info", {"model_id": model_id})[0] == 404


def test_requests_run_in_their_order_and_a_retry_runs_once(server: Address) -> None:
    model_id = _raw_model(server)
    step = {"model_id": model_id, "adam_params": {"learning_rate": 0.0}, "type": "optim_step"}

    def piece(seq_id: int) -> str:
        sent = forward_backward(model_id, seq_id, TOKENS, [1.0] * 7)
        return str(server.post("forward_backward", sent)[1]["request_id"])

    def updated(seq_id: int) -> str:
        return str(server.post("optim_step", step | {"seq_id": seq_id})[1]["request_id"])

    update = updated(3)
    assert len({piece(2) for _ in range(3)}) == 1
    piece(1)
    twice = server.result(update)["metrics"]["grad_norm"]
    piece(4)
    once = server.result(updated(5))["metrics"]["grad_norm"]
    assert twice == pytest.approx(2 * once, rel=1e-4)
    assert updated(5) == f"{model_id}:5"
    server.post(f"sessions/{model_id.split(':')[0]}/finish", {})


def test_the_same_idempotency_key_makes_one_session(server: Address) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    made = [server.post("create_session", body, {"X-Idempotency-Key": key})[1]["session_id"] for key in ("a", "a", "b")]
    assert made[0] == made[1] != made[2]


def test_a_second_model_waits_for_nobody_who_is_there(service: Any, training: Any, server: Address) -> None:
    del training
    with _client(server) as other:
        for client in (service, other):
            with pytest.raises(tinker.RequestFailedError, match="trains one model"):
                client.create_lora_training_client(base_model=server.model, rank=RANK).result()


def test_all_weights_train_where_the_recipe_has_no_adapters(tmp_path: Path, datum: Make) -> None:
    with serving(tmp_path / "served", make_model(tmp_path / "model"), lora=False) as server, _client(server) as service:
        training = service.create_lora_training_client(base_model=server.model, rank=32).result()
        assert training.get_info().is_lora is False
        before = _logprobs(training, datum(TOKENS))
        for _ in range(3):
            training.forward_backward([datum(TOKENS)], "cross_entropy")
            training.optim_step(_adam(learning_rate=1e-3)).result()
        assert _logprobs(training, datum(TOKENS)).sum() > before.sum() + 1


def _raw_model(server: Address) -> str:
    """A model under training, of a client without heartbeats."""
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    session = server.post("create_session", body)[1]["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": server.model, "lora_config": {"rank": RANK}}
    created = server.result(server.post("create_model", wanted)[1]["request_id"])
    return str(created["model_id"])


@contextmanager
def _client(server: Address) -> Iterator[Any]:
    """A client's session, ended with the block."""
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield service
    service.close("success").result()
