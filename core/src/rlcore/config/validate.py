"""Checks combinations of keys that cannot work, or would have no effect."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from attrs import frozen

from rlcore.config.asynchrony import AsyncConfig
from rlcore.config.data_problems import mix_problems, source_problems
from rlcore.config.model import CriticConfig
from rlcore.config.recipe import EvaluationConfig, Recipe
from rlcore.schema import describe
from rlcore.schema.file_limits import expanded
from rlcore.spi import Problem

_MOST_SAMPLES = 2**24
"""Most samples of a step: the driver holds some hundred bytes of each before the first is generated."""
_LEAST_TEMPERATURE = 1e-5
"""The least temperature of inference engines, besides 0."""
Check: TypeAlias = Callable[[Recipe], Iterator[Problem]]


@frozen
class Rule:
    """One check and the keys it reads."""

    keys: tuple[str, ...]
    check: Check

    def reads_any(self, broken: Sequence[str]) -> bool:
        """Return whether a key is, contains or lies below one of `broken`."""
        return any(
            f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for key in self.keys for other in broken
        )


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Check], Check]:
    """Registers a check that reads `keys`."""

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check))
        return check

    return register


def value_at(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key; None where a table on the way is None."""
    value: Any = recipe
    for part in key.split("."):
        section: Any = type(value)
        value = None if value is None else getattr(value, describe.fields(section)[part].name)
    return value


def find_problems(recipe: Recipe, broken: Sequence[str] = ()) -> list[Problem]:
    """Find every rule that the recipe breaks. Rules that read a key in `broken`, or below one, are left out."""
    return [problem for rule in RULES if not rule.reads_any(broken) for problem in rule.check(recipe)]


@rule("training.minibatches_per_step", "training.prompts_per_step")
def _updates(recipe: Recipe) -> Iterator[Problem]:
    training = recipe.training
    if training.minibatches_per_step > training.prompts_per_step >= 1:
        yield Problem(
            path="training.minibatches_per_step",
            found=f"{training.minibatches_per_step}, with {training.prompts_per_step} prompts in a step",
            expected="at most training.prompts_per_step",
            remedy="Each update trains on whole groups, so on one prompt at least.",
        )


@rule("training.prompts_per_step", "rollout.samples_per_prompt", "async.extra_prompts")
def _samples_of_a_step(recipe: Recipe) -> Iterator[Problem]:
    counts = {
        "training.prompts_per_step": recipe.training.prompts_per_step,
        "rollout.samples_per_prompt": recipe.rollout.samples_per_prompt,
        "async.extra_prompts": recipe.async_.extra_prompts,
    }
    prompts, samples, extra = counts.values()
    if (prompts + extra) * samples > _MOST_SAMPLES:
        largest = max(counts, key=lambda key: counts[key])
        yield Problem(path=largest, found=f"{counts[largest]}", expected=f"at most {_MOST_SAMPLES:,} samples in a step")


@rule("run.directory", "run.name")
def _place_of_the_run(recipe: Recipe) -> Iterator[Problem]:
    path = expanded(recipe.run.directory) / recipe.run.name
    nearest = next(one for one in (path, *path.parents) if os.path.lexists(one) or one == one.parent)
    if os.path.lexists(nearest) and not nearest.is_dir():
        yield Problem(
            path="run.directory", found=f"{nearest}, which is no folder", expected="a folder, or one that can be made"
        )


@rule("rollout.temperature", "evaluation.temperature")
def _temperatures(recipe: Recipe) -> Iterator[Problem]:
    for key, value in (("rollout", recipe.rollout.temperature), ("evaluation", recipe.evaluation.temperature)):
        if 0 < value < _LEAST_TEMPERATURE:
            expected = f"at least {_LEAST_TEMPERATURE:g}: logits that are divided by less are infinite"
            remedy = "" if key == "rollout" else "0 takes the most probable token."
            yield Problem(path=f"{key}.temperature", found=f"{value:g}", expected=expected, remedy=remedy)


@rule("lora", "checkpoint.export", "refit.adapters")
def _no_adapters(recipe: Recipe) -> Iterator[Problem]:
    for path, value, others in (("checkpoint.export", "peft", '"hf" or "none"'), ("refit.adapters", "unmerged", '"auto"')):
        if recipe.lora is None and value_at(recipe, path) == value:
            expected, remedy = f"{others}: there are no adapters", f"Write [lora], or set {path} to {others}."
            yield Problem(path=path, found=f'"{value}", without a [lora]', expected=expected, remedy=remedy)


