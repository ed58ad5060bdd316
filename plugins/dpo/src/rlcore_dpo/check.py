"""Checks of `[algorithm.dpo]` across its fields."""

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
            path="algorithm.dpo.label_smoothing",
            found=f"{config.label_smoothing}, with loss = {config.loss!r}, which has none",
            expected='0.0, or loss = "sigmoid" or "robust"',
        )
    if config.loss == "robust" and not config.label_smoothing:
        yield Problem(
            path="algorithm.dpo.label_smoothing",
            found='0.0, with loss = "robust", which is then the same as "sigmoid"',
            expected="the share of pairs that are swapped, above 0 and below 0.5",
        )
    if config.margin and (config.loss != "sigmoid" or config.label_smoothing):
        yield Problem(
            path="algorithm.dpo.margin",
            found=f"{config.margin}, with loss = {config.loss!r} and label_smoothing = {config.label_smoothing}",
            expected='0.0, or loss = "sigmoid" without label smoothing',
        )
