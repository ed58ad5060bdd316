"""What a run says of a schedule that it is too short for."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.spi import CheckContext, Note
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

Run = Callable[..., dict[str, Any]]
RUN = "the run makes 12 optimizer steps (run.num_steps · updates of a step)"


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ((), []),
        (("warmup_steps=12",), []),
        (("warmup_steps=11", "decay=linear", "min_learning_rate_ratio=1.0"), []),
        (("warmup_steps=48",), [f"schedule.warmup_steps: 48, while {RUN}: 25% of the learning rate is all that it reaches"]),
        (
            ("warmup_steps=13", "decay=cosine"),
            [
                f"schedule.warmup_steps: 13, while {RUN}: 92.3% of the learning rate is all that it reaches, and the cosine "
                "decay never begins"
            ],
        ),
        (
            ("warmup_steps=12", "decay=linear"),
            [f'schedule.decay: "linear" never begins: the warm-up takes 12 steps, and {RUN}'],
        ),
    ],
)
def test_what_comes_to_nothing_is_told_with_both_numbers(
    prepared: Callable[..., RunPlan], options: tuple[str, ...], notes: list[str]
) -> None:
    plan = prepared(*(f"schedule.{option}" for option in options))
    assert [note for note in plan.notes if note.startswith("schedule.")] == notes


def test_a_critics_first_steps_are_none_of_the_policys(prepared: Callable[..., RunPlan]) -> None:
    plan = prepared("schedule.warmup_steps=11", "critic.warmup_steps=1", "algorithm.fake.critic=true")
    run = "the run makes 10 optimizer steps (run.num_steps · updates of a step, less critic.warmup_steps)"
    assert [note for note in plan.notes if note.startswith("schedule.")] == [
        f"schedule.warmup_steps: 11, while {run}: 90.9% of the learning rate is all that it reaches"
    ]


def test_the_rate_is_what_the_note_says_and_a_longer_continuation_reaches_it(run: Run) -> None:
    def told(*options: str, resume: bool = False) -> list[str]:
        notes: list[str] = []
        progress = Progress()
        progress.note = notes.append  # type: ignore[method-assign]
        run("schedule.warmup_steps=20", *options, progress=progress, resume=resume, allow_changes=resume)
        return [note for note in notes if note.startswith("schedule.")]

    (note,) = told("run.num_steps=5")
    assert "20, while the run makes 10 optimizer steps" in note
    assert "50% of the learning rate" in note
    assert told("run.num_steps=10", resume=True) == []


def has_own_schedule(_context: CheckContext, _config: object) -> list[Note]:
    """The check of a trainer whose options replace the schedule."""
    return [Note(path="schedule", text="the trainer's own takes its place")]


def test_nothing_is_said_of_a_schedule_that_the_trainer_replaces(
    prepared: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own_schedule", SimpleNamespace(check=has_own_schedule))
    trainer = evolve(FAKE_TRAINER, check="own_schedule:check")
    registry = Registry.from_providers(
        {"trainer": [trainer], "generator": [FAKE_GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [FAKE_ENVIRONMENT]}
    )
    plan = prepared("schedule.warmup_steps=48", registry=registry)
    assert [note for note in plan.notes if note.startswith("schedule")] == ["schedule: the trainer's own takes its place"]
