"""The benchmarks' task as an rlcore environment."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from share_task import prompts, reward

from rlcore.spi import SPI_VERSION, EnvironmentContext, Observation, Provider, ResetResult, Row, StepResult, Turn


@frozen(kw_only=True)
class ShareConfig:
    """No options."""


class ShareEnvironment:
    """Environment `share`."""

    def __init__(self, context: EnvironmentContext, config: ShareConfig) -> None:
        self._rows = [{"prompt": prompt} for prompt in prompts()]

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return ResetResult(observation=Observation(text=row["prompt"]), state=None)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        return StepResult(reward=reward(turn.text), done=True)

    def rows(self, split: str) -> Sequence[Row]:
        return self._rows


PROVIDER = Provider(name="share", spi=SPI_VERSION, config=ShareConfig, backend="share_environment:ShareEnvironment")
