"""What the collector of episodes does before a run: prompts of rows, levels, and which of the installed ones a run takes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.registry.run_parts import collector
from rlcore.run.plan.collector import CollectorContext, build_collector, collector_problems
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, Observation, PluginError, ResetResult
from rlcore.spi.collector import RUN_KINDS, RunKind
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.episode_collector import EpisodeCollector


def test_prompts_with_tools_need_what_reads_calls_before_the_run() -> None:
    shown = Observation(messages=[{"role": "user", "content": "q"}], tools=[{"type": "function", "function": {"name": "f"}}])
    made: Any = EpisodeCollector.__new__(EpisodeCollector)
    made.episodes = SimpleNamespace(reset_all=lambda rows, _: [ResetResult(observation=shown, state=None) for _ in rows])
    made.tool_parser = "parser"
    assert made.observe([{}]) == [shown]
    made.tool_parser = None
    with pytest.raises(ConfigError) as raised:
        made.observe([{}])
    assert [problem.path for problem in raised.value.problems] == ["rollout.tool_parser"]


@pytest.mark.parametrize(
    ("kind", "line"),
    [("episodes", r"'rlcore\[rollout\]'"), ("agents", r"'rlcore\[serve\]'"), ("replay", "rlcore-replay")],
)
def test_a_run_without_its_collector_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, kind: Any, line: str) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-rollout,rlcore-serve,rlcore-replay")
    with pytest.raises(PluginError, match=f"collector.*pip install {line}"):
        collector(kind)


def test_a_recipe_is_refused_without_a_collector_before_its_environment_is_built(
    prepared: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "collector:episodes")
    with pytest.raises(PluginError, match=r"pip install 'rlcore\[rollout\]'"):
        prepared()


def test_a_collector_that_cannot_be_built_closes_the_environment(
    prepared: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    monkeypatch.setattr(EpisodeCollector, "close", lambda self: closed.append(self))
    plan = prepared("rollout.tool_parser=nosuch")
    with pytest.raises(ConfigError, match="tool_parser"):
        build_collector(CollectorContext(plan=plan, tokenizer=FakeTokenizer(), vocab_size=None))
    assert len(closed) == 1


@pytest.mark.parametrize("name", ["FirstTurns", "not_one"])
def test_a_collector_of_higher_priority_takes_the_place_of_the_released_one(
    prepared: Callable[..., RunPlan], installer: Any, name: str
) -> None:
    provider = (
        "from rlcore.spi import CollectorProvider\n"
        f"FIRST_TURNS = CollectorProvider(name='first_turns', spi=(2, 0), priority=80, collector='first_turns:{name}')\n"
    )
    code = (
        "from attrs import evolve\n"
        "from rlcore_rollout.episode_collector import EpisodeCollector\n"
        "class FirstTurns(EpisodeCollector):\n"
        "    def build(self, split, on_tokens, **parts):\n"
        "        made = super().build(split, on_tokens, **parts)\n"
        "        return evolve(made, max_turns=1) if split == 'train' else made\n"
        "def not_one(context):\n"
        "    return 1\n"
    )
    groups = {
        "rlcore.collectors": {"first_turns": "turns_provider:FIRST_TURNS"},
        "rlcore.channels": {"in_process": "rlcore.registry.own_plugins:CHANNEL"},
        "rlcore.renderers": {"jinja_templates": "rlcore_text.provider:JINJA_TEMPLATES"},
    }
    installer.add("acme-turns", groups, turns_provider=provider, first_turns=code)
    context = CollectorContext(plan=prepared("rollout.max_turns=3"), tokenizer=FakeTokenizer(), vocab_size=None)
    if name == "not_one":
        with pytest.raises(PluginError, match="int; expected a Collector"):
            build_collector(context)
        return
    built: Any = build_collector(context)
    others: Any = {"generator": None, "clock": None, "progress": None}
    turns = [built.step_sampler(split, **others).max_turns for split in ("train", "evaluation")]
    built.close()
    assert turns == [1, 3]


@pytest.mark.parametrize("kind", RUN_KINDS)
def test_the_check_of_the_chosen_collector_is_asked(installer: Any, kind: RunKind) -> None:
    code = (
        "from rlcore.spi import CollectorProvider, Note\n"
        "def check(plan):\n"
        "    return [Note(path='acme', text='was asked')]\n"
        "ACME = CollectorProvider(name='acme', spi=(2, 0), priority=90, collector='acme_odd:check', check='acme_odd:check', "
        f"runs={{{kind!r}}})\n"
    )
    installer.add("acme-odd", {"rlcore.collectors": {"acme": "acme_odd:ACME"}}, acme_odd=code)
    schedule = Path("schedule.jsonl") if kind == "replay" else None
    plan: Any = SimpleNamespace(chosen={"environment": None}, runs_agents=kind == "agents", replay_schedule=schedule)
    assert [str(note) for note in collector_problems(plan)] == ["acme: was asked"]


@pytest.mark.parametrize("runs", ["episodes", frozenset(), frozenset({"elsewhere"})])
def test_a_description_of_unknown_runs_is_refused(installer: Any, runs: Any) -> None:
    provider = (
        "from rlcore.spi import CollectorProvider\n"
        f"ODD = CollectorProvider(name='odd', spi=(2, 0), priority=90, collector='odd:Odd', runs={runs!r})\n"
    )
    installer.add("acme-odd", {"rlcore.collectors": {"odd": "odd:ODD"}}, odd=provider + "class Odd: ...\n")
    assert collector("episodes").name == "episodes"
