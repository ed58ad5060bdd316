"""Keys that agents rule out, and those that only they have."""

from collections.abc import Callable

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan import agent_check
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, EpisodeResult, Row, SessionEndpoint, capabilities
from rlcore.testing.fakes import FAKE_ENVIRONMENT, fake_registry

Prepare = Callable[..., RunPlan]
AGENTS = evolve(FAKE_ENVIRONMENT, capabilities={capabilities.AGENT}, backend=f"{__name__}:Agents")


class Agents:
    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        raise NotImplementedError

    def rows(self, split: str) -> None: ...


def agents() -> Registry:
    """The fakes, with an environment that agents run."""
    entries = fake_registry().entries
    return evolve(
        fake_registry(),
        entries=tuple(
            evolve(entry, provider=AGENTS) if entry.role == "environment" and entry.name == "fake" else entry
            for entry in entries
        ),
    )


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("rollout.max_turns=2", "rollout.max_turns"),
        ('data.train.on_long_prompt="drop"', "data.train.on_long_prompt"),
    ],
)
def test_keys_that_do_nothing_where_agents_run_episodes_are_refused(prepared: Prepare, override: str, path: str) -> None:
    pytest.importorskip("rlcore_serve", reason="sessions need a server")
    with pytest.raises(ConfigError) as raised:
        prepared(override, registry=agents())
    assert [problem.path for problem in raised.value.problems] == [path]


def test_agents_without_a_session_server_are_refused(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_check, "only_function", lambda *_: None)
    with pytest.raises(ConfigError) as raised:
        prepared(registry=agents())
    (problem,) = raised.value.problems
    assert (problem.path, problem.remedy) == ("environment", "Run: pip install 'rlcore[serve]'")


def test_a_history_that_only_agents_have_is_refused(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared('rollout.history="segment"')
    assert [problem.path for problem in raised.value.problems] == ["rollout.history"]
