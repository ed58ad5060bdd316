"""Keys that agents rule out."""

from collections.abc import Callable

import attrs
import pytest
from attrs import evolve

from rlcore.config.recipe import RolloutConfig
from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, EpisodeResult, PluginError, Row, SessionEndpoint, capabilities
from rlcore.testing.fakes import FAKE_ENVIRONMENT, fake_registry
from rlcore_serve.agents import check

from ...core.run.conftest import prepared as prepared  # type: ignore[import-not-found]

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


UNREAD = {
    "reuse": "2",
    "max_samples_per_prompt": "8",
    "max_turns": "2",
    "max_turn_tokens": "8",
    "episode_timeout_s": "3.0",
    "on_truncation": '"mask"',
}
"""Values of the keys that agents do not read, but for `replay_routing`, which no fake has."""


def test_every_key_of_rollout_is_read_or_refused() -> None:
    """A key that nobody has classed yet belongs into one of the two."""
    keys = {one.name for one in attrs.fields(RolloutConfig)}
    assert keys == check.READ | {*UNREAD, "replay_routing"}
    assert not check.READ & UNREAD.keys()


@pytest.mark.parametrize(
    ("override", "path"),
    [
        *((f"rollout.{key}={value}", f"rollout.{key}") for key, value in UNREAD.items()),
        ('rollout.history="keep_sampled"', "rollout.history"),
        ('data.train.on_long_prompt="drop"', "data.train.on_long_prompt"),
    ],
)
def test_keys_that_do_nothing_where_agents_run_episodes_are_refused(prepared: Prepare, override: str, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(override, registry=agents())
    assert [problem.path for problem in raised.value.problems] == [path]


def test_agents_without_a_session_server_are_refused(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "only_function", lambda *_: None)
    with pytest.raises(ConfigError) as raised:
        prepared(registry=agents())
    (problem,) = raised.value.problems
    assert (problem.path, problem.remedy) == ("environment", "Run: pip install 'rlcore[serve]'")


def test_agents_without_a_collector_are_refused_behind_what_is_wrong_with_the_recipe(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "collector:agents")
    with pytest.raises(PluginError, match=r"rlcore\[serve\]"):
        prepared(registry=agents())
    with pytest.raises(ConfigError) as raised:
        prepared("rollout.max_refill_ratio=9", registry=agents())
    assert [problem.path for problem in raised.value.problems] == ["rollout.max_refill_ratio"]
