"""Checks of `[algorithm.dpo]` and `[algorithm.orpo]` across their fields."""

from collections.abc import Iterator, Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_dpo.config import DpoConfig


def check(context: CheckContext, config: DpoConfig) -> Sequence[Problem]:
    """Return the impossible combinations of options."""
    del context
    return list(_problems(config))


def _problems(config: DpoConfig) -> Iterator[Problem]:
    if config.label_smoothing and config.loss not in ("sigmoid", "robust"):
        yield Problem(
            path=f"{config.section}.label_smoothing",
            found=f"{config.label_smoothing}, with loss = {config.loss!r}, which has none",
            expected='0.0, or loss = "sigmoid" or "robust"',
        )
    if config.loss == "robust" and not config.label_smoothing:
        yield Problem(
            path=f"{config.section}.label_smoothing",
            found='0.0, with loss = "robust", which is then the same as "sigmoid"',
            expected="the share of pairs that are swapped, above 0 and below 0.5",
        )
    if config.margin and (config.loss != "sigmoid" or config.label_smoothing):
        yield Problem(
            path=f"{config.section}.margin",
            found=f"{config.margin}, with loss = {config.loss!r} and label_smoothing = {config.label_smoothing}",
            expected='0.0, or loss = "sigmoid" without label smoothing',
        )
    if config.loss == "odds_ratio" and (config.reference != "none" or not config.length_normalised):
        yield Problem(
            path=f"{config.section}.loss",
            found=f'"odds_ratio", with reference = {config.reference!r} and length_normalised = {config.length_normalised}',
            expected='reference = "none" and length_normalised = true, which make scores the logarithms of probabilities',
        )
