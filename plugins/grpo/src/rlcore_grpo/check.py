"""Checks of `[algorithm.grpo]`, or the section of one of its presets, across its fields."""

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, fields

from rlcore.spi import CheckContext, Note, Problem
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.endpoint_config import endpoint_problems

WITH_RATIO = ("clipped", "cispo", "sapo")
"""Objectives of a ratio that may be that of the sequence; the others have one of their own, or none."""
OF_TOKENS = 'Set ratio to "token", or to "sequence_token", whose gradient is each token\'s own.'
ENDPOINT = "algorithm.grpo.reference_endpoint"
OF_GROUPS = ("std", "leave_one_out_std", "mean")
"""Normalisations by what a group's rewards are."""


def check(context: CheckContext, config: GrpoConfig) -> Sequence[Problem | Note]:
    """Return the combinations of options that are impossible, and options that do nothing beside the others."""
    found: tuple[Problem | Note, ...] = (
        *_of_divergence(config),
        *_of_normalisation(config),
        *_of_turns(context, config),
        *_of_components(config),
        *_of_objective(config),
        *_of_importance(config),
        *_unused(config),
        *([] if config.reference_endpoint is None else endpoint_problems(ENDPOINT, config.reference_endpoint)),
    )
    return [evolve(problem, path=problem.path.replace(GrpoConfig.section, config.section, 1)) for problem in found]


def _of_divergence(config: GrpoConfig) -> Iterator[Problem]:
    if config.kl_placement == "reward" and config.kl_coefficient and config.advantage_normalisation != "none":
        yield Problem(
            path="algorithm.grpo.kl_placement",
            found=f'"reward", with advantage_normalisation = "{config.advantage_normalisation}", which would blow up the '
            "divergences of samples of equal rewards, or their roundings, to the size of rewards",
            expected='"loss" or "reward_to_go", or advantage_normalisation = "none"',
        )
    if config.kl_placement == "reward_to_go" and config.kl_coefficient and _is_of_sequence(config):
        yield Problem(
            path="algorithm.grpo.kl_placement",
            found='"reward_to_go" with one ratio for the whole sequence, whose gradient mixes the advantages of its tokens',
            expected='"reward" or "loss"',
            remedy=OF_TOKENS,
        )


def _of_normalisation(config: GrpoConfig) -> Iterator[Problem]:
    baseline, normalisation = config.advantage_baseline, config.advantage_normalisation
    expected = None
    if not config.compares_groups and normalisation in OF_GROUPS:
        expected = '"batch_whitening" or "none", or a baseline of the group'
    elif baseline == "none" and normalisation == "batch_std":
        expected = '"batch_whitening", which takes the mean off as well, or "none"'
    elif baseline == "leave_one_out" and normalisation == "mean":
        expected = 'the baseline "group_mean": a reward is compared with the mean that it is divided by'
    if expected is not None:
        found = f'"{normalisation}", with advantage_baseline = "{baseline}"'
        yield Problem(path="algorithm.grpo.advantage_normalisation", found=found, expected=expected)
    if normalisation == "mean" and config.length_penalty != "none":
        yield Problem(
            path="algorithm.grpo.length_penalty",
            found=f'"{config.length_penalty}", with advantage_normalisation = "mean", which needs rewards of at least 0',
            expected='"none"',
        )


def _of_turns(context: CheckContext, config: GrpoConfig) -> Iterator[Problem | Note]:
    if config.advantage_per == "episode":
        return
    of_turns = f'"{config.advantage_per}"'
    if context.max_turns == 1 and config.advantage_per == "process":
        text = (
            "compares the parts of an answer, if its environment rewards them (StepResult.part_rewards), and else whole answers"
        )
        yield Note(path="algorithm.grpo.advantage_per", text=text)
    elif context.max_turns == 1:
        yield Problem(
            path="algorithm.grpo.advantage_per",
            found=f"{of_turns}, with episodes of one turn, or of agents, whose rewards are not told apart by turns",
            expected='"episode"',
            remedy="Raise rollout.max_turns where the environment takes several turns.",
        )
    if config.advantage_normalisation == "sample_whitening":
        yield Problem(
            path="algorithm.grpo.advantage_normalisation",
            found=f'"sample_whitening", with advantage_per = {of_turns}',
            expected='"batch_whitening", or another: it is of whole episodes',
        )
    for key, plain in (("reward_aggregation", "sum"), ("length_penalty", "none"), ("kl_placement", "loss")):
        if (value := getattr(config, key)) != plain:
            yield Problem(
                path=f"algorithm.grpo.{key}",
                found=f'"{value}", with advantage_per = {of_turns}',
                expected=f'"{plain}": it is of whole episodes',
            )


def _of_components(config: GrpoConfig) -> Iterator[Problem]:
    if config.reward_aggregation != "sum" and config.advantage_normalisation not in ("std", "leave_one_out_std"):
        yield Problem(
            path="algorithm.grpo.advantage_normalisation",
            found=f'"{config.advantage_normalisation}", with reward_aggregation = "normalise_then_sum"',
            expected='"std" or "leave_one_out_std"',
        )


