"""Every option of the recipe arrives where it is read: those of `[rollout]` in training, those of `[evaluation]` beside it."""

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from rlcore.config.asynchrony import AsyncConfig
from rlcore.config.data import DataConfig, DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice
from rlcore.config.recipe import EvaluationConfig, Recipe, RolloutConfig, TrainingConfig
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.episode_collector import EpisodeCollector
from rlcore_rollout.from_recipe import policy_of
from rlcore_rollout.sampler import EpisodeSampler, StepSampler

ROLLOUT = RolloutConfig(
    samples_per_prompt=3,
    max_prompt_tokens=5,
    max_response_tokens=7,
    temperature=0.5,
    top_k=11,
    top_p=0.75,
    stop_strings=("!",),
    stop_token_ids=(2, 4),
    max_turns=6,
    max_turn_tokens=9,
    history="keep_sampled",
    on_truncation="mask",
    max_failed_fraction=0.25,
    replay_routing=True,
    episode_timeout_s=8.0,
    dynamic_sampling=True,
    max_refill_ratio=2.5,
)
RECIPE = Recipe(
    model=ModelConfig(path="model"),
    algorithm=NamedPluginChoice(name="algorithm"),
    environment=NamedPluginChoice(name="environment"),
    data=DataConfig(train=DatasetConfig(max_prompt_tokens=4), evaluation=DatasetConfig(on_long_prompt="drop")),
    rollout=ROLLOUT,
    evaluation=EvaluationConfig(samples_per_prompt=2, temperature=0.25, top_k=1, top_p=0.5),
    training=TrainingConfig(prompts_per_step=10),
    async_=AsyncConfig(max_staleness=1, on_stale="drop", extra_prompts=3),
)


def collected(split: Any, recipe: Recipe = RECIPE, *, agents: bool = False) -> StepSampler[Any]:
    kind = pytest.importorskip("rlcore_serve.agents.collector").AgentCollector if agents else EpisodeCollector
    made = kind.__new__(kind)
    made.plan, made.episodes, made.tokenizer, made.tool_parser = SimpleNamespace(recipe=recipe), None, FakeTokenizer(), "parser"
    others: Any = {"generator": None, "clock": None, "progress": None}
    return made.step_sampler(split, sampling_mask=True, compares="turn_rewards", **others)


def sampling(sampler: StepSampler[Any]) -> tuple[Any, ...]:
    """Of the parameters, the samples of a prompt and their tokens."""
    options = sampler.sampling
    told = (options.temperature, options.top_k, options.top_p, options.stop_token_ids, options.stop_strings)
    return *told, sampler.samples_per_prompt, sampler.max_response_tokens, sampler.sampling_mask


def test_training_follows_the_rollouts_section_and_evaluation_its_own() -> None:
    train, held_out = collected("train"), collected("evaluation")
    assert sampling(train) == (0.5, 11, 0.75, (2, 4), ("!",), 3, 7, True)
    assert sampling(held_out) == (0.25, 1, 0.5, (2, 4), ("!",), 2, 7, True)
    assert isinstance(train, EpisodeSampler)
    assert isinstance(held_out, EpisodeSampler)
    for one in (train, held_out):
        assert (one.max_turns, one.max_turn_tokens, one.episode_timeout_s, one.history) == (6, 9, 8.0, "keep_sampled")
        assert (one.max_failed_fraction, one.tool_parser, one.is_mixed) == (0.25, "parser", False)
    assert train.compares == "turn_rewards"
    assert (train.masks_truncated, train.routed_experts, train.purpose) == (True, True, "the step")
    assert (held_out.masks_truncated, held_out.routed_experts, held_out.purpose) == (False, False, "the evaluation")


def test_each_split_has_its_limit_of_prompts() -> None:
    train, held_out = collected("train"), collected("evaluation")
    assert isinstance(train, EpisodeSampler)
    assert isinstance(held_out, EpisodeSampler)
    assert (train.prompt_limit.max_tokens, train.prompt_limit.drops) == (4, False)
    assert train.prompt_limit.option == "data.train.max_prompt_tokens"
    assert (held_out.prompt_limit.max_tokens, held_out.prompt_limit.drops) == (5, True)
    assert held_out.prompt_limit.option == "rollout.max_prompt_tokens"


def test_the_tokenizer_says_where_samples_stop_unless_the_recipe_does() -> None:
    recipe = evolve(RECIPE, rollout=evolve(ROLLOUT, stop_token_ids=None))
    assert collected("train", recipe).sampling.stop_token_ids == FakeTokenizer().stop_token_ids


def test_agents_sample_by_the_same_options() -> None:
    agents = pytest.importorskip("rlcore_serve.agents.collector", reason="agents need a server")
    found = collected("train", evolve(RECIPE, rollout=evolve(ROLLOUT, history="segment")), agents=True)
    assert isinstance(found, agents.AgentSampler)
    assert sampling(found) == sampling(collected("train"))
    assert found.compares == "turn_rewards"
    assert (found.history, found.max_sequence_length, found.max_failed_fraction) == ("segment", 12, 0.25)


@pytest.mark.parametrize(("refills", "most"), [(True, 50), (False, None)])
def test_the_schedule_has_the_rules_of_the_recipe(refills: bool, most: int | None) -> None:
    policy = policy_of(evolve(RECIPE, rollout=evolve(ROLLOUT, dynamic_sampling=refills)))
    assert (policy.groups_per_step, policy.num_steps) == (10, RECIPE.run.num_steps)
    assert (policy.max_staleness, policy.on_stale, policy.num_extra, policy.max_refills) == (1, "drop", 3, most)
