"""Runs whose schedule is recorded and replayed, with the fakes: the same weights, figures and files, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry

from .conftest import read_metrics  # type: ignore[import-not-found]
from .test_asynchrony import SLOW, CountsSteps, Slow, Watched, ahead, rollouts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

LONG = ("rollout.max_response_tokens=60", "rollout.samples_per_prompt=2")


def weights(directory: Path) -> dict[str, bytes]:
    newest = max((directory / "checkpoints").iterdir())
    return {path.name: path.read_bytes() for path in sorted((newest / "trainer").iterdir())}


def assert_equal(directory: Path, other: Path) -> None:
    assert read_metrics(directory) == read_metrics(other)
    assert weights(directory) == weights(other)
    assert rollouts(directory).equals(rollouts(other))
    assert (directory / "schedule.jsonl").read_bytes().split(b"\n")[1:] == (other / "schedule.jsonl").read_bytes().split(b"\n")[
        1:
    ]


EXTRA = (*SLOW, "async.extra_prompts=4")
REFILLED = ("rollout.refill_equal_rewards=true", "rollout.max_response_tokens=2", "rollout.max_refill_ratio=20")


@pytest.mark.parametrize(
    "options",
    [
        ahead(1, *LONG),
        ahead(3, *LONG),
        ahead(2, *LONG, "async.partial_rollouts=restart"),
        ahead(1, *REFILLED),
        ahead(0, *REFILLED),
    ],
)
def test_a_replay_is_the_run_that_it_is_of(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    run(*options, "run.name=first")
    progress = Watched()
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)


class CountsNotes(CountsSteps):
    """Keeps the notes too."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("on_stale", ["drop", "rescore"])
def test_what_was_slow_is_dropped_or_rescored_again_in_no_time(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, on_stale: str
) -> None:
    """Some answers came after a step's end; the replay's come at once."""
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = (*ahead(0), *EXTRA, f"async.on_stale={on_stale}")
    run(*options, "run.name=first", registry=registry_with(environment=Slow), progress=CountsSteps())
    progress = Watched()
    Slow.steps_done = 10**6
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)
    name = {"drop": "async/groups_dropped", "rescore": "async/tokens_rescored"}[on_stale]
    assert sum(record.get(name, 0.0) for record in read_metrics(again)) > 0
