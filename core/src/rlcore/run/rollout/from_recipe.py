"""Builds, from a recipe, the collector that samples a data set's prompts, and the rules of the schedule."""

from typing import Any

from rlcore.config.data import DatasetConfig, Split
from rlcore.config.recipe import EvaluationConfig, Recipe, RolloutConfig
from rlcore.registry.functions import call_function
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import RolloutCollector, StepCollector
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode_group import Compared
from rlcore.run.rollout.schedule import SchedulePolicy
from rlcore.run.rollout.step_plans import PromptLimit
from rlcore.run.rollout.turns import OnTokens
from rlcore.spi import SamplingParams, Tokenizer, ToolParser
from rlcore.spi.execution import GeneratorGroup


def collector_of(
    recipe: Recipe,
    split: Split,
    generator: GeneratorGroup,
    episodes: EpisodeRunner,
    tokenizer: Tokenizer,
    tool_parser: ToolParser | None,
    clock: PhaseClock,
    progress: Progress,
    *,
    sampling_mask: bool = False,
    on_tokens: OnTokens | None = None,
    compares: Compared = "rewards",
) -> StepCollector[Any]:
    """What samples the prompts of a data set: as the recipe's `[rollout]` says, or for held-out ones its `[evaluation]`. With
    `sampling_mask` the batch says what the generator chose each token among. `on_tokens` is called with the tokens and
    images of each sample that no agent made, as soon as they are all there. `compares` is the algorithm's."""
    trains = split == "train"
    rollout, options = recipe.rollout, recipe.rollout if trains else recipe.evaluation
    data: DatasetConfig = getattr(recipe.data, split)
    parts: dict[str, Any] = {
        "generator": generator,
        "episodes": episodes,
        "tokenizer": tokenizer,
        "tool_parser": tool_parser,
        "sampling": _sampling(rollout, options, tokenizer),
        "samples_per_prompt": options.samples_per_prompt,
        "max_response_tokens": rollout.max_response_tokens,
        "max_failed_fraction": rollout.max_failed_fraction,
        "sampling_mask": sampling_mask,
        "compares": compares,
        "purpose": "the step" if trains else "the evaluation",
        "is_mixed": data.mix is not None,
        "clock": clock,
        "progress": progress,
    }
    if episodes.runs_agents:
        collector: StepCollector[Any] = call_function("agent_collector", rollout, **parts)
        return collector
    return RolloutCollector(
        prompt_limit=_prompt_limit(data, split, rollout),
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        episode_timeout_s=rollout.episode_timeout_s,
        masks_truncated=trains and rollout.on_truncation == "mask",
        history="keep_sampled" if rollout.history == "keep_sampled" else "refuse",
        routed_experts=rollout.replay_routing and trains,
        on_tokens=on_tokens,
        **parts,
    )


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
        on_stale=options.on_stale,
        num_extra=options.extra_prompts,
        # At first the groups of so many steps begin at once.
        max_refills=int(rollout.max_refill_ratio * num_groups * (1 + options.max_staleness))
        if rollout.dynamic_sampling
        else None,
    )
