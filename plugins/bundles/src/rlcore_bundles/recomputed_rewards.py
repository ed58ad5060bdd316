"""The episodes of a bundle's samples once more: the environment begins and judges them, and recorded answers stand for an
engine. Prompts, what the environment shows and rewards are computed; the run's own collector does it."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
from attrs import evolve, frozen

from rlcore.model_files import config_number
from rlcore.reading import parse_toml
from rlcore.run.data.prompt_stream import RandomPurpose
from rlcore.run.data.text import tokenizers
from rlcore.run.plan.collector import CollectorContext, build_collector
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import EPISODE_IDS
from rlcore.spi.arrays import Float32Array
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.recorded_answers import RecordedAnswers, answers_of
from rlcore_rollout.schedule import Schedule, SchedulePolicy
from rlcore_rollout.step_plans import Draws, StepPlan

NO_LIMIT = 2**30
OWN_LOOP = "the program's own loop made it"


@frozen(kw_only=True, eq=False)
class Rewards:
    """The episodes of a step, computed again."""

    samples: CollectedRollouts
    """The samples. Those of failed episodes have no reward."""
    failures: Mapping[int, str]
    """The cause of each failure, by the sequence's number in the bundle."""

    @property
    def rewards(self) -> Float32Array:
        """float32 [N]: NaN where the environment failed."""
        return np.where(self.samples.failed, np.float32(np.nan), self.samples.rewards).astype(np.float32)

    def remark(self, number: int) -> str:
        """Return the reason why a sample's episode failed, in brackets; "" where it did not."""
        return f" (the environment failed: {self.failures[number]})" if number in self.failures else ""


def reason_to_skip(bundle: Bundle, plan: RunPlan) -> str:
    """Return why the episodes cannot be repeated; "" where they can."""
    if bundle.own_step is not None:
        return OWN_LOOP
    if bundle.prompts != "kept" or not bundle.sampled.rows:
        return f"the bundle's prompts are {bundle.prompts}" if bundle.prompts != "kept" else "the bundle has no rows"
    if plan.environment is None:
        return "the recipe names no environment"
    if plan.recipe.rollout.max_samples_per_prompt is not None:
        return "groups of different numbers of samples are not repeated"
    mix = parse_toml(bundle.recipe)["data"]["train"].get("mix", {})
    if any("environment" in one for one in mix.values()):
        return "data sets with environments of their own are not repeated"
    return ""


def recomputed_rewards(bundle: Bundle, plan: RunPlan) -> Rewards:
    """Run every episode again with its recorded answers. `plan` has a generator, which is not started: its tool parser reads
    the answers."""
    sampled, tokenizer = bundle.sampled, tokenizers().load_tokenizer(plan.recipe.model)
    plan = evolve(plan, recipe=evolve(plan.recipe, rollout=_lenient(plan)))
    num_groups, group_size = len(sampled.rows), plan.recipe.rollout.samples_per_prompt
    vocab_size = tokenizer.vocab_size or config_number(plan.recipe.model.path, "vocab_size")
    answers = RecordedAnswers(
        episodes=answers_of(sampled, num_groups * group_size),
        decoder=tokenizer,
        stop_token_ids=frozenset(tokenizer.stop_token_ids),
        weight_version=sampled.weight_version,
    )
    progress = Progress()
    collector: Any = build_collector(CollectorContext(plan=plan, tokenizer=tokenizer, vocab_size=vocab_size))
    with closing(collector):
        parts = {"generator": answers, "clock": PhaseClock(progress), "progress": progress}
        sampler = collector.step_sampler("train", compares=plan.algorithm.needs.compares, **parts)
        if plan.runs_agents:
            sampler = evolve(sampler, server=_numbered(sampler.server, answers))
        draws = Draws((plan.recipe.run.seed, RandomPurpose.ROLLOUTS, bundle.step), num_groups, group_size)
        draws.reset_seeds = list(sampled.reset_seeds)
        step = StepPlan(rows=sampled.rows, draws=draws)
        run = sampler.run_of(Schedule(SchedulePolicy(groups_per_step=num_groups, num_steps=1)), lambda _: step)
        try:
            again = sampler.collect_step(run, sampled.weight_version)
            reasons = dict(run.failures.reasons)
        finally:
            run.close()
    assert again is not None, "nothing keeps it from going on"
    reasons |= {
        number: f"it asks for {one.num_beyond} turns more than the bundle has"
        for number, one in enumerate(answers.episodes)
        if one.num_beyond
    }
    owners = sampled.batch.sequence_columns.get(EPISODE_IDS, np.arange(sampled.batch.num_sequences)).tolist()
    failures = {number: reasons[owner] for number, owner in enumerate(owners) if owner in reasons}
    return Rewards(samples=again, failures=failures)


def _lenient(plan: RunPlan) -> Any:
    """The options of rollouts in a replay: failures are noted and no prompt is left out."""
    rollout = plan.recipe.rollout
    longest = rollout.max_prompt_tokens if plan.runs_agents else NO_LIMIT  # agents' requests are refused by it
    return evolve(
        rollout,
        on_environment_error="mask",
        max_failed_fraction=1.0,
        episode_timeout_s=None,
        replay_routing=False,
        max_prompt_tokens=longest,
    )


def _numbered(build: Any, answers: RecordedAnswers) -> Any:
    """Builds a session server that notes the episode of each session, which is the last number of its seed."""

    def built(context: Any) -> Any:
        server = build(context)
        begin = server.begin

        def noted(seed: tuple[int, ...]) -> Any:
            session = begin(seed)
            answers.episode_of[session.number] = seed[-1]
            return session

        return _Server(server, noted)

    return built


class _Server:
    """A session server whose sessions are noted."""

    def __init__(self, inner: Any, begin: Any) -> None:
        self.open, self.close, self.begin = inner.open, inner.close, begin
