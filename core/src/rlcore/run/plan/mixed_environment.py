"""Several environments as one: each row goes to that of its data set."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from attrs import evolve, frozen

from rlcore.run.data.mixed_rows import DATA_SET
from rlcore.spi import (
    AgentEnvironment,
    Environment,
    EpisodeResult,
    ResetResult,
    Row,
    SessionEndpoint,
    StepResult,
    Turn,
)


@frozen(kw_only=True, eq=False)
class _Mixed:
    """The base of environments of both kinds."""

    backends: Mapping[str, Any]
    """By name, that of rows whose set names none first."""
    of_set: Mapping[str, str]
    """The environment's name of each data set that names one."""

    def name_of(self, row: Row) -> str:
        """The environment of a row."""
        return self.of_set.get(str(row.get(DATA_SET)), next(iter(self.backends)))

    def rows(self, split: str) -> Sequence[Row] | None:
        """Rows that the first environment makes."""
        rows: Sequence[Row] | None = next(iter(self.backends.values())).rows(split)
        return rows

    def close(self) -> None:
        """Close each that can be, whatever one of them raises."""
        with ExitStack() as stack:
            for backend in self.backends.values():
                if (close := getattr(backend, "close", None)) is not None:
                    stack.callback(close)


@frozen(kw_only=True, eq=False)
class MixedEnvironment(_Mixed):
    """Environments that answer turn after turn."""

    backends: Mapping[str, Environment]

    async def reset(self, row: Row, seed: int) -> ResetResult:
        """Begin in the row's environment."""
        name = self.name_of(row)
        found = await self.backends[name].reset(row, seed)
        # What is of another class, the caller refuses.
        return evolve(found, state=(name, found.state)) if isinstance(found, ResetResult) else found

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """Go on there."""
        name, inner = state
        found = await self.backends[name].step(inner, turn)
        return evolve(found, state=(name, found.state)) if isinstance(found, StepResult) else found


@frozen(kw_only=True, eq=False)
class MixedAgents(_Mixed):
    """Environments whose agents run the episodes."""

    backends: Mapping[str, AgentEnvironment]

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        """Run the episode in the row's environment."""
        return await self.backends[self.name_of(row)].run(row, seed, session)
