"""Scores answers by reasoning-gym's own rules, in worker processes: some rules compute what the answer says."""

import functools
import json
import math
import signal
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from rlcore.spi import RewardError, fails_as
from rlcore_reasoning_gym.config import ReasoningGymConfig, num_processes
from rlcore_workers.pool import WorkerPool
from rlcore_workers.process import Ended, Limits, Task

MAX_RESPONSES = 1000
"""Responses that one process scores: sympy keeps some of what it has parsed."""
COMPARED = frozenset({"game_of_life_halting"})
"""Families whose own rule gives every answer 1.0; the package's general rule, which compares texts, scores them."""


@frozen(kw_only=True)
class Score:
    """The reward of an answer."""

    score: float = 0.0
    timed_out: bool = False
    failed: bool = False
    """The family's rule raised an error, or ended its process."""


class Scorer:
    """Worker processes, started when first needed."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        timeout_s, max_memory_mib = config.scoring_timeout_s, config.max_memory_mib
        limits = Limits(cpu_time_s=timeout_s, max_memory_bytes=max_memory_mib * 2**20, max_requests=MAX_RESPONSES)
        task = Task(
            name=f"reasoning-gym-{timeout_s:g}s-{max_memory_mib}MiB",
            handle="rlcore_reasoning_gym.scoring:answer_request",
            prepare="rlcore_reasoning_gym.scoring:warm_up",
            limits=limits,
        )
        self._pool = WorkerPool(task, num_processes(config))

    async def score(self, request: Mapping[str, Any]) -> Score:
        """The score of a request, which has the arguments of `score`. RewardError where the process was killed from outside."""
        answer = await self._pool.call(dict(request))
        if not isinstance(answer, Ended):
            return Score(failed=True) if answer is None else Score(score=answer)
        if answer.exit_code == -signal.SIGKILL:
            with fails_as("infrastructure"):
                raise RewardError(
                    "the process that scores the response was killed from outside, again and again: look whether the machine "
                    "runs out of memory, and lower environment.reasoning_gym.num_processes or max_memory_mib"
                )
        timed_out = answer.exit_code == -signal.SIGPROF
        return Score(timed_out=timed_out, failed=not timed_out)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def warm_up() -> None:
    """Load what every answer needs, before processes are forked."""
    from rlcore_reasoning_gym import families  # noqa: F401 - which takes seconds to import


def answer_request(_: None, request: dict[str, Any]) -> float | None:
    """The score of one answer, in a process of its own; None where the family's rule fails over it."""
    try:
        return score(**request)
    except Exception:  # whatever the rule of a family stumbles over in an answer
        return None


def score(*, family: str, level: int | None, options: str, answer: str, entry: dict[str, Any]) -> float:
    """Reasoning-gym's score of an answer, from 0 to 1. `options` are JSON."""
    from reasoning_gym.dataset import ProceduralDataset

    data_set = _data_set(family, level, options)
    rule = ProceduralDataset.score_answer if family in COMPARED else type(data_set).score_answer
    given = float(rule(data_set, answer, entry))
    if not math.isfinite(given):
        raise ValueError(f"found the score {given}; expected a finite one")
    return given


@functools.cache
def _data_set(family: str, level: int | None, options: str) -> Any:
    from rlcore_reasoning_gym.families import Family

    return Family(name=family, level=level, options=json.loads(options)).data_set(0, 1)
