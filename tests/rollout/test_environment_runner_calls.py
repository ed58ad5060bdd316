"""What an environment's provider says of its calls, in a whole run: how many at once, and how long one may take."""

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.spi import CheckContext, StepResult, Turn
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT

from ..core.run.conftest import FAKES

Run = Callable[..., dict[str, Any]]


class Counting(FakeEnvironment):
    """Notes how many of its calls are at work at once. None ends before as many have been as are expected."""

    expected = 0
    at_work = 0
    most = 0

    async def step(self, state: Any, turn: Turn) -> StepResult:
        Counting.at_work += 1
        Counting.most = max(Counting.most, Counting.at_work)
        while Counting.most < Counting.expected:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        Counting.at_work -= 1
        return await super().step(state, turn)


@pytest.mark.parametrize(("said", "most"), [(3, 3), (None, 64)])
def test_calls_at_work_are_as_many_as_the_provider_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: int | None, most: int
) -> None:
    checked: list[CheckContext] = []
    module = ModuleType("bounded")
    module.Counting = Counting  # type: ignore[attr-defined]
    module.check = lambda context, config: checked.append(context) or []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bounded", module)
    Counting.expected, Counting.at_work, Counting.most = most, 0, 0
    provider = evolve(FAKE_ENVIRONMENT, backend="bounded:Counting", check="bounded:check", max_concurrent=lambda config: said)
    registry = Registry.from_providers({role: [one] for role, one in {**FAKES, "environment": provider}.items()})  # type: ignore[misc]
    # An evaluation has fewer calls than run at once where the provider says nothing.
    evaluates = f"evaluation.at_start={str(said is not None).lower()}"
    run("run.num_steps=1", "rollout.environment_timeout_s=60.5", evaluates, registry=registry)
    assert Counting.most == most
    assert {context.environment_timeout_s for context in checked} == {60.5}
