"""Environment of several turns: what each earns is told by its digits, and what comes after it is shown by its first ones."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rlcore.spi import EnvironmentContext, Observation, Provider, ResetResult, Row, StepResult, Turn


@frozen(kw_only=True)
class Config:
    """It has no options."""


class Turns:
    """A turn earns a quarter for each 1, and loses one for each 2. One that begins with 0 to 5 is the last."""

    def __init__(self, context: EnvironmentContext, config: Config) -> None:
        pass

    def rows(self, split: str) -> Sequence[Row]:
        return [{"prompt": f"{number}+{7 * number % 23}="} for number in range(60)]

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return ResetResult(observation=Observation(text=str(row["prompt"])), state=None)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        parts = {"ones": turn.text.count("1") / 4, "twos": -turn.text.count("2") / 4}
        is_last = turn.text[:1] in "012345"  # nothing said is in it too
        return StepResult(
            reward=sum(parts.values()),
            done=is_last,
            observation=None if is_last else Observation(text=f"={turn.text[:2]}+"),
            reward_components=parts,
        )


PROVIDER = Provider(name="turns", spi=(2, 0), config=Config, backend="oracle_turns:Turns")
