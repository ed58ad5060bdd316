"""Steps of agents whose first episode fails: an AgentEnvironment of this repository, and real sessions."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import EpisodeResult, Row, SamplingParams, SessionEndpoint
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_serve.agents.collector import AgentSampler
from rlcore_serve.sessions.interface import session_server

from .failing import Step, step_of  # type: ignore[import-not-found]
from .test_sampler import Speller  # type: ignore[import-not-found]

NUM_SAMPLES = 4


class OneByOne:
    """An agent environment whose episodes take turns, so that a fault of its server meets the first one alone."""

    def __init__(self, environment: Any, before: Callable[[int], None]) -> None:
        """`before` is called with the number of each episode, counted from 0."""
        self._environment, self._before = environment, before
        self._turn, self._number = asyncio.Lock(), 0

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        async with self._turn:
            self._before(self._number)
            self._number += 1
            result: EpisodeResult = await self._environment.run(row, seed, session)
            return result

    def rows(self, split: str) -> None:
        return None

    def close(self) -> None:
        if (close := getattr(self._environment, "close", None)) is not None:
            close()


def played(
    environment: Any,
    row: Row,
    *,
    before: Callable[[int], None] | None = None,
    on_error: Any = "mask",
    timeout_s: float = 60.0,
    **options: Any,
) -> Step:
    """A step of one group of NUM_SAMPLES episodes of an agent environment; one after another with `before`."""
    progress = Progress()
    with ExitStack() as stack:
        runner = EpisodeRunner(environment if before is None else OneByOne(environment, before), timeout_s, on_error)
        stack.callback(runner.close)
        defaults: dict[str, Any] = {
            "generator": Speller(),
            "episodes": runner,
            "tokenizer": FakeTokenizer(),
            "sampling": SamplingParams(stop_token_ids=(0,)),
            "samples_per_prompt": NUM_SAMPLES,
            "server": session_server,
            "max_sequence_length": 400,
            "max_response_tokens": 5,
            "max_failed_fraction": 0.5,
            "trains": True,
            "history": "refuse",
            "clock": PhaseClock(progress),
            "progress": progress,
        }
        return step_of(AgentSampler(**{**defaults, **options}).collect([row], 0, (1, 2, 3)))
