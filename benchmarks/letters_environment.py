"""An rlcore environment of random prompts, all of one length, and rewards that are as good as random but fixed."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from model_shapes import reward, texts

from rlcore.spi import SPI_VERSION, EnvironmentContext, Observation, Provider, ResetResult, Row, StepResult, Turn


@frozen(kw_only=True)
class LettersConfig:
    """`[environment.letters]`"""

    num_prompts: int = 64
    """Rows."""
    prompt_length: int = 128
    """Tokens of each."""


class LettersEnvironment:
    """Environment `letters`."""

    def __init__(self, context: EnvironmentContext, config: LettersConfig) -> None:
        self._rows = [{"prompt": text} for text in texts(config.num_prompts, config.prompt_length)]

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return ResetResult(observation=Observation(text=row["prompt"]), state=None)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        return StepResult(reward=reward(turn.text), done=True)

    def rows(self, split: str) -> Sequence[Row]:
        return self._rows


PROVIDER = Provider(name="letters", spi=SPI_VERSION, config=LettersConfig, backend="letters_environment:LettersEnvironment")
