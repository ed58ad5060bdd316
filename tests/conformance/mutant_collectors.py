"""Collectors that are each wrong in one known way, made from the one of rlcore-rollout."""

import os

from attrs import evolve
from mutants import killed_by

from rlcore.spi import SPI_VERSION, CollectorProvider
from rlcore_rollout.episode_collector import EpisodeCollector


class Episodes(EpisodeCollector):
    """A right one."""


PROVIDER = CollectorProvider(name="mutant", spi=SPI_VERSION, collector=f"{__name__}:Episodes")


@killed_by("test_steps_have_their_samples")
class AsksOneRowLess(Episodes):
    def source(self, prompts, loop):
        number = prompts.order.batch_size - 1
        training = evolve(self.plan.recipe.training, prompts_per_step=number)
        self.plan = evolve(self.plan, recipe=evolve(self.plan.recipe, training=training))
        return super().source(evolve(prompts, order=evolve(prompts.order, batch_size=number)), loop)


def changed(collector, prompts, loop, change):
    """The source of a collector, whose samples are changed."""
    source = EpisodeCollector.source(collector, prompts, loop)
    sample = source.sample
    source.sample = lambda *arguments, **named: change(sample(*arguments, **named))
    return source


def with_column(samples, name, change):
    batch = samples.batch
    return evolve(samples, batch=batch.with_token_column(name, change(batch.token_columns[name])))


@killed_by("test_tokens_are_the_policys")
class NamesTheWeightsBefore(Episodes):
    def source(self, prompts, loop):
        return changed(self, prompts, loop, lambda found: with_column(found, "weight_versions", lambda one: one.clip(max=0)))


@killed_by("test_rewards_are_the_environments")
class HalvesRewards(Episodes):
    def source(self, prompts, loop):
        return changed(self, prompts, loop, lambda found: evolve(found, rewards=found.rewards / 2))


@killed_by("test_the_same_run_has_the_same_samples")
class TakesRowsAtRandom(Episodes):
    def source(self, prompts, loop):
        seed = int.from_bytes(os.urandom(4))
        return super().source(evolve(prompts, order=evolve(prompts.order, seed=seed)), loop)


@killed_by("test_a_resumed_run_is_one_that_went_on")
class BeginsAnew(Episodes):
    def source(self, prompts, loop):
        source = super().source(prompts, loop)
        sample, begun = source.sample, []

        def sampled(step, *arguments, **named):
            begun.append(step)
            return sample(len(begun), *arguments, **named)

        source.sample = sampled
        return source


@killed_by("test_held_out_rows_are_measured")
class MeasuresNothing(Episodes):
    def observers(self, source, held_out, loop):
        return super().observers(source, None, loop)


@killed_by("test_the_environment_is_closed")
class LeavesTheEnvironmentOpen(Episodes):
    def close(self):
        self.plan.environment.__class__.close = lambda environment: None
        super().close()
