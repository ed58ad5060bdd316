"""Several clients train adapters on one model at once: each as it does alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker_server import KEY, RANK, Address, serving

from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice
from rlcore.config.recipe import Recipe
from rlcore.spi import LoraSpec
from rlcore_tinker.server import served_model

tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")

Make = Callable[..., Any]
TOKENS = {1: [3, 1, 4, 1, 5, 9, 2, 6], 2: [2, 7, 1, 8, 2, 8]}
OTHERS = {1: [5, 3, 5, 8], 2: [1, 6, 1, 8, 0]}
STEP = tinker.AdamParams(learning_rate=1e-2, weight_decay=0.1)
PARAMS = tinker.SamplingParams(max_tokens=6, seed=4)


def begun(service: Any, server: Address, seed: int, rank: int = RANK) -> Any:
    """A model under training."""
    return service.create_lora_training_client(base_model=server.model, rank=rank, seed=seed).result()


def pieces(training: Any, seed: int, datum: Make) -> Sequence[Callable[[], Any]]:
    """The requests of two steps, one after another."""
    return [
        lambda: training.forward_backward([datum(TOKENS[seed])], "cross_entropy").result(),
        lambda: training.forward_backward([datum(OTHERS[seed])], "cross_entropy").result(),
        lambda: training.optim_step(STEP).result(),
    ] * 2


def figures(training: Any) -> np.ndarray:
    """Log-probabilities of samples and of a text, which tell weights apart."""
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([3, 1, 4])
    sequences = sampler.sample(prompt, 3, PARAMS).result().sequences
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints([3, 1, 4, 1, 5])).result()
    return np.array([*(one for sequence in sequences for one in sequence.logprobs), *scored[1:]])


def test_clients_beside_each_other_train_as_alone(service: Any, server: Address, datum: Make) -> None:
    alone = {}
    for seed in TOKENS:
        training = begun(service, server, seed)
        for request in pieces(training, seed, datum):
            request()
        alone[seed] = figures(training)
    other = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    models = {1: begun(service, server, 1), 2: begun(other, server, 2)}
    for requests in zip(*(pieces(model, seed, datum) for seed, model in models.items()), strict=True):
        for request in requests:
            request()
    for seed in (*models, *models):
        np.testing.assert_array_equal(figures(models[seed]), alone[seed])
    other.close("success").result()


def test_clients_at_once_train_as_alone(service: Any, server: Address, datum: Make) -> None:
    """Requests of several models that wait for the trainer are computed together, up to rounding."""
    alone = {}
    for seed in TOKENS:
        training = begun(service, server, seed)
        for request in pieces(training, seed, datum):
            request()
        alone[seed] = figures(training)
    models = {seed: begun(service, server, seed) for seed in TOKENS}
    for _ in range(2):
        for tokens in (TOKENS, OTHERS):
            sent = [model.forward_backward([datum(tokens[seed])], "cross_entropy") for seed, model in models.items()]
            assert all(one.result().metrics["loss:sum"] > 0 for one in sent)
        for sent in [model.optim_step(STEP) for model in models.values()]:
            sent.result()
    for seed, model in models.items():
        np.testing.assert_allclose(figures(model), alone[seed], rtol=0, atol=1e-4)


def test_client_that_ends_takes_its_gradients_along(service: Any, server: Address, datum: Make) -> None:
    training = begun(service, server, 1)
    training.forward_backward([datum(TOKENS[1])], "cross_entropy").result()
    other = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    begun(other, server, 2).forward_backward([datum(TOKENS[2])], "cross_entropy").result()
    other.close("success").result()
    found = training.optim_step(STEP).result().metrics["grad_norm"]
    again = begun(service, server, 1)
    again.forward_backward([datum(TOKENS[1])], "cross_entropy").result()
    assert again.optim_step(STEP).result().metrics["grad_norm"] == found


def test_sampler_keeps_its_weights_while_others_train(service: Any, server: Address, datum: Make) -> None:
    first, second = begun(service, server, 1), begun(service, server, 2)
    first.forward_backward([datum(TOKENS[1])], "cross_entropy").result()
    first.optim_step(STEP).result()
    sampler, prompt = first.save_weights_and_get_sampling_client().result(), tinker.ModelInput.from_ints([3, 1])
    before = [one.logprobs for one in sampler.sample(prompt, 3, PARAMS).result().sequences]
    for model, seed in ((first, 1), (second, 2)):
        model.forward_backward([datum(TOKENS[seed])], "cross_entropy").result()
        model.optim_step(STEP).result()
    assert figures(second).size
    assert [one.logprobs for one in sampler.sample(prompt, 3, PARAMS).result().sequences] == before


def test_base_model_answers_between_the_pieces_of_a_step(service: Any, server: Address, datum: Make) -> None:
    base = service.create_sampling_client(base_model=server.model).result()
    training, prompt = begun(service, server, 1), tinker.ModelInput.from_ints([3, 1, 4, 1])
    before = base.compute_logprobs(prompt).result()
    training.forward_backward([datum(TOKENS[1])], "cross_entropy").result()
    assert base.compute_logprobs(prompt).result() == before
    assert base.sample(prompt, 1, PARAMS).result().sequences
    training.forward_backward([datum(OTHERS[1])], "cross_entropy").result()
    norm = training.optim_step(STEP).result().metrics["grad_norm"]
    again = begun(service, server, 1)
    again.forward_backward([datum(TOKENS[1]), datum(OTHERS[1])], "cross_entropy").result()
    assert again.optim_step(STEP).result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert base.compute_logprobs(prompt).result() == before


@pytest.mark.parametrize("rank", [1, 3])
def test_smaller_ranks_are_those_of_a_server_with_that_rank(
    service: Any, server: Address, model: Path, datum: Make, tmp_path: Path, rank: int
) -> None:
    """In training, sampling, and what a checkpoint holds, while another rank trains in between."""
    with serving(tmp_path / "served", model, lora={"rank": rank}) as small:
        own = tinker.ServiceClient(base_url=small.url, api_key=KEY)
        training = begun(own, small, 1, rank)
        for request in pieces(training, 1, datum):
            request()
        expected = figures(training)
        own.close("success").result()
    training, other = begun(service, server, 1, rank), begun(service, server, 2)
    for request, between in zip(pieces(training, 1, datum), pieces(other, 2, datum), strict=True):
        request()
        between()
    np.testing.assert_allclose(figures(training), expected, atol=1e-4)
    again = service.create_training_client_from_state_with_optimizer(training.save_state("state").result().path).result()
    assert [one.get_info().lora_rank for one in (training, other, again)] == [rank, RANK, rank]
    sampled = service.create_sampling_client(model_path=training.save_weights_for_sampler("sampled").result().path).result()
    for one in (training, again):
        for request in pieces(one, 1, datum):
            request()
    np.testing.assert_array_equal(figures(again), figures(training))
    scored = sampled.compute_logprobs(tinker.ModelInput.from_ints([3, 1, 4, 1, 5])).result()
    np.testing.assert_allclose(scored[1:], expected[-4:], atol=1e-4)


def test_checkpoint_of_another_rank_is_refused(service: Any, server: Address) -> None:
    """The model stays as it was: its next checkpoint has its own rank."""
    small, whole = begun(service, server, 1, 2), begun(service, server, 1)
    path = small.save_state("small").result().path
    with pytest.raises(tinker.RequestFailedError, match="of LoRA rank 2; expected rank 4"):
        whole.load_state(path).result()
    assert whole.get_info().lora_rank == RANK


def test_unembedding_may_be_left_out(service: Any, server: Address) -> None:
    """No adapter of a recipe is on it."""
    asked = {"base_model": server.model, "rank": RANK, "train_unembed": False}
    assert service.create_lora_training_client(**asked).result().get_info().lora_rank == RANK


@pytest.mark.parametrize(
    ("lora", "has_adapters", "ranks"),
    [
        (LoraSpec(rank=8), True, (1, 8)),
        (LoraSpec(rank=8, init_from="adapter"), True, (8, 8)),
        (LoraSpec(rank=8), False, (8, 8)),
        (None, False, (1, None)),
    ],
    ids=["any", "of files", "one adapter", "all weights"],
)
def test_ranks_of_recipes(lora: LoraSpec | None, has_adapters: bool, ranks: tuple[int, int | None]) -> None:
    """The lowest and the highest that clients may ask for."""
    recipe = Recipe(
        model=ModelConfig(path="org/model"),
        algorithm=NamedPluginChoice(name="own_loop"),
        environment=NamedPluginChoice(name="none"),
        lora=lora,
    )
    plan, tokenizer = SimpleNamespace(recipe=recipe), SimpleNamespace(vocab_size=10)
    served = served_model(SimpleNamespace(plan=plan, tokenizer=tokenizer, has_adapters=has_adapters), None)
    assert (served.least_rank, served.lora_rank) == ranks