@rule("refit.adapters", "refit.max_adapters")
def _several_adapters(recipe: Recipe) -> Iterator[Problem]:
    refit = recipe.refit
    if refit.max_adapters > 1 and refit.adapters != "unmerged":
        yield Problem(
            path="refit.max_adapters",
            found=f'{refit.max_adapters}, with refit.adapters = "{refit.adapters}"',
            expected="1: the generator holds several adapters only beside weights without them",
            remedy='Set refit.adapters to "unmerged".',
        )


@rule("checkpoint")
def _nothing_to_upload(recipe: Recipe) -> Iterator[Problem]:
    checkpoint = recipe.checkpoint
    if checkpoint.push_to_hub is not None and checkpoint.export == "none":
        yield Problem(
            path="checkpoint.push_to_hub",
            found=f'{describe.toml_literal(checkpoint.push_to_hub)}, with export = "none"',
            expected="something that is exported",
            remedy='Set checkpoint.export to "hf", or to "peft" for adapters alone.',
        )


@rule("schedule.decay", "schedule.min_learning_rate_ratio")
def _end_of_no_decay(recipe: Recipe) -> Iterator[Problem]:
    schedule = recipe.schedule
    if schedule.decay == "constant" and 0 < schedule.min_learning_rate_ratio <= 1:
        yield Problem(
            path="schedule.min_learning_rate_ratio",
            found=f'{schedule.min_learning_rate_ratio}, with decay = "constant"',
            expected="0.0, since nothing decays",
            remedy='Set schedule.decay to "linear" or "cosine".',
        )


@rule("optimizer", "critic", "lora")
def _methods(recipe: Recipe) -> Iterator[Problem]:
    """Settings of Muon where nothing trains with it, and Muon of adapters, whose factors are no matrices of the checkpoint."""
    spec, own = recipe.optimizer, recipe.critic or CriticConfig()
    critic = own.optimizer(spec)
    if spec.name == "muon" and recipe.lora is not None:
        yield Problem(path="optimizer.name", found='"muon", with [lora]', expected='"adamw": adapters train with AdamW')
    if spec.muon is not None and "muon" not in (spec.name, critic.name):
        yield Problem(path="optimizer.muon", found='the table, with name = "adamw"', expected='optimizer.name = "muon"')
    of_both = (spec.name, critic.name if own.groups is None else spec.name)
    for section, groups, names in (("optimizer", spec.groups, of_both), ("critic", own.groups or (), (critic.name,))):
        for path in (f"{section}.groups[{number}].name" for number, group in enumerate(groups) if group.name is not None):
            if "muon" not in names:
                yield Problem(path=path, found='"adamw", where AdamW trains all', expected="no such key")


