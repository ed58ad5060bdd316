"""Checks keys of a recipe that say which prompts come, how often, and how often their samples are trained on."""

from collections.abc import Iterator

from rlcore.config.data import LEVEL_WINDOW
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema.describe import toml_literal
from rlcore.spi import Note, PluginError, Problem
from rlcore_rollout.collector_places import collector_notes
from rlcore_rollout.prompt_weights import prompt_weights


def check(plan: RunPlan) -> Iterator[Problem | Note]:
    """Yield the keys that contradict each other or do nothing, where episodes of turns are trained on; a note where the driver
    collects for several nodes."""
    yield from collector_notes(plan)
    if plan.algorithm.needs.source == "rollouts":
        yield from prompt_problems(plan)
        yield from _reuse_problems(plan)
        yield from _size_problems(plan)


def prompt_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the keys of `[data]` that choose prompts by their rewards, and contradict other keys."""
    data, rollout = plan.recipe.data, plan.recipe.rollout
    if plan.algorithm.needs.source != "rollouts":
        return
    one_sample = "with rollout.samples_per_prompt = 1" if rollout.samples_per_prompt == 1 else ""
    if data.zero_variance_weight != 1.0 and one_sample:
        yield Problem(
            path="data.zero_variance_weight",
            found=f"{data.zero_variance_weight:g}, {one_sample}",
            expected="1.0, the default: no prompt has several samples whose rewards could differ",
        )
    if data.prompt_weights is not None:
        yield from _weight_problems(plan, data.prompt_weights, one_sample)
    if data.curriculum_threshold is None:
        if data.level_window not in (None, LEVEL_WINDOW):
            found = f"{data.level_window}, without data.curriculum_threshold"
            yield Problem(path="data.level_window", found=found, expected="no such key, or both")
        return
    why = one_sample
    if not why and rollout.dynamic_sampling:
        why = "with rollout.dynamic_sampling, which replaces the groups that are solved as a whole"
    elif not why and data.zero_variance_weight < 1:
        why = f"with data.zero_variance_weight = {data.zero_variance_weight:g}, which passes over solved rows"
    if why:
        expected = "no such key: levels rise with the success of groups of several samples, all of which count"
        yield Problem(path="data.curriculum_threshold", found=f"{data.curriculum_threshold:g}, {why}", expected=expected)


def _weight_problems(plan: RunPlan, name: str, one_sample: str) -> Iterator[Problem]:
    """Yield what keeps prompts from coming by their weights."""
    data, path = plan.recipe.data, "data.prompt_weights"
    try:
        prompt_weights(name)
    except PluginError as error:
        yield Problem(path=path, found=toml_literal(name), expected=str(error).removeprefix(f"{path}: "))
    other = "data.zero_variance_weight" if data.zero_variance_weight < 1 else ""
    if data.curriculum_threshold is not None:
        other = "data.curriculum_threshold"
    if why := one_sample or (f"with {other}" if other else ""):
        expected = "no such key, or several samples of each prompt and no other key that orders prompts by their rewards"
        yield Problem(path=path, found=f"{toml_literal(name)}, {why}", expected=expected)


def _reuse_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the keys that train on samples more than once where nothing allows or corrects it."""
    recipe, needs = plan.recipe, plan.algorithm.needs
    reuse, staleness = recipe.rollout.reuse, recipe.async_.max_staleness
    if reuse > staleness + 1:
        yield Problem(
            path="rollout.reuse",
            found=f"{reuse}, with async.max_staleness = {staleness}",
            expected=f"at most {staleness + 1}: the last of the steps trains on samples that are {reuse - 1} steps old",
            remedy=f"Set async.max_staleness = {reuse - 1}, or more to generate ahead.",
        )
    epochs = recipe.training.epochs_per_step
    if epochs > 1 and not (needs.previous_logprobs or needs.corrects_staleness):
        yield Problem(
            path="training.epochs_per_step",
            found=f"{epochs}, with algorithm {recipe.algorithm.name!r} as configured, which reads no ratio to earlier weights",
            expected="1, or an algorithm with a ratio",
            remedy="Leave the key out.",
        )


def _size_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield what keeps groups from having different numbers of samples."""
    recipe, needs, path = plan.recipe, plan.algorithm.needs, "rollout.max_samples_per_prompt"
    size, most = recipe.rollout.samples_per_prompt, recipe.rollout.max_samples_per_prompt
    if most is None:
        return
    if most % size or most == size:
        expected = f"a larger multiple of rollout.samples_per_prompt, which is {size}"
        yield Problem(path=path, found=f"{most}", expected=expected, remedy=f"Set it to {2 * size}, or leave it out.")
    why = ""
    if size == 1:
        why = "rollout.samples_per_prompt = 1, where each group's rewards are equal"
    elif needs.whole_groups or not needs.rewards:
        why = f"algorithm {recipe.algorithm.name!r}, which compares no rewards of groups"
    if why:
        expected = "no such key, or groups of several samples that are compared by their rewards"
        yield Problem(path=path, found=f"{most}, with {why}", expected=expected)
