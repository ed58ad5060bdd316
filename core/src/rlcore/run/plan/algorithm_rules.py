"""Rules of the recipe that follow from the algorithm: what it needs, and what does nothing with it."""

from collections.abc import Iterator

from rlcore.config.asynchrony import AsyncConfig
from rlcore.config.data import LEVEL_WINDOW, DatasetConfig
from rlcore.config.recipe import Recipe, RolloutConfig
from rlcore.run.plan.other_models import other_model_problems
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import AlgorithmNeeds, Problem, capabilities


def algorithm_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the keys that cannot work with the algorithm, or do nothing with it."""
    recipe, needs = plan.recipe, plan.algorithm.needs
    if needs.source == "rollouts" and recipe.environment is None:
        yield Problem(
            path="environment",
            found="nothing",
            expected=f"an environment, which rewards the rollouts that algorithm {recipe.algorithm.name!r} trains on",
            remedy="Add a section [environment] with a name.",
        )
    if recipe.environment is None and recipe.data.evaluation is not None and not plan.algorithm.measures:
        yield Problem(
            path="data.evaluation",
            found=f"a held-out set, without an [environment], and algorithm {recipe.algorithm.name!r} measures none itself",
            expected="an environment, which judges the answers",
            remedy="Set environment.name, or leave out [data.evaluation].",
        )
    if needs.head == "value" and recipe.environment is not None:
        yield Problem(
            path="environment",
            found=f"the section, with algorithm {recipe.algorithm.name!r}, which trains a model of values",
            expected="no such section: nothing generates with such a model",
            remedy="Leave it out; held-out rows of [data.evaluation] are judged by the model itself.",
        )
    yield from other_model_problems(recipe, needs)
    yield from _margin_problems(recipe, needs)
    if needs.source == "rollouts" and recipe.rollout.samples_per_prompt < needs.min_samples_per_prompt:
        yield Problem(
            path="rollout.samples_per_prompt",
            found=str(recipe.rollout.samples_per_prompt),
            expected=f"at least {needs.min_samples_per_prompt} for algorithm {recipe.algorithm.name!r}",
            remedy="Raise it; a group's statistics need several samples.",
        )
    if recipe.async_.max_staleness and needs.source == "rollouts" and not needs.corrects_staleness:
        yield Problem(
            path="async.max_staleness",
            found=f"{recipe.async_.max_staleness}, with algorithm {recipe.algorithm.name!r} as configured, which takes all "
            "samples for the present policy's",
            expected="0, or an algorithm that corrects for older weights by the ratio to the probabilities sampled with",
            remedy="Leave the key out, or turn the algorithm's importance correction on.",
        )
    yield from _pointless(recipe, needs)
    yield from _dynamic_sampling_problems(plan)


def _dynamic_sampling_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield the sections with which dynamic sampling cannot run."""
    rollout, needs, algorithm = plan.recipe.rollout, plan.algorithm.needs, plan.recipe.algorithm.name
    if rollout.dynamic_sampling and (found := _equal_by_nature(plan)) is not None:
        meant = f"which algorithm {algorithm!r} is meant for, " if needs.dynamic_sampling else ""
        why, expected, remedy = found
        yield Problem(
            path="rollout.dynamic_sampling",
            found=f"true, {meant}with {why}",
            expected=expected,
            remedy=f"{remedy}, or set rollout.dynamic_sampling = false." if remedy else "Leave the key out.",
        )
    if not rollout.dynamic_sampling and rollout.max_refill_ratio != RolloutConfig().max_refill_ratio:
        yield Problem(
            path="rollout.max_refill_ratio",
            found=f"{rollout.max_refill_ratio:g}, without dynamic_sampling",
            expected="the default: no group is replaced",
            remedy="Set rollout.dynamic_sampling = true, or leave the key out.",
        )


def _equal_by_nature(plan: RunPlan) -> tuple[str, str, str] | None:
    """Why no group teaches more than another by its rewards: what is found, what is expected, and another remedy than to keep
    such groups, if any."""
    needs, algorithm = plan.algorithm.needs, f"algorithm {plan.recipe.algorithm.name!r}"
    if needs.source != "rollouts":
        return f"{algorithm}, which trains on no rollouts", "false: there are no groups", ""
    if not needs.rewards:
        return f"{algorithm}, which reads no rewards", "false: groups of equal rewards teach as much as others", ""
    if plan.recipe.rollout.samples_per_prompt == 1:
        expected = "groups of several samples: the rewards of one are always equal"
        return "samples_per_prompt = 1", expected, "Raise rollout.samples_per_prompt"
    environments, none = plan.environments, capabilities.NO_REWARDS
    if environments and all(one.provider is not None and none in one.provider.capabilities for one in environments):
        names = " and ".join(repr(one.name) for one in environments)
        return f"environment {names}, whose rewards are all 0", "rewards that can differ", "Take an environment that rewards"
    return None


