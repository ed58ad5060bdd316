"""The environment `reward_model`: one turn an episode, scored by a trained reward model in a process or behind servers."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import Any

from rlcore.spi import (
    DataError,
    EnvironmentContext,
    Observation,
    PluginError,
    ResetResult,
    RewardError,
    Row,
    StepResult,
    Turn,
)
from rlcore_reward_model.batching import Batches
from rlcore_reward_model.config import RewardModelConfig
from rlcore_reward_model.endpoints import RewardEndpoints
from rlcore_reward_model.scorer import Conversation, Failure, Scoring
from rlcore_workers.pool import WorkerPool
from rlcore_workers.process import Ended, Task, ending

CLOSE_S = 2.0
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables with the Hub's tokens, which the process that loads the model gets."""


class RewardModelEnvironment:
    """The reward of an answer is the model's value of prompt and answer."""

    def __init__(self, context: EnvironmentContext, config: RewardModelConfig) -> None:
        del context
        self._config = config
        scoring = Scoring(path=config.path, device=config.device, dtype=config.dtype)
        function, argument = ("encode", config.path) if config.base_urls else ("score", scoring)
        task = Task(
            name="rlcore-reward-model",
            handle=f"rlcore_reward_model.scorer:{function}",
            argument=argument,
            pass_environment=HUB_TOKENS,
        )
        self._pool = WorkerPool(task, 1)
        self._batches: dict[asyncio.AbstractEventLoop, Batches] = {}
        self._servers: dict[asyncio.AbstractEventLoop, RewardEndpoints] = {}
        """For each event loop, to which its connections belong."""

    def rows(self, split: str) -> Sequence[Row] | None:
        """None: prompts come from the recipe's data."""
        del split
        return None

    async def reset(self, row: Row, seed: int) -> ResetResult:
        """The row's prompt. DataError where the row has none."""
        del seed
        if "prompt" not in row:
            raise DataError(f"found a row with the fields {', '.join(map(repr, row))}; expected a prompt")
        form, system = self._config.prompt_format, self._config.system_prompt
        shown = Observation.of_prompt(row["prompt"], prompt_format=form, system_prompt=system, tools=row.get("tools"))
        return ResetResult(observation=shown, state=shown)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """The value, and with a separator those of the answer's steps. RewardError where this answer has none; PluginError
        where the model cannot score at all."""
        ends = step_ends(turn.text, self._config.step_separator)
        *parts, whole = await asyncio.gather(*(self._value(state, turn.text[:end]) for end in (*ends, None)))
        return StepResult(
            reward=whole,
            part_rewards=dict(zip(ends, parts, strict=True)),
            done=True,
            success=whole >= self._config.success_reward,
        )

    async def _value(self, shown: Observation, answer: str) -> float:
        loop = asyncio.get_running_loop()
        batches = self._batches.setdefault(loop, Batches(self._pool, self._config.max_batch))
        found = await batches.ask(conversation_of(shown, answer))
        if isinstance(found, Ended):
            raise RewardError(f"the process of the reward model ended with {ending(found.exit_code)}")
        if isinstance(found, Failure):
            raise (PluginError if found.is_the_models else RewardError)(found.reason)
        if self._config.base_urls:
            if loop not in self._servers:
                self._servers[loop] = RewardEndpoints(self._config)
            return await self._servers[loop].value(found)
        return float(found)

    def close(self) -> None:
        """End the process and the connections; the next call starts others."""
        self._pool.close()
        self._batches.clear()
        servers, self._servers = self._servers, {}
        for loop, one in servers.items():
            if not loop.is_closed() and loop.is_running():
                with contextlib.suppress(TimeoutError):
                    asyncio.run_coroutine_threadsafe(one.session.close(), loop).result(CLOSE_S)


def step_ends(answer: str, separator: str | None) -> list[int]:
    """Return the places in an answer at which its steps end, but for the last one's."""
    if separator is None:
        return []
    ends = [found.end() for found in re.finditer(re.escape(separator), answer)]
    return [end for end in ends if end < len(answer)]


def conversation_of(shown: Observation, answer: str) -> Conversation:
    """Return a prompt with its answer. A last message of the assistant's in the prompt is the answer's beginning."""
    if shown.messages is None:
        return Conversation(prompt=shown.text or "", answer=answer)
    *before, last = shown.messages
    if last["role"] != "assistant":
        return Conversation(prompt=shown.messages, answer=answer, tools=shown.tools)
    return Conversation(prompt=before, answer=last["content"] + answer, tools=shown.tools)
