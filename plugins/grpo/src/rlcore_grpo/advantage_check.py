"""Options of advantages that do not go together."""

from collections.abc import Iterator

from rlcore.spi import CheckContext, Problem
from rlcore_grpo.config import GrpoConfig

OF_GROUPS = ("std", "leave_one_out_std", "mean")
"""Normalisations by what a group's rewards are."""


def advantage_problems(context: CheckContext, config: GrpoConfig) -> list[Problem]:
    """The combinations of options of AdvantageConfig that make no sense."""
    return [
        *_normalisation_problems(config),
        *_turn_problems(context, config),
        *_component_problems(config),
        *_kl_problems(config),
        *_unused_problems(config),
    ]


def _kl_problems(config: GrpoConfig) -> Iterator[Problem]:
    if config.kl_placement != "loss" and not config.kl_coefficient and config.is_set("kl_placement"):
        yield Problem(
            path="algorithm.grpo.kl_placement",
            found=f'"{config.kl_placement}", with kl_coefficient = 0, so without any KL divergence',
            expected='"loss", the default',
            remedy="Set a kl_coefficient, or leave the key out.",
        )
    if config.kl_placement == "reward" and config.kl_coefficient and config.advantage_normalisation != "none":
        yield Problem(
            path="algorithm.grpo.kl_placement",
            found=f'"reward", with advantage_normalisation = "{config.advantage_normalisation}", which would blow up the '
            "divergences of samples of equal rewards, or their roundings, to the size of rewards",
            expected='"loss" or "reward_to_go", or advantage_normalisation = "none"',
        )
    of_sequence = config.objective == "gmpo" or config.ratio in ("sequence", "sequence_product")
    if config.kl_placement == "reward_to_go" and config.kl_coefficient and of_sequence:
        yield Problem(
            path="algorithm.grpo.kl_placement",
            found='"reward_to_go" with one ratio for the whole sequence, whose gradient mixes the advantages of its tokens',
            expected='"reward" or "loss"',
            remedy='Or set ratio to "token", or to "sequence_token", whose gradient is each token\'s own.',
        )
    if config.kl_placement != "loss" and config.is_set("kl_gradient"):
        yield Problem(
            path="algorithm.grpo.kl_gradient",
            found=f'"{config.kl_gradient}", with kl_placement = "{config.kl_placement}"',
            expected="the default: no gradient goes through a reward",
        )


def _unused_problems(config: GrpoConfig) -> Iterator[Problem]:
    for key, needed in (("length_penalty_weight", None), ("length_penalty_buffer", "soft_overlong")):
        unused = config.length_penalty == "none" or needed not in (None, config.length_penalty)
        if unused and config.is_set(key):
            yield Problem(
                path=f"algorithm.grpo.{key}",
                found=f'{getattr(config, key):g}, with length_penalty = "{config.length_penalty}"',
                expected="no such key: there is nothing that it applies to",
                remedy=f'Set length_penalty to "{needed or "soft_overlong"}", or leave the key out.',
            )


def _normalisation_problems(config: GrpoConfig) -> Iterator[Problem]:
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


def _turn_problems(context: CheckContext, config: GrpoConfig) -> Iterator[Problem]:
    if config.advantage_per != "turn":
        return
    if context.max_turns == 1:
        yield Problem(
            path="algorithm.grpo.advantage_per",
            found='"turn", with episodes of one turn, or of agents, whose rewards are not told apart by turns',
            expected='"episode"',
            remedy="Raise rollout.max_turns where the environment takes several turns.",
        )
    for key, plain in (("reward_aggregation", "sum"), ("length_penalty", "none"), ("kl_placement", "loss")):
        if (value := getattr(config, key)) != plain:
            yield Problem(
                path=f"algorithm.grpo.{key}",
                found=f'"{value}", with advantage_per = "turn"',
                expected=f'"{plain}": it is of whole episodes',
            )


def _component_problems(config: GrpoConfig) -> Iterator[Problem]:
    if config.reward_aggregation == "sum":
        if config.reward_weights:
            yield Problem(
                path="algorithm.grpo.reward_weights",
                found=f'{", ".join(config.reward_weights)}, with reward_aggregation = "sum"',
                expected="no weights: the environment's reward is taken as it is",
                remedy='Set reward_aggregation to "normalise_then_sum".',
            )
        return
    if config.advantage_normalisation not in ("std", "leave_one_out_std"):
        yield Problem(
            path="algorithm.grpo.advantage_normalisation",
            found=f'"{config.advantage_normalisation}", with reward_aggregation = "normalise_then_sum"',
            expected='"std" or "leave_one_out_std"',
        )
