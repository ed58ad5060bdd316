"""A session on two ranks of a cluster equals one of a single process, within rounding."""

import asyncio

import numpy as np
import pytest

import rlcore
from rlcore.spi import ContractError, GlobalCounts, LossSpec
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_session import CallError, Datum

from .session_support import recipe_of

DATA = [Datum([1, 3, 5, 7, 9, 2]), Datum([2, 4, 6, 8], [False, False, True, True]), Datum([9, 8, 7])]
COUNTS = GlobalCounts(num_loss_tokens=9, num_loss_sequences=3)
"""Those of DATA."""

APART = {"gpus_per_node": 3, "generator_gpus_per_node": 1, "placement": "separate"}


@pytest.fixture(scope="module")
def ray():
    with ray_session(RayConfig(gpus_per_node=3, object_store_mib=100), "cpu", None):
        yield


def slopes(logprobs):
    """Derivatives of a function of the program's: none at the third sequence, and at tokens outside the second's mask."""
    first, second, third = logprobs
    return [-np.exp(first) * (np.arange(6) > 0), -np.exp(second) * (np.arange(4) > 1), np.zeros(len(third))]


def figures(recipe, tmp_path):
    """What a program sees of two updates, the second by a function of its own."""
    with rlcore.open(recipe, reference=True) as session:
        before = session.sample(["1+2=", "3"], num_samples=4, seed=1)
        first = session.forward_backward(DATA)
        updates = [session.optim_step(learning_rate=5e-3)]
        second = session.forward_backward(DATA, slopes)
        updates.append(session.optim_step())
        assert session.sync() == 2
        path = session.save(tmp_path)
        assert session.load(path, optimizer=False) == 2
        after = session.sample(["1+2=", "3"], num_samples=4, seed=1)
        return {
            "samples": [[one.tokens.tolist() for one in group] for group in before],
            "logprobs of samples": np.concatenate([one.logprobs for group in after for one in group]),
            "losses": [first.loss, second.loss],
            "logprobs": np.concatenate([*first.logprobs, *second.logprobs]),
            "norms": [update.grad_norm for update in updates],
            "policy": np.concatenate(session.logprobs([one.tokens for one in DATA], temperature=0.5)),
            "reference": np.concatenate(session.logprobs([one.tokens for one in DATA], model="reference")),
        }


def adapter_figures(recipe):
    """What a program sees of two adapters, one of which trains between the pieces of the other's step."""
    settings = {"learning_rate": 5e-3, "betas": (0.5, 0.6), "eps": 1e-6, "weight_decay": 0.5, "max_grad_norm": 0.1}
    with rlcore.open(recipe) as session:
        session.use_adapter("one", seed=1)
        session.forward_backward(DATA[:2], counts=COUNTS)
        session.use_adapter("two", seed=2, rank=1)
        session.forward_backward(DATA)
        norms = [session.optim_step(**settings).grad_norm]
        session.use_adapter("one")
        session.forward_backward(DATA[2:], counts=COUNTS)
        norms += [session.optim_step(**settings).grad_norm]
        session.forward_backward(DATA)
        norms += [session.optim_step(**settings).grad_norm]
        assert session.weight_version == 2
        session.use_adapter("three", seed=3)
        together = session.forward_backward_together({"three": {"data": DATA[1:]}, "two": {"data": DATA}})
        norms += [session.optim_step(**settings).grad_norm, *(one.loss for one in together.values())]
        session.use_adapter("two")
        norms += [session.optim_step(**settings).grad_norm]
        session.use_adapter("one")
        tokens = [one.tokens for one in DATA]
        own = np.concatenate(session.logprobs(tokens))
        assert session.use_adapter("two", drops=["one"]) == 2
        return {"norms": norms, "one": own, "two": np.concatenate(session.logprobs(tokens))}


@pytest.mark.usefixtures("ray")
def test_pieces_settings_and_adapters_on_two_ranks_equal_one_process(model):
    options = {"training": {"max_tokens_per_microbatch": 8}, "lora": {"rank": 2}}
    one, two = (adapter_figures(recipe_of(model, **options, **cluster)) for cluster in ({}, {"cluster": {"gpus_per_node": 2}}))
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)
    assert np.abs(one["one"] - one["two"]).max() > 1e-3


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("cluster", [{"gpus_per_node": 2}, APART], ids=["shared", "apart"])
def test_two_ranks_equal_one_process(model, tmp_path, cluster):
    training = {"training": {"max_tokens_per_microbatch": 8}}
    one = figures(recipe_of(model, **training), tmp_path / "one")
    two = figures(recipe_of(model, **training, cluster=cluster), tmp_path / "two")
    assert two.pop("samples") == one.pop("samples")
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.usefixtures("ray")
def test_errors_of_ranks_leave_the_session_usable(model):
    with rlcore.open(recipe_of(model, cluster={"gpus_per_node": 2})) as session:
        session.forward_backward(DATA)
        for version, path in enumerate(("nowhere:loss", "operator:is_")):  # the second one returns no LossOutput
            with pytest.raises(ContractError, match="loss"):
                session.forward_backward(DATA, LossSpec(path=path, config=None))
            with pytest.raises(CallError, match="ContractError"):
                session.optim_step()
            session.forward_backward(DATA)
            assert session.optim_step().weight_version == version + 1


@pytest.mark.usefixtures("ray")
def test_samples_and_updates_under_way_at_once(model):
    async def main(session):
        samples = [session.sample(["1+2="], num_samples=2, seed=seed) for seed in range(6)]
        training = [session.forward_backward(DATA), session.optim_step()]
        found = await asyncio.gather(*samples, *training)
        await session.sync()
        after = await asyncio.gather(*(session.sample(["1+2="], seed=seed) for seed in range(3)))
        return found[:6], found[-1], after

    with rlcore.open(recipe_of(model, cluster=APART)) as session:
        samples, update, after = asyncio.run(main(session.asynchronous))
    with rlcore.open(recipe_of(model)) as session:
        alone = [session.sample(["1+2="], num_samples=2, seed=seed) for seed in range(6)]
    assert update.weight_version == 1
    assert {one.weight_version for [group] in after for one in group} == {1}
    found, expected = ([one.tokens.tolist() for [group] in each for one in group] for each in (samples, alone))
    assert found == expected
