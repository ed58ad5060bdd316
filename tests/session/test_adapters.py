"""Several adapters of one session: each trains and samples as it does alone."""

import json

import numpy as np
import pytest

from rlcore.spi import NonFiniteError
from rlcore_session import Datum
from rlcore_session.errors import CallError

LORA = {"lora": {"rank": 2, "dropout": 0.25}}
SEEDS = {"one": 11, "two": 12}
DATA = {"one": [Datum([1, 3, 5, 7, 9]), Datum([2, 4, 6])], "two": [Datum([9, 8, 7]), Datum([1, 1, 2, 3, 5])]}


def piece(session, name, number):
    session.forward_backward([DATA[name][number]])


def update(session):
    session.optim_step()


def figures(session, name):
    """Log-probabilities of trainer and sampler, which tell weights apart."""
    session.use_adapter(name)
    session.sync()
    samples = session.sample(["1+2="], num_samples=4, seed=1)[0]
    return np.concatenate([*session.logprobs([[1, 2, 3, 4, 5, 6]]), *(one.logprobs for one in samples)])


def test_adapters_by_turns_are_those_of_sessions_alone(opened):
    calls = [lambda session, name: piece(session, name, 0), lambda session, name: piece(session, name, 1)]
    calls.append(lambda session, name: update(session))
    alone = {}
    for name, seed in SEEDS.items():
        session = opened(**LORA)
        session.use_adapter(name, seed=seed)
        for call in calls * 2:
            call(session, name)
        alone[name] = figures(session, name)
    session = opened(**LORA)
    for name, seed in SEEDS.items():
        session.use_adapter(name, seed=seed)
    for call in calls * 2:
        for name in SEEDS:
            session.use_adapter(name)
            call(session, name)
    for name in (*SEEDS, *SEEDS):
        np.testing.assert_array_equal(figures(session, name), alone[name], name)
    assert session.weight_version == session.sampler_version == 2


def test_sampler_keeps_the_weights_of_the_last_sync(opened):
    session = opened(**LORA)
    session.use_adapter("one", seed=1)
    piece(session, "one", 0)
    update(session)
    session.sync()
    before = session.sample(["1+2="], num_samples=4, seed=1)[0]
    session.use_adapter("two", seed=2)
    piece(session, "two", 0)
    update(session)
    for one, other in zip(before, session.sample(["1+2="], num_samples=4, seed=1)[0], strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs, "the sampler took another adapter without a sync")
    session.sync()  # of the same version, and other weights
    after = session.sample(["1+2="], num_samples=4, seed=1)[0]
    assert any(not np.array_equal(one.logprobs, other.logprobs) for one, other in zip(before, after, strict=True))


def test_adapter_is_exported_and_begun_anew(opened, tmp_path):
    session = opened(**LORA)
    session.use_adapter("one", seed=1)
    first = session.logprobs([[1, 2, 3, 4]])[0]
    piece(session, "one", 0)
    update(session)
    assert (session.export(tmp_path / "adapter", kind="peft") / "adapter_config.json").is_file()
    assert session.adapter == "one"
    assert session.use_adapter("one", seed=1) == 0
    np.testing.assert_array_equal(session.logprobs([[1, 2, 3, 4]])[0], first)


def test_checkpoint_of_another_adapter_is_not_written_over(opened, tmp_path):
    session = opened(**LORA)
    session.use_adapter("one", seed=1)
    assert session.save(tmp_path) == session.save(tmp_path)
    session.use_adapter("two", seed=2)
    with pytest.raises(CallError, match="step-000000.*'one'"):
        session.save(tmp_path)
    session.save(tmp_path / "two")


@pytest.mark.parametrize(
    ("sections", "arguments", "text"),
    [
        ({}, {"name": "one", "seed": 1}, "lora"),
        (LORA, {"name": "one"}, "'one'"),
        (LORA, {"name": "one", "seed": 1, "drops": ["two"]}, "'two'"),
        (LORA, {"name": "", "drops": [""]}, "''"),
        (LORA, {"name": "one", "seed": 1, "rank": 3}, "rank: found 3; expected an integer from 1 to 2"),
        (LORA, {"name": "one", "seed": 1, "rank": 0}, "rank: found 0; expected an integer from 1 to 2"),
        (LORA, {"name": "one", "seed": 1, "rank": True}, "rank: found True"),
        (LORA, {"name": "", "rank": 1}, "rank: found 1, without a seed"),
        (LORA, {"name": 1, "seed": True, "drops": "two"}, "(?s)name: found 1.*seed: found True.*drops: found 'two'"),
    ],
)
def test_adapters_that_cannot_be_used(opened, sections, arguments, text):
    session = opened(**sections)
    with pytest.raises(CallError, match=text):
        session.use_adapter(**arguments)
    assert session.adapter == ""
    session.sample(["1"])


