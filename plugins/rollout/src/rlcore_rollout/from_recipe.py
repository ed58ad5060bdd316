"""Reads, from a recipe, the options of the sampler of a data set's prompts, and the rules of the schedule."""

from typing import Any

from rlcore.config.data import DatasetConfig, Split
from rlcore.config.recipe import EvaluationConfig, Recipe, RolloutConfig
from rlcore.spi import SamplingParams, Tokenizer
from rlcore_rollout.schedule import SchedulePolicy
from rlcore_rollout.step_plans import PromptLimit


def step_options(recipe: Recipe, split: Split, tokenizer: Tokenizer) -> dict[str, Any]:
    """The options of every StepSampler: as the recipe's `[rollout]` says, or for held-out prompts its `[evaluation]`."""
    trains = split == "train"
    rollout, options = recipe.rollout, recipe.rollout if trains else recipe.evaluation
    data: DatasetConfig = getattr(recipe.data, split)
    return {
        "sampling": _sampling(rollout, options, tokenizer),
        "samples_per_prompt": most_samples(rollout) if trains else options.samples_per_prompt,
        "max_response_tokens": rollout.max_response_tokens,
        "max_failed_fraction": rollout.max_failed_fraction,
        "purpose": "the step" if trains else "the evaluation",
        "is_mixed": data.mix is not None,
    }


def episode_options(recipe: Recipe, split: Split) -> dict[str, Any]:
    """The options of an EpisodeSampler besides those."""
    rollout, trains = recipe.rollout, split == "train"
    return {
        "round_size": rollout.samples_per_prompt if trains and rollout.max_samples_per_prompt else None,
        "prompt_limit": _prompt_limit(getattr(recipe.data, split), split, rollout),
        "max_turns": rollout.max_turns,
        "max_turn_tokens": rollout.max_turn_tokens,
        "episode_timeout_s": rollout.episode_timeout_s,
        "masks_truncated": trains and rollout.on_truncation == "mask",
        "history": rollout.history,
        "routed_experts": rollout.replay_routing and trains,
    }


def most_samples(rollout: RolloutConfig) -> int:
    """Most samples of a prompt that is trained on."""
    return rollout.max_samples_per_prompt or rollout.samples_per_prompt


def _prompt_limit(data: DatasetConfig, split: Split, rollout: RolloutConfig) -> PromptLimit:
    return PromptLimit(
        max_tokens=data.max_prompt_tokens or rollout.max_prompt_tokens,
        drops=data.on_long_prompt == "drop",
        key=f"data.{split}",
        option="rollout.max_prompt_tokens" if data.max_prompt_tokens is None else f"data.{split}.max_prompt_tokens",
    )


def _sampling(rollout: RolloutConfig, options: RolloutConfig | EvaluationConfig, tokenizer: Tokenizer) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token_ids=tokenizer.stop_token_ids if rollout.stop_token_ids is None else rollout.stop_token_ids,
        stop_strings=rollout.stop_strings,
    )


def policy_of(recipe: Recipe) -> SchedulePolicy:
    """The rules of a recipe's schedule."""
    num_groups, rollout, options = recipe.training.prompts_per_step, recipe.rollout, recipe.async_
    return SchedulePolicy(
        groups_per_step=num_groups,
        num_steps=recipe.run.num_steps,
        max_staleness=options.max_staleness,
        reuse=rollout.reuse,
        on_stale=options.on_stale,
        num_extra=options.extra_prompts,
        # At first the groups of so many steps begin at once.
        max_refills=int(rollout.max_refill_ratio * num_groups * (1 + options.max_staleness))
        if rollout.dynamic_sampling
        else None,
    )