def _margin_problems(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """Margins of pairs, and labels, that no loss reads."""
    for path, config in (("data.train", recipe.data.train), ("data.evaluation", recipe.data.evaluation)):
        parts = {} if config is None else {path: config, **{f"{path}.mix.{name}": one for name, one in config.parts().items()}}
        for key, one in parts.items():
            for name, is_read in (("margin", needs.margins), ("label", needs.source == "labelled")):
                if not is_read and (field := getattr(one, f"{name}_field")) != getattr(DatasetConfig(), f"{name}_field"):
                    found = f'"{field}", with algorithm {recipe.algorithm.name!r}, which reads no {name}s'
                    yield Problem(path=f"{key}.{name}_field", found=found, expected="no such key")


def _pointless(recipe: Recipe, needs: AlgorithmNeeds) -> Iterator[Problem]:
    """Keys of [rollout] that do nothing with this algorithm, or what nobody can mean."""
    rollout, algorithm = recipe.rollout, f"with algorithm {recipe.algorithm.name!r}, which"
    if rollout.accept_truncation_bias and not needs.untruncated_sampling:
        yield Problem(
            path="rollout.accept_truncation_bias",
            found=f"true, {algorithm} compares no probabilities with the generator's",
            expected="false: truncated sampling biases nothing there",
        )
    weight = recipe.data.zero_variance_weight
    if weight != 1.0 and (needs.source != "rollouts" or rollout.samples_per_prompt == 1):
        why = f"with algorithm {recipe.algorithm.name!r}, which trains on no rollouts"
        yield Problem(
            path="data.zero_variance_weight",
            found=f"{weight:g}, {why if needs.source != 'rollouts' else 'with rollout.samples_per_prompt = 1'}",
            expected="1.0, the default: no prompt has several samples whose rewards could differ",
        )
    if (problem := _level_problem(recipe, needs)) is not None:
        yield problem
    if needs.source == "rollouts":
        return
    if recipe.async_ != AsyncConfig():
        yield Problem(path="async", found=f"the section, {algorithm} trains on no rollouts", expected="no such section")
    if rollout.replay_routing:
        yield Problem(
            path="rollout.replay_routing",
            found=f"true, {algorithm} trains on no rollouts",
            expected="false: there is no routing to replay",
        )
    if rollout.temperature != 1.0:
        yield Problem(
            path="rollout.temperature",
            found=f"{rollout.temperature}, {algorithm} trains on no rollouts",
            expected="1.0: what is learned would be the probabilities at that temperature",
            remedy="Leave it out; evaluation.temperature is that of evaluations.",
        )


def _level_problem(recipe: Recipe, needs: AlgorithmNeeds) -> Problem | None:
    """Levels rise by the success of whole groups of samples."""
    threshold, window, rollout = recipe.data.curriculum_threshold, recipe.data.level_window, recipe.rollout
    if threshold is None:
        if window in (None, LEVEL_WINDOW):
            return None
        return Problem(
            path="data.level_window", found=f"{window}, without data.curriculum_threshold", expected="no such key, or both"
        )
    why = ""
    if needs.source != "rollouts":
        why = f"with algorithm {recipe.algorithm.name!r}, which trains on no rollouts"
    elif rollout.samples_per_prompt == 1:
        why = "with rollout.samples_per_prompt = 1"
    elif rollout.dynamic_sampling:
        why = "with rollout.dynamic_sampling, which replaces the groups that are solved as a whole"
    elif recipe.data.zero_variance_weight < 1:
        why = f"with data.zero_variance_weight = {recipe.data.zero_variance_weight:g}, which passes over solved rows"
    if not why:
        return None
    expected = "no such key: levels rise with the success of groups of several samples, all of which count"
    return Problem(path="data.curriculum_threshold", found=f"{threshold:g}, {why}", expected=expected)


def replays_sampling_mask(recipe: Recipe, needs: AlgorithmNeeds) -> bool:
    """Return whether the generator reports the kept tokens of truncated sampling, for the trainer to normalise over."""
    rollout = recipe.rollout
    return needs.untruncated_sampling and rollout.truncates and not rollout.accept_truncation_bias


def mask_needs(recipe: Recipe, capability: str) -> dict[str, str]:
    """The capability that generator or trainer needs for that, with the keys that ask for it and what may be done without."""
    rollout, default = recipe.rollout, RolloutConfig()
    values = {f"rollout.{key}": (getattr(rollout, key), getattr(default, key)) for key in ("top_k", "top_p")}
    keys = " and ".join(f"{key} = {value}" for key, (value, whole) in values.items() if value != whole)
    compares = f"algorithm {recipe.algorithm.name!r} compares the generator's probabilities with the trainer's"
    without = "without it, sample from the whole distribution, or accept a bias with rollout.accept_truncation_bias = true"
    return {capability: f"{keys}, and {compares}; {without}"}
