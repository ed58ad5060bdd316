"""Rules of the recipe that follow from the algorithm: what it needs, and what does nothing with it."""

from collections.abc import Iterator

from rlcore.config.asynchrony import AsyncConfig
from rlcore.config.data import DatasetConfig
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
    if needs.source == "rollouts":
        return
    data, again = recipe.data, "1: rows of a data set come again in each epoch"
    unread = (
        ("async", recipe.async_ != AsyncConfig(), "the section", "no such section", ""),
        ("rollout.replay_routing", rollout.replay_routing, "true", "false: there is no routing to replay", ""),
        ("rollout.reuse", rollout.reuse > 1, rollout.reuse, again, ""),
        ("rollout.max_samples_per_prompt", rollout.max_samples_per_prompt, rollout.max_samples_per_prompt, "no such key", ""),
        ("training.epochs_per_step", recipe.training.epochs_per_step > 1, recipe.training.epochs_per_step, again, ""),
        ("data.zero_variance_weight", data.zero_variance_weight < 1, f"{data.zero_variance_weight:g}", "1.0, the default", ""),
        ("data.prompt_weights", data.prompt_weights is not None, data.prompt_weights, "no such key", ""),
        ("data.level_window", data.level_window is not None, data.level_window, "no such key", ""),
        ("data.curriculum_threshold", data.curriculum_threshold is not None, data.curriculum_threshold, "no such key", ""),
        (
            *("rollout.temperature", rollout.temperature != 1.0, rollout.temperature),
            *(
                "1.0: what is learned would be the probabilities at that temperature",
                "evaluation.temperature is that of evaluations.",
            ),
        ),
    )
    for path, is_set, found, expected, remedy in unread:
        if is_set:
            yield Problem(path=path, found=f"{found}, {algorithm} trains on no rollouts", expected=expected, remedy=remedy)


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
