"""Sessions with vLLM as the generator: it gets weights and adapters, and its samples are those of the trainer's weights."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlcore
from rlcore_session import Completion, Datum, Session
from rlcore_session.errors import CallError
from rlcore_torchkit.testing.models import make_model

from .session_support import recipe_of

pytest.importorskip("vllm", reason="needs the engine")
TOLERANCE = 1e-4
DATA = {"one": [Datum([1, 3, 5, 7, 9]), Datum([2, 4, 6])], "two": [Datum([9, 8, 7]), Datum([1, 1, 2, 3, 5])]}
PROMPTS = ["1+2=", "30+4=", "5"]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits whose heads are as wide as vLLM's attention on CPU wants them."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return make_model(folder, alphabet="0123456789+=", max_length=64, hidden_size=64, num_heads=2)


def opened(model: Path, **sections: Any) -> Session:
    """A session of fsdp2 and vLLM."""
    vllm = {"name": "vllm", "vllm": {"cpu_kv_cache_gib": 0.1}}
    return rlcore.open(recipe_of(model, generator=vllm, **sections))


@pytest.fixture(scope="module")
def adapters(wide_model: Path) -> Iterator[Session]:
    """A session whose generator holds two adapters at once; "one" and "two" are trained and synced."""
    lora = {"lora": {"rank": 2}, "refit": {"adapters": "unmerged", "max_adapters": 2}}
    with opened(wide_model, **lora) as session:
        for seed, name in enumerate(DATA):
            session.use_adapter(name, seed=seed)
            train(session, name)
            session.sync()
        yield session


def train(session: Session, name: str) -> None:
    """Make one step that changes what is sampled."""
    session.forward_backward(DATA[name])
    session.optim_step(learning_rate=0.05)


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    """All samples, in their order."""
    return [one for group in groups for one in group]


def logprobs_of(samples: Sequence[Completion]) -> np.ndarray:
    """float32 [T]: what the generator said, of all samples."""
    return np.concatenate([one.logprobs for one in samples])


def by_trainer(session: Session, samples: Sequence[Completion]) -> np.ndarray:
    """float32 [T]: the trainer's log-probabilities of the samples' tokens, with the adapter in use."""
    found = session.logprobs([[*one.prompt, *one.tokens] for one in samples])
    return np.concatenate([row[-len(one.tokens) :] for row, one in zip(found, samples, strict=True)])


def by_transformers(directory: Path, samples: Sequence[Completion]) -> np.ndarray:
    """float64 [T]: those of a plain forward pass in float32 with the weights of a directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    for one in samples:
        tokens = torch.tensor([[*one.prompt.tolist(), *one.tokens.tolist()]])
        with torch.no_grad():
            table = model(tokens).logits[0, :-1].double().log_softmax(-1)
        rows.append(table.gather(1, tokens[0, 1:, None])[-len(one.tokens) :, 0].numpy())
    return np.concatenate(rows)


def test_samples_of_adapters_are_drawn_at_once_and_are_those_of_each(adapters: Session, tmp_path: Path) -> None:
    assert adapters.sampler_adapters == {"one": 1, "two": 1}

    async def both() -> list[list[list[Completion]]]:
        calls = adapters.asynchronous
        return await asyncio.gather(*(calls.sample(PROMPTS, num_samples=4, seed=3, adapter=name) for name in DATA))

    drawn = dict(zip(DATA, map(flat, asyncio.run(both())), strict=True))
    for name, samples in drawn.items():
        adapters.use_adapter(name)
        assert {one.weight_version for one in samples} == {1}
        np.testing.assert_allclose(logprobs_of(samples), by_trainer(adapters, samples), atol=TOLERANCE, err_msg=name)
        merged = adapters.export(tmp_path / name)
        np.testing.assert_allclose(logprobs_of(samples), by_transformers(merged, samples), atol=TOLERANCE, err_msg=name)
    other = by_trainer(adapters, drawn["one"])  # with "two" in use
    assert np.abs(other - logprobs_of(drawn["one"])).max() > 100 * TOLERANCE, "the adapters are too alike to tell them apart"


