"""schedule.jsonl: what a replay has to know of a run, a line a step behind one with the recipe."""

import json
from collections.abc import Iterator, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from rlcore.files import storage_errors, write_atomically
from rlcore.reading import parse_json, read_bytes
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.storage.recipe_changes import Change, recipe_changes
from rlcore.spi import Problem
from rlcore_rollout.from_recipe import policy_of
from rlcore_rollout.trace_records import StepRecord

RECIPE = "recipe"
"""The key of a line that holds the recipe, as TOML, of the steps behind it."""
REPLAYED = (
    "run.seed",
    "model.chat_template",
    "model.chat_template_kwargs",
    "environment",
    "data.train",
    *("data.zero_variance_weight", "data.prompt_weights", "data.curriculum_threshold", "data.level_window"),
    "rollout",
    "async",
    "training.prompts_per_step",
)
"""Keys, and sections, that a schedule is of: which samples there are, and when."""
MAX_SHOWN = 60


def begin_schedule(path: Path, plan: RunPlan, step: int) -> None:
    """Begin the file of a run, or go on with it behind a step; nothing where samples follow from their step alone, or no
    replay could repeat them."""
    if policy_of(plan.recipe).is_synchronous or plan.runs_agents:
        return
    line = json.dumps({RECIPE: plan.resolved}) + "\n"
    if step == 0 or not lexists(path):
        write_atomically(path, line)
    elif any(True for text in _recipes(path)[-1:] for _ in recipe_problems(text, plan.resolved, "")):
        _append(path, line)


def append_step(path: Path, record: StepRecord) -> None:
    """Write the line of a step, which is on disk when this returns. Raises StorageError where it cannot be written."""
    _append(path, json.dumps(record.as_json(), separators=(",", ":")) + "\n")


def rewind_schedule(path: Path, step: int) -> None:
    """Forget the steps behind this one, and what a crash left of a line. What is damaged stays: only a replay reads it."""
    if lexists(path):
        write_atomically(path, "".join(f"{line}\n" for line in schedule_lines(path) if _step_of(line) <= step))


def recipe_problems(text: object, resolved: str, where: str) -> Iterator[Problem]:
    """Yield the problems that keep a recipe from being replayed by the schedule of another, a line of its file."""
    try:
        changes = _changes(str(text), resolved)
    except ValueError:
        changes = None
    if changes is None or not isinstance(text, str):
        yield Problem(path=where, found=shortened(repr(text)), expected=f"the run's recipe as TOML, under {RECIPE!r}")
        return
    for change in changes:
        yield Problem(path=change.key, found=change.after, expected=f"{change.before}, as in {where}")


def _append(path: Path, line: str) -> None:
    with storage_errors(path.name, path.parent), path.open("a") as file:
        file.write(line)


def schedule_lines(path: Path) -> list[str]:
    """All lines; what a crash left of the last one is none."""
    text = read_bytes(path).decode(errors="backslashreplace")
    *lines, rest = text.split("\n")
    return lines if parsed_line(rest) is None else [*lines, rest]


def parsed_line(line: str) -> Mapping[str, Any] | None:
    """Return the JSON object of a line; None where it is none."""
    try:
        parsed = parse_json(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _step_of(line: str) -> int:
    step = (parsed_line(line) or {}).get("step", 0)
    return step if isinstance(step, int) else 0


def _recipes(path: Path) -> list[object]:
    return [parsed[RECIPE] for line in schedule_lines(path) if (parsed := parsed_line(line)) is not None and RECIPE in parsed]


def _changes(before: str, after: str) -> list[Change]:
    """Return the differences between a schedule's recipe and another; ValueError where `before` is no TOML."""
    return [change for change in recipe_changes(before, after) if change.is_of(REPLAYED)]


def shortened(text: str) -> str:
    """Return the beginning of a text that is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
