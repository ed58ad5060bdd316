"""schedule.jsonl: what a replay has to know of a run, a line a step behind one with the recipe."""

import json
from collections.abc import Iterator, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from rlcore.files import storage_errors, write_atomically
from rlcore.reading import parse_json, read_bytes
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.rollout.from_recipe import policy_of
from rlcore.run.rollout.rollout_trace import RolloutTrace, StepRecord, wrong_with
from rlcore.run.storage.recipe_changes import Change, recipe_changes
from rlcore.schema.structure import structure
from rlcore.spi import ConfigError, Problem

RECIPE = "recipe"
"""The key of a line that holds the recipe, as TOML, of the steps behind it."""
REPLAYED = (
    "run.seed",
    "model.chat_template",
    "model.chat_template_kwargs",
    "environment",
    "data.train",
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
    elif any(True for text in _recipes(path)[-1:] for _ in _recipe_problems(text, plan.resolved, "")):
        _append(path, line)


def append_step(path: Path, record: StepRecord) -> None:
    """Write the line of a step, which is on disk when this returns. Raises StorageError where it cannot be written."""
    _append(path, json.dumps(record.as_json(), separators=(",", ":")) + "\n")


def rewind_schedule(path: Path, step: int) -> None:
    """Forget the steps behind this one, and what a crash left of a line. What is damaged stays: only a replay reads it."""
    if lexists(path):
        write_atomically(path, "".join(f"{line}\n" for line in _lines(path) if _step_of(line) <= step))


def read_replay(path: Path, plan: RunPlan, *, resume: bool) -> RolloutTrace:
    """The steps of a recipe's run. ConfigError with all that keeps them from being replayed: what is wrong with the file, what
    the recipe has otherwise, and a run that is to be resumed."""
    problems = []
    if resume:
        expected = "one of the two: a replay begins anew, in a directory of its own"
        problems.append(Problem(path="--replay-schedule", found="--resume beside it", expected=expected))
    if policy_of(plan.recipe).is_synchronous:
        problems.append(
            Problem(
                path="async",
                found="a synchronous recipe, each step of which samples with its own weights",
                expected="one whose generation runs ahead, such as async.max_staleness = 1",
                remedy="There is nothing to replay: a run of it without --replay-schedule is the same each time.",
            )
        )
        raise ConfigError(problems)
    if plan.recipe.data.zero_variance_weight != 1.0:
        expected = "1.0: which prompts come then follows from when samples ended, which no schedule says"
        weight = f"{plan.recipe.data.zero_variance_weight:g}"
        problems.append(Problem(path="data.zero_variance_weight", found=weight, expected=expected))
        raise ConfigError(problems)
    if plan.recipe.data.curriculum_threshold is not None:
        expected = "no such key: which prompts come then follows from when samples ended, which no schedule says"
        problems.append(
            Problem(path="data.curriculum_threshold", found=f"{plan.recipe.data.curriculum_threshold:g}", expected=expected)
        )
        raise ConfigError(problems)
    if plan.runs_agents:
        expected = "one whose answers follow from the turns of the policy: what an agent asks, and when, no schedule repeats"
        problems.append(Problem(path="environment", found="one whose agents run the episodes", expected=expected))
        raise ConfigError(problems)
    if not path.is_file():
        problems.append(Problem(path=str(path), found="no such file", expected="the schedule.jsonl of a run"))
        raise ConfigError(problems)
    steps, found = _read(path, plan)
    if problems := [*problems, *found]:
        raise ConfigError(problems)
    return RolloutTrace(steps=steps, group_size=plan.recipe.rollout.samples_per_prompt)


def _read(path: Path, plan: RunPlan) -> tuple[list[StepRecord], list[Problem]]:
    """The steps of the plan's run, and what is wrong with them."""
    recipe, records, problems = plan.recipe, dict[str, StepRecord](), list[Problem]()
    num_steps, num_lines = recipe.run.num_steps, 0
    for number, line in enumerate(_lines(path), start=1):
        if num_lines == num_steps:
            break  # what later steps were is of no matter
        where, parsed = f"{path}, line {number}", _parse(line) or {}
        if number == 1 or RECIPE in parsed:
            problems += _recipe_problems(parsed.get(RECIPE), plan.resolved, where)
            continue
        num_lines += 1
        record, found = structure(parsed, StepRecord, where) if parsed else (None, [_damaged(line, where)])
        problems += found
        if record is not None:
            records[where] = record
    if len(records) == num_lines and not problems:
        places, steps = list(records), list(records.values())
        wrong = wrong_with(steps, recipe.training.prompts_per_step, recipe.rollout.samples_per_prompt)
        problems += [Problem(path=places[place], found=found, expected=expected) for place, found, expected in wrong]
    if num_lines < num_steps:
        expected = f"at most {num_lines}, the steps of {path}"
        problems.append(Problem(path="run.num_steps", found=str(num_steps), expected=expected))
    return list(records.values()), problems


def _recipe_problems(text: object, resolved: str, where: str) -> Iterator[Problem]:
    """What keeps a recipe from being replayed by the schedule of another, a line of its file."""
    try:
        changes = _changes(str(text), resolved)
    except ValueError:
        changes = None
    if changes is None or not isinstance(text, str):
        yield Problem(path=where, found=_shortened(repr(text)), expected=f"the run's recipe as TOML, under {RECIPE!r}")
        return
    for change in changes:
        yield Problem(path=change.key, found=change.after, expected=f"{change.before}, as in {where}")


def _damaged(line: str, where: str) -> Problem:
    return Problem(path=where, found=_shortened(repr(line)), expected="a JSON object, the record of a step")


def _append(path: Path, line: str) -> None:
    with storage_errors(path.name, path.parent), path.open("a") as file:
        file.write(line)


def _lines(path: Path) -> list[str]:
    """All lines; what a crash left of the last one is none."""
    text = read_bytes(path).decode(errors="backslashreplace")
    *lines, rest = text.split("\n")
    return lines if _parse(rest) is None else [*lines, rest]


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        parsed = parse_json(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _step_of(line: str) -> int:
    step = (_parse(line) or {}).get("step", 0)
    return step if isinstance(step, int) else 0


def _recipes(path: Path) -> list[object]:
    return [parsed[RECIPE] for line in _lines(path) if (parsed := _parse(line)) is not None and RECIPE in parsed]


def _changes(before: str, after: str) -> list[Change]:
    """What of a schedule's recipe another has otherwise; ValueError where `before` is no TOML."""
    return [change for change in recipe_changes(before, after) if change.is_of(REPLAYED)]


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