@rule("rollout.max_turn_tokens", "rollout.max_response_tokens")
def _turn_within_response(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_response_tokens:
        expected = f"at most rollout.max_response_tokens, which is {rollout.max_response_tokens}"
        yield Problem(path="rollout.max_turn_tokens", found=str(rollout.max_turn_tokens), expected=expected)


@rule("rollout.top_k", "rollout.samples_per_prompt")
def _identical_rollouts(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.top_k == 1 and recipe.rollout.samples_per_prompt > 1:
        yield Problem(
            path="rollout.top_k",
            found=f"1, with {recipe.rollout.samples_per_prompt} samples of each prompt, which would all be the same",
            expected="0 for all tokens, or at least 2",
        )


@rule("rollout.accept_truncation_bias", "rollout.top_k", "rollout.top_p")
def _no_truncation_to_accept(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.accept_truncation_bias and not recipe.rollout.truncates:
        yield Problem(
            path="rollout.accept_truncation_bias",
            found="true, while neither rollout.top_k nor rollout.top_p cuts the distribution",
            expected="false: there is no such bias",
        )


@rule("evaluation.temperature", "evaluation.top_k", "evaluation.samples_per_prompt")
def _identical_evaluation(recipe: Recipe) -> Iterator[Problem]:
    evaluation = recipe.evaluation
    greedy = next(
        (f"{key} = {value}" for key, value in (("temperature", 0.0), ("top_k", 1)) if getattr(evaluation, key) == value), ""
    )
    if greedy and evaluation.samples_per_prompt > 1:
        yield Problem(
            path="evaluation.samples_per_prompt",
            found=f"{evaluation.samples_per_prompt}, with {greedy}, which makes them all the same",
            expected="1, or random sampling",
            remedy="Set evaluation.temperature above 0 and evaluation.top_k to 0, or take one sample.",
        )


@rule("evaluation.temperature", "evaluation.top_k", "evaluation.top_p")
def _cut_of_one_token(recipe: Recipe) -> Iterator[Problem]:
    evaluation = recipe.evaluation
    if evaluation.temperature != 0:
        return
    for key in ("top_k", "top_p"):
        value, whole = getattr(evaluation, key), getattr(EvaluationConfig(), key)
        if value != whole:
            yield Problem(
                path=f"evaluation.{key}",
                found=f"{value}, with temperature = 0.0, which takes the most probable token",
                expected=f"{whole}: nothing is drawn",
                remedy="Set evaluation.temperature above 0, or leave the key out.",
            )


def _data_set(path: str) -> None:
    """Registers the rules on one data set, or several that stand in its place."""

    @rule(*(f"{path}.{key}" for key in ("source", "path", "subset", "split", "mix")))
    def check(recipe: Recipe) -> Iterator[Problem]:
        config = value_at(recipe, path)
        if config is not None and config.mix is None:
            yield from source_problems(path, config)

    @rule(path, "environment")
    def check_mix(recipe: Recipe) -> Iterator[Problem]:
        config = value_at(recipe, path)
        if config is not None and config.mix is not None:
            yield from mix_problems(recipe, path, config)
            for name, part in config.parts().items():
                yield from source_problems(f"{path}.mix.{name}", part)

    @rule(f"{path}.max_prompt_tokens", "rollout.max_prompt_tokens")
    def check_limit(recipe: Recipe) -> Iterator[Problem]:
        config, most = value_at(recipe, path), recipe.rollout.max_prompt_tokens
        if config is not None and config.max_prompt_tokens is not None and config.max_prompt_tokens > most:
            expected = f"at most rollout.max_prompt_tokens, which is {most}"
            yield Problem(path=f"{path}.max_prompt_tokens", found=str(config.max_prompt_tokens), expected=expected)


_data_set("data.train")
_data_set("data.evaluation")


@rule("environment", "data.train.source", "data.evaluation")
def _environment_needed(recipe: Recipe) -> Iterator[Problem]:
    if recipe.environment is not None:
        return
    if recipe.data.train.mix is None and recipe.data.train.source == "environment":
        yield Problem(
            path="data.train.source",
            found='"environment", without an [environment]',
            expected="an environment, or a data set with demonstrations",
            remedy="Set environment.name, or data.train.source and data.train.path.",
        )
    held_out = recipe.data.evaluation
    if held_out is not None and held_out.mix is None and held_out.source == "environment":
        yield Problem(
            path="data.evaluation",
            found="a held-out set of the environment's rows, without an [environment]",
            expected="an environment, which judges the answers, or a data set to be measured on",
            remedy="Set environment.name, or data.evaluation.source and data.evaluation.path, or leave out [data.evaluation].",
        )


@rule("data.evaluation", "evaluation.every_n_steps", "data.on_overlap")
def _held_out_needed(recipe: Recipe) -> Iterator[Problem]:
    for path, default in (("evaluation.every_n_steps", 0), ("data.on_overlap", "note")):
        if recipe.data.evaluation is None and (value := value_at(recipe, path)) != default:
            yield Problem(
                path=path,
                found=f"{describe.toml_literal(value)}, without a [data.evaluation]",
                expected="a held-out set",
                remedy="Write [data.evaluation]; empty, it takes the environment's own held-out rows.",
            )


@rule("async")
def _nothing_is_stale(recipe: Recipe) -> Iterator[Problem]:
    """Keys of [async] that do nothing, or contradict each other."""
    config = recipe.async_
    if config.extra_prompts and config.on_stale == "wait":
        yield Problem(
            path="async.extra_prompts",
            found=f'{config.extra_prompts}, with on_stale = "wait"',
            expected="0: a step that waits for all of its samples needs no others",
            remedy='Set async.on_stale to "drop" or "rescore".',
        )
    if config.max_staleness or config.extra_prompts:
        return
    for key in ("on_stale", "partial_rollouts"):
        if getattr(config, key) != getattr(AsyncConfig(), key):
            yield Problem(
                path=f"async.{key}",
                found=f'"{getattr(config, key)}", with max_staleness = 0, where no sample outlives its step',
                expected="the default",
                remedy="Raise async.max_staleness, or leave the key out.",
            )


@rule("model.chat_template_kwargs")
def _template_variables(recipe: Recipe) -> Iterator[Problem]:
    """Refuse defaults that a served chat template cannot have: they are written into it as JSON."""
    for name, value in recipe.model.chat_template_kwargs.items():
        if not name.isidentifier():
            yield Problem(
                path=f"model.chat_template_kwargs.{name}",
                found="a name that no template can read",
                expected="letters, digits and underscores, not beginning with a digit",
            )
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(path=f"model.chat_template_kwargs.{name}", found=f"{value}", expected="a finite number")


@rule("model.path", "model.revision", "reference")
def _revision_of_directory(recipe: Recipe) -> Iterator[Problem]:
    for section, model in (("model", recipe.model), ("reference", recipe.reference)):
        if model is not None and model.revision is not None and Path(model.path).is_dir():
            yield Problem(
                path=f"{section}.revision",
                found=f"{describe.toml_literal(model.revision)}, with the local directory {model.path}",
                expected="no revision: only models on the Hub have one",
            )


@rule(
    "plugins.disable", "trainer.name", "generator.name", "algorithm.name", "environment.name", "sinks.names", "observers.names"
)
def _used_and_disabled(recipe: Recipe) -> Iterator[Problem]:
    used = [
        (role, value_at(recipe, f"{role}.name"), f"{role}.name selects")
        for role in ("trainer", "generator", "algorithm", "environment")
    ]
    for kind, names in (("sink", recipe.sinks.names), ("observer", recipe.observers.names)):
        used += [(kind, name, f"{kind}s.names asks for") for name in names or ()]
    for entry, (kind, name, use) in product(recipe.plugins.disable, used):
        if name is not None and entry in (name, f"{kind}:{name}"):
            found = f"{describe.toml_literal(entry)}, which {use}"
            yield Problem(path="plugins.disable", found=found, expected="other plugins than those in use")


@rule("evaluation")
def _enough_samples_for_k(recipe: Recipe) -> Iterator[Problem]:
    samples, largest = recipe.evaluation.samples_per_prompt, max(recipe.evaluation.pass_at_k, default=1)
    if largest > samples:
        yield Problem(
            path="evaluation.pass_at_k",
            found=f"{largest}, with evaluation.samples_per_prompt = {samples}",
            expected="at most so many as there are samples of a prompt",
            remedy=f"Set evaluation.samples_per_prompt = {largest} or more, and a temperature above 0.",
        )


@rule("cluster")
def _cluster_layout(recipe: Recipe) -> Iterator[Problem]:
    cluster = recipe.cluster
    if cluster is None:
        return
    generating = cluster.generator_gpus_per_node
    if cluster.placement == "colocated" and generating > 0:
        yield Problem(
            path="cluster.generator_gpus_per_node",
            found=f'{generating}, with placement = "colocated"',
            expected="0: every device both trains and generates",
            remedy='Set cluster.placement = "separate".',
        )
    if cluster.placement == "separate" and not 0 < generating < cluster.gpus_per_node:
        yield Problem(
            path="cluster.generator_gpus_per_node",
            found=f'{generating} of {cluster.gpus_per_node}, with placement = "separate"',
            expected="at least 1, and fewer than cluster.gpus_per_node, so that some are left to train",
        )
    elif cluster.reference_gpus_per_node and cluster.ranks_per_node < 1:
        beside = f", {generating} of which generate" if generating else ""
        yield Problem(
            path="cluster.reference_gpus_per_node",
            found=f"{cluster.reference_gpus_per_node} of {cluster.gpus_per_node}{beside}",
            expected="fewer, so that some are left to train",
        )
