"""Runs ahead of training whose episodes have several segments: replayed, and killed and resumed, they are the same."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.spi import Message, Observation, ResetResult, Row, StepResult, Turn
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.tokenizer import FakeTokenizer

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from ..rollout.test_asynchrony import Killed, Watched, ahead, prompts, rollouts  # type: ignore[import-not-found]
from .test_replayed_runs import assert_equal, steps  # type: ignore[import-not-found]

pytest.importorskip("rlcore_replay", reason="replays are of another package")
Run = Callable[..., dict[str, Any]]
OPTIONS = (
    "checkpoint.every_n_steps=1",
    "environment.fake.num_turns=3",
    "evaluation.at_end=false",
    "evaluation.at_start=false",
    "evaluation.every_n_steps=0",
    "logging.rollouts_every_n_steps=1",
    "rollout.max_prompt_tokens=80",
    "rollout.max_response_tokens=200",
    "rollout.max_turn_tokens=12",
    "rollout.max_turns=3",
    "rollout.samples_per_prompt=2",
    "run.num_steps=4",
)


class Chatting(FakeEnvironment):
    """The fake environment with messages."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        message = {"role": "user", "content": row["prompt"]}
        return ResetResult(observation=Observation(messages=[message]), state=0)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        result = await super().step(state, turn)
        answer = Observation(messages=[{"role": "user", "content": "again"}])
        return result if result.done else evolve(result, observation=answer)


@pytest.fixture
def registry(registry_with: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Fakes whose chat template shows the last two letters of an answer once a user has answered it."""

    def render(self: FakeTokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        shown = [message["content"][-2:] if message["role"] == "assistant" else message["content"] for message in messages[:-1]]
        contents = [*shown, *(message["content"] for message in messages[-1:])]
        return "".join(f"{message['role']}: {content}\n" for message, content in zip(messages, contents, strict=True))

    monkeypatch.setattr(FakeTokenizer, "render_answered", render)
    return registry_with(environment=Chatting)


def segments(directory: Path) -> float:
    return max(record.get("environment/segments_per_episode", 0.0) for record in read_metrics(directory))


@pytest.mark.parametrize("options", [ahead(1), ahead(3), ahead(2, "async.partial_rollouts=restart")])
def test_a_replay_has_the_same_segments(run: Run, registry: Registry, tmp_path: Path, options: tuple[str, ...]) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    run(*options, *OPTIONS, "run.name=first", registry=registry)
    progress = Watched()
    replay = {"replay_schedule": first / "schedule.jsonl", "progress": progress}
    run(*options, *OPTIONS, "run.name=again", registry=registry, **replay)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)
    assert segments(first) > 1
    assert '"segments":[' in "".join(steps(first))
    table = rollouts(first)
    assert (table.groupby(["step", "episode"])["reward"].nunique() == 1).all()
    assert table.groupby(["step", "episode"]).size().max() > 1


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_resumed_run_trains_on_each_episode_once(run: Run, registry: Registry, tmp_path: Path, staleness: int) -> None:
    options = (*ahead(staleness), *OPTIONS)
    with pytest.raises(Killed):
        run(*options, registry=registry, progress=Watched(2, kills=True))
    run(*options, registry=registry, resume=True)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}
    assert segments(tmp_path / "runs" / "run") > 1