def _of_objective(config: GrpoConfig) -> Iterator[Problem]:
    if config.ratio != "token" and config.objective not in WITH_RATIO:
        yield Problem(
            path="algorithm.grpo.ratio",
            found=f"{config.ratio!r} with objective = {config.objective!r}, which is not made of that ratio",
            expected='"token"',
            remedy=f"Leave ratio out, or choose an objective that takes it: {', '.join(WITH_RATIO)}.",
        )
    if config.clip_high < 0 and config.objective != "cispo":
        yield Problem(
            path="algorithm.grpo.clip_high",
            found=f"{config.clip_high:g} with objective = {config.objective!r}",
            expected='at least 0, or objective = "cispo"',
            remedy="Raise it: a ratio of 1 would be clipped.",
        )
    if config.objective == "cispo" and -config.clip_low > config.clip_high:
        yield Problem(
            path="algorithm.grpo.clip_high",
            found=f"{config.clip_high:g} with clip_low = {config.clip_low:g}, so that the least weight is above the greatest",
            expected="at least -clip_low",
            remedy="Set clip_low = 1.0, which never clips.",
        )
    if _is_of_sequence(config) and config.advantage_per != "episode":
        yield Problem(
            path="algorithm.grpo.advantage_per",
            found=f'"{config.advantage_per}" with one ratio for the whole sequence, whose gradient mixes advantages of turns',
            expected='"episode"',
            remedy=OF_TOKENS,
        )


def _of_importance(config: GrpoConfig) -> Iterator[Problem]:
    for name in ("importance", "geometric", "covariance"):
        low, high = getattr(config, f"{name}_minimum"), getattr(config, f"{name}_maximum")
        if low >= high:
            yield Problem(
                path=f"algorithm.grpo.{name}_minimum",
                found=f"{low} with {name}_maximum = {high}",
                expected="less than the maximum",
                remedy="Lower it, or raise the maximum.",
            )
    if config.objective == "vespo" and config.importance_correction == "sequence":
        yield Problem(
            path="algorithm.grpo.importance_correction",
            found='"sequence" with objective = "vespo", which multiplies the weights of a sequence\'s tokens itself',
            expected='"token" or "none"',
            remedy='Set it to "token".',
        )
    if config.objective == "vespo" and config.importance_bound == "mask":
        yield Problem(
            path="algorithm.grpo.importance_bound",
            found='"mask" with objective = "vespo", which multiplies a sequence\'s weights: one of 0 masks all of its tokens',
            expected='"truncate"',
            remedy="Leave it out.",
        )
    needs_trainers = (
        (config.masks_by_geometric_mean, "geometric_minimum or geometric_maximum, which compare trainer and generator"),
        (config.objective == "kl_cov", 'objective = "kl_cov", whose penalty would follow roundings before an update'),
    )
    for needs, what in needs_trainers:
        if needs and config.previous_logprobs == "generation":
            yield Problem(
                path="algorithm.grpo.previous_logprobs",
                found=f'"generation" with {what}',
                expected='"trainer" or "auto"',
                remedy="Leave previous_logprobs out.",
            )
    if config.entropy_minimum is not None and config.entropy_metric == "estimate":
        yield Problem(
            path="algorithm.grpo.entropy_metric",
            found='"estimate" with entropy_minimum, which needs the entropy of each token',
            expected='"exact"',
            remedy="Leave entropy_metric out.",
        )


def _unused(config: GrpoConfig) -> Iterator[Problem]:
    objective, clips = config.objective, ("clipped", "clip_cov", "cispo", "gmpo")
    needs: Mapping[str, tuple[bool, str]] = {
        "constant_length": (config.loss_normalisation == "constant", 'loss_normalisation = "constant"'),
        "dual_clip": (objective == "clipped", 'objective = "clipped"'),
        "clip_low": (objective in clips, f"objective = one of {', '.join(clips)}"),
        "clip_high": (objective in clips, f"objective = one of {', '.join(clips)}"),
        **dict.fromkeys(_names("sapo_"), (objective == "sapo", 'objective = "sapo"')),
        **dict.fromkeys(_names("vespo_"), (objective == "vespo", 'objective = "vespo"')),
        "covariance_share": (config.chooses_by_covariance, 'objective = "clip_cov" or "kl_cov"'),
        "covariance_minimum": (objective == "clip_cov", 'objective = "clip_cov"'),
        "covariance_maximum": (objective == "clip_cov", 'objective = "clip_cov"'),
        "covariance_penalty": (objective == "kl_cov", 'objective = "kl_cov"'),
        "reward_weights": (config.reward_aggregation != "sum", 'reward_aggregation = "normalise_then_sum"'),
        "length_penalty_weight": (config.length_penalty != "none", "a length_penalty"),
        "length_penalty_buffer": (config.length_penalty == "soft_overlong", 'length_penalty = "soft_overlong"'),
        "kl_placement": (config.kl_coefficient > 0, "kl_coefficient above 0"),
        "reference_endpoint": (config.kl_coefficient > 0, "kl_coefficient above 0"),
        "kl_gradient": (config.kl_placement == "loss", 'kl_placement = "loss": no gradient goes through a reward'),
        "kl_importance": (config.kl_coefficient > 0, "kl_coefficient above 0"),
        "kl_maximum": (config.kl_coefficient > 0 and config.kl_placement == "loss", "a KL term in the loss"),
        "importance_bound": (config.importance_correction != "none", "an importance_correction"),
        "importance_minimum": (config.importance_correction != "none", "an importance_correction"),
    }
    for name, (is_used, needed) in needs.items():
        if not is_used and config.is_set(name):
            yield Problem(
                path=f"algorithm.grpo.{name}",
                found=f"{getattr(config, name)!r} without {needed}, so that it does nothing",
                expected=f"{needed}, or no such key",
                remedy="Leave the key out.",
            )


def _is_of_sequence(config: GrpoConfig) -> bool:
    """Return whether the loss has one ratio for a whole sequence."""
    return config.objective == "gmpo" or config.ratio in ("sequence", "sequence_product")


def _names(prefix: str) -> list[str]:
    """Return the options whose names begin so."""
    return [field.name for field in fields(GrpoConfig) if field.name.startswith(prefix)]
