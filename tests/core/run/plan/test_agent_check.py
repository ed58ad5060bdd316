"""Keys that agents rule out, and those that only they have."""

from collections.abc import Callable

import pytest
from attrs import evolve

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, capabilities
from rlcore.testing.fakes import FAKE_ENVIRONMENT, fake_registry

Prepare = Callable[..., RunPlan]
AGENTS = evolve(FAKE_ENVIRONMENT, capabilities={capabilities.AGENT}, backend="rlcore.agents.environment:AgentBackend")


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("rollout.max_turns=2", "rollout.max_turns"),
        ('data.train.on_long_prompt="drop"', "data.train.on_long_prompt"),
    ],
)
def test_keys_that_do_nothing_where_agents_run_episodes_are_refused(prepared: Prepare, override: str, path: str) -> None:
    registry = evolve(
        fake_registry(),
        entries=tuple(
            evolve(entry, provider=AGENTS) if entry.label.startswith("environment 'fake'") else entry
            for entry in fake_registry().entries
        ),
    )
    with pytest.raises(ConfigError) as raised:
        prepared(override, registry=registry)
    assert [problem.path for problem in raised.value.problems] == [path]


def test_a_history_that_only_agents_have_is_refused(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared('rollout.history="segment"')
    assert [problem.path for problem in raised.value.problems] == ["rollout.history"]