def test_an_adapter_that_trains_on_leaves_the_other(adapters: Session) -> None:
    before = {name: flat(adapters.sample(PROMPTS, seed=5, adapter=name)) for name in DATA}
    adapters.use_adapter("two")
    train(adapters, "two")
    np.testing.assert_array_equal(logprobs_of(flat(adapters.sample(PROMPTS, seed=5))), logprobs_of(before["two"]))
    version = adapters.sync()
    assert adapters.sampler_adapters == {"one": 1, "two": version}
    after = flat(adapters.sample(PROMPTS, seed=5))  # by the last sync
    np.testing.assert_allclose(logprobs_of(after), by_trainer(adapters, after), atol=TOLERANCE)
    assert {one.weight_version for one in after} == {version}
    same = flat(adapters.sample(PROMPTS, seed=5, adapter="one"))
    np.testing.assert_allclose(logprobs_of(same), logprobs_of(before["one"]), atol=TOLERANCE)


def test_adapters_used_longest_ago_make_room_and_come_again(adapters: Session) -> None:
    before = flat(adapters.sample(PROMPTS, seed=6, adapter="one"))
    adapters.sample(PROMPTS, adapter="two")
    adapters.use_adapter("two")
    adapters.sync("a snapshot of two")
    assert list(adapters.sampler_adapters) == ["two", "a snapshot of two"]
    with pytest.raises(CallError, match="(?s)num_samples.*'one'.*'a snapshot of two'"):
        adapters.sample(PROMPTS, num_samples=0, adapter="one")
    adapters.use_adapter("one")
    adapters.sync()
    assert list(adapters.sampler_adapters) == ["a snapshot of two", "one"]
    again = flat(adapters.sample(PROMPTS, seed=6, adapter="one"))
    np.testing.assert_allclose(logprobs_of(again), logprobs_of(before), atol=TOLERANCE)
    adapters.use_adapter("two")
    adapters.sync()


def test_a_loaded_adapter_comes_though_its_version_is_held(adapters: Session, tmp_path: Path) -> None:
    adapters.use_adapter("two")
    adapters.save(tmp_path)
    version = adapters.weight_version
    kept = flat(adapters.sample(PROMPTS, seed=7, adapter="two"))
    adapters.use_adapter("one")
    assert adapters.load(tmp_path, name="one") == version
    np.testing.assert_array_equal(logprobs_of(flat(adapters.sample(PROMPTS, seed=7, adapter="two"))), logprobs_of(kept))
    samples = flat(adapters.sample(PROMPTS, seed=7, adapter="one"))
    np.testing.assert_allclose(logprobs_of(samples), by_trainer(adapters, samples), atol=TOLERANCE)
    adapters.use_adapter("two")
    np.testing.assert_allclose(logprobs_of(samples), by_trainer(adapters, samples), atol=TOLERANCE)


@pytest.mark.wide
def test_all_weights_sample_train_and_sample_again(wide_model: Path) -> None:
    # In a process of its own: this one has room for one engine.
    with opened(wide_model, refit={"channel": "shared_memory"}) as session:
        for version in range(3):
            samples = flat(session.sample(PROMPTS, num_samples=4, seed=version))
            assert {one.weight_version for one in samples} == {version}
            np.testing.assert_allclose(logprobs_of(samples), by_trainer(session, samples), atol=TOLERANCE)
            train(session, "one")
            stale = flat(session.sample(PROMPTS, num_samples=4, seed=version))
            np.testing.assert_array_equal(logprobs_of(stale), logprobs_of(samples), "a step without a sync was sampled")
            assert np.abs(logprobs_of(samples) - by_trainer(session, samples)).max() > 10 * TOLERANCE
            session.sync()
        with pytest.raises(CallError, match="many_adapters"):
            session.sample(PROMPTS, adapter="")
