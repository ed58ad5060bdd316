"""Each row goes to the environment of its data set."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rlcore.run.data.mixes import MixedAgents, MixedEnvironment
from rlcore.spi import EpisodeResult, FinishReason, Observation, ResetResult, SessionEndpoint, StepResult, Turn


class Named:
    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    async def reset(self, row: Any, seed: int) -> Any:
        return ResetResult(observation=Observation(text=self.name), state=seed) if seed >= 0 else "none"

    async def step(self, state: Any, turn: Turn) -> StepResult:
        return StepResult(reward=float(state), done=False, observation=Observation(text=self.name), state=state + 1)

    async def run(self, row: Any, seed: int, session: Any) -> EpisodeResult:
        return EpisodeResult(reward=float(seed), metrics={self.name: 1.0})

    def rows(self, split: str) -> Any:
        return [{"prompt": self.name}]

    def close(self) -> None:
        self.closed = True


BACKENDS = {"first": Named("first"), "second": Named("second")}
TURN = Turn(text="", tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


@pytest.mark.parametrize(("data_set", "name"), [("b", "second"), ("a", "first"), (None, "first")])
def test_an_episode_is_of_its_sets_environment_from_turn_to_turn(data_set: str | None, name: str) -> None:
    mixed = MixedEnvironment(backends=BACKENDS, of_set={"b": "second"})
    row = {} if data_set is None else {"data_set": data_set}
    begun = asyncio.run(mixed.reset(row, 4))
    first = asyncio.run(mixed.step(begun.state, TURN))
    second = asyncio.run(mixed.step(first.state, TURN))
    shown = [one.observation.text for one in (begun, first, second) if one.observation is not None]
    assert (shown, first.reward, second.reward) == ([name] * 3, 4.0, 5.0)
    agents = MixedAgents(backends=BACKENDS, of_set={"b": "second"})
    endpoint = SessionEndpoint(base_url="", api_key="", model="")
    assert asyncio.run(agents.run(row, 2, endpoint)).metrics == {name: 1.0}


def test_rows_are_the_first_ones_and_all_are_closed() -> None:
    mixed = MixedEnvironment(backends=BACKENDS, of_set={})
    assert mixed.rows("train") == [{"prompt": "first"}]
    assert asyncio.run(mixed.reset({}, -1)) == "none"  # type: ignore[comparison-overlap]
    mixed.close()
    assert all(backend.closed for backend in BACKENDS.values())


@pytest.mark.parametrize("failing", ["first", "second"])
def test_an_environment_that_fails_to_close_leaves_none_open(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS.values():
        monkeypatch.setattr(backend, "closed", False)

    def close() -> None:
        raise OSError("no answer")

    monkeypatch.setattr(BACKENDS[failing], "close", close)
    with pytest.raises(OSError, match="no answer"):
        MixedEnvironment(backends=BACKENDS, of_set={}).close()
    assert [name for name, backend in BACKENDS.items() if not backend.closed] == [failing]
