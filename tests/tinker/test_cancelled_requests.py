"""Requests that are cancelled while a call of the session runs: the server knows afterwards which weights are where."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore_tinker.adapter_pool import AdapterPool
from rlcore_tinker.checkpoints import Checkpoints
from rlcore_tinker.clients import Clients
from rlcore_tinker.models import Models
from rlcore_tinker.promises import Promises
from rlcore_tinker.training_data import Limits
from rlcore_tinker.training_model import ServedModel
from rlcore_tinker.weights import BASE, NamedWeights, Weights

TRAINED = "trained@1"


class Labels:
    """Stands in for a session whose weights are labels. While it runs its call of number `cut`, it cancels the request."""

    def __init__(self) -> None:
        self.adapter, self.held, self.generated = "", {"": "base"}, "base"
        self.num_calls, self.cut = 0, 0
        self.cancel: Callable[[], object] = lambda: None

    holds_adapters = False

    def use_adapter(self, name: str, *, seed: int | None = None, rank: int | None = None, drops: Sequence[str] = ()) -> None:
        self._begin_call()
        if seed is not None:
            self.held[name] = f"{name} untrained"
        self.adapter = name
        for one in drops:
            del self.held[one]

    def sync(self, name: str | None = None) -> None:
        self._begin_call()
        self.generated = self.held[self.adapter]

    def save(self, directory: Path) -> None:
        self._begin_call()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "label").write_text(self.held[self.adapter])

    def load(self, directory: Path, optimizer: bool, name: str | None = None) -> None:
        self._begin_call()
        self.held[self.adapter] = self.generated = (directory / "label").read_text()

    def logprobs(self, sequences: Any, *, model: str) -> Any:
        self._begin_call()
        return [self.held[self.adapter] for _ in sequences]

    def _begin_call(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.cut:
            self.cancel()
            time.sleep(0.05)


async def _sampled(weights: Any, name: str, files: Path | None = None) -> str:
    async with weights.sampling(NamedWeights(name=name, files=files)) as session:
        return str(session.generated)


async def _trained(weights: Any) -> str:
    async with weights.training() as session:
        return str(session.held[session.adapter])


def _saved(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "label").write_text("saved")
    return folder


async def _cut(session: Labels, cut: int, request: Coroutine[Any, Any, Any]) -> bool:
    """Run a request that is cancelled in its call of number `cut`; return whether it has so many."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(request)
    session.num_calls, session.cut = 0, cut
    session.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
    await asyncio.wait([task])
    session.cut = 0
    return task.cancelled()


ADAPTERS: dict[str, Callable[[Any, Any, Path], Coroutine[Any, Any, Any]]] = {
    "samples of another model": lambda pool, models, folder: _sampled(pool, "b@0"),
    "samples of the base model": lambda pool, models, folder: _sampled(pool, BASE),
    "samples of a checkpoint": lambda pool, models, folder: _sampled(pool, "saved", _saved(folder / "x" / "files")),
    "log-probabilities": lambda pool, models, folder: pool.logprobs(NamedWeights(name=BASE), [[1]]),
    "an unsaved sampler": lambda pool, models, folder: models["b"].publish(keeps=True),
    "a piece": lambda pool, models, folder: _trained(models["b"]),
}


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters_stay_where_the_server_knows_them(tmp_path: Path, case: str, cut: int) -> None:
    async def run() -> tuple[bool, dict[str, str], dict[str, str]]:
        session: Any = Labels()
        pool = AdapterPool(session, tmp_path / "scratch")
        models = {name: pool.open(name, seed, None) for seed, name in enumerate("ab")}
        for model in models.values():
            await model.begin(None, BASE, optimizer=True)
        async with models["a"].training():
            session.held["a"] = "a trained"
            models["a"].has_changed(TRAINED)
        await models["a"].publish()
        was_cut = await _cut(session, cut, ADAPTERS[case](pool, models, tmp_path))
        trained = {name: await _trained(model) for name, model in models.items()}
        sampled = {name: await _sampled(pool, name) for name in (TRAINED, "b@0", BASE)}
        return was_cut, trained, sampled

    was_cut, trained, sampled = asyncio.run(run())
    assert was_cut or cut > 1
    assert trained == {"a": "a trained", "b": "b untrained"}
    assert sampled == {TRAINED: "a trained", "b@0": "b untrained", BASE: "base"}


WHOLE: dict[str, Callable[[Any, Path], Coroutine[Any, Any, Any]]] = {
    "samples of the base model": lambda weights, folder: _sampled(weights, BASE),
    "samples of a checkpoint": lambda weights, folder: _sampled(weights, "saved", _saved(folder / "x" / "files")),
    "log-probabilities": lambda weights, folder: weights.logprobs(NamedWeights(name=BASE), [[1]]),
    "an unsaved sampler": lambda weights, folder: weights.publish(keeps=True),
}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("case", WHOLE)
def test_whole_weights_stay_where_the_server_knows_them(tmp_path: Path, case: str, cut: int) -> None:
    async def run() -> tuple[bool, str, str, str]:
        session: Any = Labels()
        weights = Weights(session, tmp_path / "scratch", has_reference=False)
        await weights.begin(None, BASE, optimizer=True)
        for label, name in (("older", "trained@0"), ("trained", TRAINED)):
            await weights.publish()
            async with weights.training():
                session.held[""] = label
                weights.has_changed(name)
        was_cut = await _cut(session, cut, WHOLE[case](weights, tmp_path))
        return was_cut, await _trained(weights), await _sampled(weights, BASE), await _sampled(weights, TRAINED)

    was_cut, *labels = asyncio.run(run())
    assert was_cut or cut > 1
    assert labels == ["trained", "base", "trained"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_models_of_a_client_that_goes_away_while_it_ends_are_released(tmp_path: Path, cut: int) -> None:
    limits = Limits(max_sequence_length=8, vocab_size=9)
    served = ServedModel(name="m", tokenizer_id="m", limits=limits, lora_rank=1)

    async def run() -> tuple[bool, dict[str, str], list[str]]:
        session: Any = Labels()
        pool, clients = AdapterPool(session, tmp_path / "scratch"), Clients()
        models = Models(served, pool, Checkpoints(tmp_path / "kept"), clients, Promises(), lambda error: None)
        client = clients.begin({}, None)
        for number in range(2):
            await models.create(client, number, {})
        was_cut = await _cut(session, cut, models.release(client.session_id))
        await models.release(client.session_id)
        return was_cut, session.held, models.ids()

    assert asyncio.run(run()) == (True, {"": "base"}, [])
