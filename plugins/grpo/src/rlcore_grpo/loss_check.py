"""What is wrong with the options of the loss that no single field shows."""

from collections.abc import Iterator, Mapping

from attrs import fields

from rlcore.spi import Problem
from rlcore_grpo.config import GrpoConfig

WITH_RATIO = ("clipped", "cispo", "sapo")
"""Objectives of a ratio that may be that of the sequence; the others have one of their own, or none."""


def loss_problems(config: GrpoConfig) -> list[Problem]:
    """The combinations of options that make no sense."""
    return [*_of_objective(config), *_of_importance(config), *_of_entropy(config), *_unused(config)]


def _of_objective(config: GrpoConfig) -> Iterator[Problem]:
    if config.loss_normalisation != "constant" and config.constant_length is not None:
        yield Problem(
            path="algorithm.grpo.constant_length",
            found=f"{config.constant_length} with loss_normalisation = {config.loss_normalisation!r}",
            expected='no length, which loss_normalisation = "constant" alone divides by',
            remedy="Leave it out.",
        )
    if config.ratio != "token" and config.objective not in WITH_RATIO:
        yield Problem(
            path="algorithm.grpo.ratio",
            found=f"{config.ratio!r} with objective = {config.objective!r}, which is not made of that ratio",
            expected='"token"',
            remedy=f"Leave ratio out, or choose an objective that takes it: {', '.join(WITH_RATIO)}.",
        )
    if config.dual_clip is not None and config.objective != "clipped":
        yield Problem(
            path="algorithm.grpo.dual_clip",
            found=f"{config.dual_clip} with objective = {config.objective!r}, which it does not bound",
            expected='none, or objective = "clipped"',
            remedy="Leave it out.",
        )
    of_sequence = config.objective == "gmpo" or config.ratio in ("sequence", "sequence_product")
    if of_sequence and config.advantage_per == "turn":
        yield Problem(
            path="algorithm.grpo.advantage_per",
            found='"turn" with one ratio for the whole sequence, whose gradient mixes the advantages of its turns',
            expected='"episode"',
            remedy='Set ratio to "token", or to "sequence_token", whose gradient is each token\'s own.',
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


def _of_entropy(config: GrpoConfig) -> Iterator[Problem]:
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
        "clip_low": (objective in clips, f"objective = one of {', '.join(clips)}"),
        "clip_high": (objective in clips, f"objective = one of {', '.join(clips)}"),
        **dict.fromkeys(_names("sapo_"), (objective == "sapo", 'objective = "sapo"')),
        **dict.fromkeys(_names("vespo_"), (objective == "vespo", 'objective = "vespo"')),
        "covariance_share": (config.chooses_by_covariance, 'objective = "clip_cov" or "kl_cov"'),
        "covariance_minimum": (objective == "clip_cov", 'objective = "clip_cov"'),
        "covariance_maximum": (objective == "clip_cov", 'objective = "clip_cov"'),
        "covariance_penalty": (objective == "kl_cov", 'objective = "kl_cov"'),
        "kl_importance": (config.kl_coefficient > 0, "kl_coefficient above 0"),
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


def _names(prefix: str) -> list[str]:
    """Return the options whose names begin so."""
    return [field.name for field in fields(GrpoConfig) if field.name.startswith(prefix)]
