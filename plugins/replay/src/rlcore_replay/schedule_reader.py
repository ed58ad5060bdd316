"""Reads the schedule.jsonl of a run, and says all that keeps a recipe from repeating it."""

from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config.data import Split
from rlcore.run.plan.collector import CollectorContext, PromptRows
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.train_step.scorers import OnTokens
from rlcore.schema.structure import structure
from rlcore.spi import ConfigError, Problem
from rlcore_replay.replayed_run import ScheduleReplay
from rlcore_replay.rollout_trace import RolloutTrace, wrong_with
from rlcore_rollout.curriculum import Curriculum
from rlcore_rollout.episode_collector import EpisodeCollector
from rlcore_rollout.from_recipe import most_samples, policy_of
from rlcore_rollout.sampler import EpisodeSampler
from rlcore_rollout.schedule_file import RECIPE, parsed_line, recipe_problems, schedule_lines, shortened
from rlcore_rollout.trace_records import StepRecord


class ReplayCollector(EpisodeCollector):
    """Collects the samples of a recorded run once more. ConfigError where its schedule cannot be repeated."""

    replay: ScheduleReplay

    def __init__(self, context: CollectorContext) -> None:
        assert context.plan.replay_schedule is not None, "what this collector is for"
        self.replay = read_replay(context.plan.replay_schedule, context.plan, resume=context.resume)
        super().__init__(context)

    def build(self, split: Split, on_tokens: OnTokens | None, **parts: Any) -> EpisodeSampler:
        """See EpisodeCollector. Evaluations are the recipe's own."""
        made = super().build(split, on_tokens, **parts)
        assert isinstance(made, EpisodeSampler), "as EpisodeCollector makes it"
        return self.replay.sampler(made) if split == "train" else made

    def curriculum(self, prompts: PromptRows) -> Curriculum | None:
        """See EpisodeCollector: with the rows of the recorded run."""
        if (made := super().curriculum(prompts)) is not None:
            steps = self.replay.recorded.steps
            made.recorded = {one.step: (np.array(one.rows, np.int64), one.end) for step in steps for one in step.plans}
        return made


def read_replay(path: Path, plan: RunPlan, *, resume: bool) -> ScheduleReplay:
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
    return ScheduleReplay(RolloutTrace(steps=steps, group_size=most_samples(plan.recipe.rollout)))


def _read(path: Path, plan: RunPlan) -> tuple[list[StepRecord], list[Problem]]:
    """The steps of the plan's run, and what is wrong with them."""
    recipe, records, problems = plan.recipe, dict[str, StepRecord](), list[Problem]()
    num_steps, num_lines = recipe.run.num_steps, 0
    for number, line in enumerate(schedule_lines(path), start=1):
        if num_lines == num_steps:
            break  # what later steps were is of no matter
        where, parsed = f"{path}, line {number}", parsed_line(line) or {}
        if number == 1 or RECIPE in parsed:
            problems += recipe_problems(parsed.get(RECIPE), plan.resolved, where)
            continue
        num_lines += 1
        record, found = structure(parsed, StepRecord, where) if parsed else (None, [_damaged(line, where)])
        problems += found
        if record is not None:
            records[where] = record
    if len(records) == num_lines and not problems:
        places, steps = list(records), list(records.values())
        rollout, groups = recipe.rollout, recipe.training.prompts_per_step
        wrong = wrong_with(steps, groups, most_samples(rollout), rollout.reuse, rollout.samples_per_prompt)
        problems += [Problem(path=places[place], found=found, expected=expected) for place, found, expected in wrong]
    if num_lines < num_steps:
        expected = f"at most {num_lines}, the steps of {path}"
        problems.append(Problem(path="run.num_steps", found=str(num_steps), expected=expected))
    return list(records.values()), problems


def _damaged(line: str, where: str) -> Problem:
    return Problem(path=where, found=shortened(repr(line)), expected="a JSON object, the record of a step")
