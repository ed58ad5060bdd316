"""The environment `reward_model`: one turn an episode, scored by a trained reward model in a process of its own."""

import asyncio
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
from rlcore_reward_model.scorer import Conversation, Failure, Scoring
from rlcore_workers.pool import WorkerPool
from rlcore_workers.process import Ended, Task, ending

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables with the Hub's tokens, which the process that loads the model gets."""


class RewardModelEnvironment:
    """The reward of an answer is the model's value of prompt and answer."""

    def __init__(self, context: EnvironmentContext, config: RewardModelConfig) -> None:
        del context
        self._config = config
        scoring = Scoring(path=config.path, device=config.device, dtype=config.dtype)
        task = Task(
            name="rlcore-reward-model",
            handle="rlcore_reward_model.scorer:score",
            argument=scoring,
            pass_environment=HUB_TOKENS,
        )
        self._pool = WorkerPool(task, 1)
        self._batches: dict[asyncio.AbstractEventLoop, Batches] = {}

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
        """The value. RewardError where this answer has none; PluginError where the model cannot score at all."""
        loop = asyncio.get_running_loop()
        batches = self._batches.setdefault(loop, Batches(self._pool, self._config.max_batch))
        found = await batches.ask(conversation_of(state, turn.text))
        if isinstance(found, Ended):
            raise RewardError(f"the process of the reward model ended with {ending(found.exit_code)}")
        if isinstance(found, Failure):
            raise (PluginError if found.is_the_models else RewardError)(found.reason)
        return StepResult(reward=found, done=True, success=found >= self._config.success_reward)

    def close(self) -> None:
        """End the process; the next call starts another."""
        self._pool.close()
        self._batches.clear()


def conversation_of(shown: Observation, answer: str) -> Conversation:
    """Return a prompt with its answer. A last message of the assistant's in the prompt is the answer's beginning."""
    if shown.messages is None:
        return Conversation(prompt=shown.text or "", answer=answer)
    *before, last = shown.messages
    if last["role"] != "assistant":
        return Conversation(prompt=shown.messages, answer=answer, tools=shown.tools)
    return Conversation(prompt=before, answer=last["content"] + answer, tools=shown.tools)