def test_forgotten_adapters_are_gone(opened):
    session = opened(**LORA)
    session.use_adapter("one", seed=1)
    session.use_adapter("two", seed=2, drops=["one", "one"])
    with pytest.raises(CallError, match="'one'"):
        session.use_adapter("one")


def test_smaller_rank_trains_and_samples_as_a_recipe_of_that_rank(opened, tmp_path):
    session = opened(lora={"rank": 1, "dropout": 0.25})
    session.use_adapter("one", seed=11)
    piece(session, "one", 0)
    update(session)
    expected = figures(session, "one")
    session = opened(lora={"rank": 3, "dropout": 0.25})
    session.use_adapter("one", seed=11, rank=1)
    piece(session, "one", 0)
    update(session)
    np.testing.assert_allclose(figures(session, "one"), expected, atol=1e-5)
    saved = session.save(tmp_path / "saved")
    session.use_adapter("two", seed=12)
    session.load(saved)
    np.testing.assert_allclose(figures(session, "two"), expected, atol=1e-5)
    config = session.export(tmp_path / "adapter", kind="peft") / "adapter_config.json"
    assert json.loads(config.read_text())["r"] == 1


def trained_by(session, how):
    """Losses, log-probabilities and figures of two adapters, each of two steps of two pieces."""
    for name, seed in SEEDS.items():
        session.use_adapter(name, seed=seed)
    seen = []
    for number in (0, 1, 0, 1):
        pieces = {name: {"data": [own[number]], "temperature": 1.25 if name == "two" else 1.0} for name, own in DATA.items()}
        found = how(session, pieces)
        seen += [np.append(np.concatenate(found[name].logprobs), found[name].loss) for name in SEEDS]
        for name in SEEDS if number else ():
            session.use_adapter(name)
            seen.append(np.array([session.optim_step().grad_norm]))
    return np.concatenate([*seen, *(figures(session, name) for name in SEEDS)])


def by_turns(session, pieces):
    found = {}
    for name, arguments in pieces.items():
        session.use_adapter(name)
        found[name] = session.forward_backward(**arguments)
    return found


def in_one_call(session, pieces):
    used = session.adapter
    found = session.forward_backward_together(pieces)
    assert session.adapter == used
    return found


def test_adapters_together_are_those_by_turns(opened):
    together, alone = (trained_by(opened(**LORA), how) for how in (in_one_call, by_turns))
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_failure_together_leaves_the_gradients_of_all(opened):
    session = opened(**LORA)
    session.use_adapter("one", seed=1)
    piece(session, "one", 0)
    session.use_adapter("two", seed=2)
    assert session.computes_together
    overflows = {"advantages": [0.0, 3e38, 3e38], "generation_logprobs": [0.0, -1.0, -1.0]}
    wrong = {"data": [Datum([1, 2, 3], columns=overflows)], "loss": "policy_gradient"}
    with pytest.raises(NonFiniteError):
        session.forward_backward_together({"one": {"data": [DATA["one"][1]]}, "two": wrong})
    with pytest.raises(CallError, match="no gradients"):
        session.optim_step()
    session.use_adapter("one")
    session.optim_step()


@pytest.mark.parametrize(
    ("sections", "pieces", "text"),
    [
        ({}, {"": {"data": [Datum([1, 2])]}}, "lora"),
        (LORA, {}, "no adapter"),
        (LORA, {"one": {"data": [Datum([1, 2])]}}, "found 'one'"),
        (LORA, {"": {"data": []}}, "data"),
        (LORA, {"": {"data": [Datum([1, 2])], "loss": lambda logprobs: logprobs}}, "a function"),
        (LORA, {"": {"data": [Datum([1, 2])], "temperature": 0}}, "temperature"),
    ],
)
def test_pieces_that_cannot_be_computed_together(opened, sections, pieces, text):
    session = opened(**sections)
    with pytest.raises(CallError, match=text):
        session.forward_backward_together(pieces)
    piece(session, "one", 0)
