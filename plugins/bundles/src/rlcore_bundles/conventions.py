"""The conventions by which frameworks differ: each a named change of rlcore's side.

A difference is explained where rlcore's numbers under a convention are those of the other framework.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from math import inf
from typing import get_args

from attrs import evolve, frozen

from rlcore_bundles.own_side import OwnSide
from rlcore_bundles.peers.contract import shown
from rlcore_torchkit.rl.loss_config import AdvantageNormalisation, Baseline, KlEstimator, KlGradient, Normalisation, RatioLevel

ADVANTAGE_TERMS = frozenset({"advantages"})
WEIGHTS = frozenset({"loss mask", "token weights", "policy loss, sum", "KL term, sum", "loss", "gradient"})
RATIOS = frozenset({"log ratio", "importance weights", "policy loss", "policy loss, sum", "loss", "gradient", "metrics"})
KL = frozenset({"KL term", "KL term, sum", "loss", "gradient", "metrics"})
ENTROPY = frozenset({"entropy weights", "loss"})
EVERY = WEIGHTS | RATIOS | KL | ENTROPY | {"entropy weights"}
EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
MOST = 3
"""Conventions that together explain one term."""


@frozen(kw_only=True, eq=False)
class Convention:
    """One named change."""

    axis: str
    """The matter that it decides; two of one axis exclude each other."""
    text: str
    """The other framework's convention, and rlcore's."""
    terms: frozenset[str]
    """The terms that it may change."""
    apply: Callable[[OwnSide], OwnSide]


def conventions_of(own: OwnSide, width: int) -> Iterator[Convention]:
    """Yield the conventions that are another than rlcore's with these options. `width`: tokens of the longest answer."""
    if own.samples is not None:
        yield from _of_advantages(own)
    if own.update is not None:
        yield from _of_weights(own, width)
        yield from _of_ratios(own)
        yield from _of_terms(own)


def combinations_of(conventions: list[Convention]) -> Iterator[tuple[Convention, ...]]:
    """Yield sets of conventions, the smallest first, with one of each axis at most."""
    for number in range(1, MOST + 1):
        for chosen in combinations(conventions, number):
            if len({one.axis for one in chosen}) == number:
                yield chosen


def scaling(term: str, factor: float, own: OwnSide) -> Convention | None:
    """The convention by which a term is a constant times rlcore's; None for a term that no coefficient scales."""
    match term:
        case "token weights":
            text = f"tokens weigh {factor:.6g} times what they do here"
            return _knob("scale", text, WEIGHTS | {"entropy weights"}, weight_factor=factor)
        case "KL term":
            return _option("kl weight", "kl_coefficient", factor * own.options["kl_coefficient"], own, KL)
        case "entropy weights":
            return _option("entropy", "entropy_coefficient", factor * own.options["entropy_coefficient"], own, ENTROPY)
    return None


def _option(axis: str, name: str, value: object, own: OwnSide, terms: frozenset[str], **also: object) -> Convention:
    """A convention that is another value of one of rlcore's options."""
    text = f"{name} = {shown(value)}, here {shown(own.options[name])}"
    options = {name: value, **also}
    return Convention(axis=axis, text=text, terms=terms, apply=lambda side: side.with_options(**options))


def _knob(axis: str, text: str, terms: frozenset[str], **fields: object) -> Convention:
    """A convention that rlcore has no option for."""
    return Convention(axis=axis, text=text, terms=terms, apply=lambda side: _changed(side, terms, **fields))


def _changed(side: OwnSide, terms: frozenset[str], **fields: object) -> OwnSide:
    changed = evolve(side, **fields)  # type: ignore[arg-type]
    return evolve(changed, recorded=None) if terms is ADVANTAGE_TERMS else changed


def _others(values: tuple[object, ...], own: object) -> Iterator[object]:
    return (value for value in values if value != own)


def _of_advantages(own: OwnSide) -> Iterator[Convention]:
    options, terms = own.options, ADVANTAGE_TERMS
    for epsilon in _others(EPSILONS, options["advantage_epsilon"]):
        yield _option("epsilon", "advantage_epsilon", epsilon, own, terms)
    yield _knob("deviation", "the standard deviation divides by n, here by n - 1", terms, std_correction=0)
    yield _knob("lone", "the only sample of a group keeps its reward, here it has advantage 0", terms, keeps_lone_reward=True)
    for value in _others(get_args(AdvantageNormalisation), options["advantage_normalisation"]):
        yield _option("divisor", "advantage_normalisation", value, own, terms)
    for value in _others(get_args(Baseline), options["advantage_baseline"]):
        yield _option("baseline", "advantage_baseline", value, own, terms)
    whitening = "whitening divides by the root of variance + epsilon, here by deviation + epsilon"
    yield _knob("root", whitening, terms, whitens_in_root=True)


def _of_weights(own: OwnSide, width: int) -> Iterator[Convention]:
    options = own.options
    terms = WEIGHTS | {"entropy weights"}
    yield _knob("mask", "truncated samples are masked, here they train", EVERY, masks_truncated=True)
    for value in _others(get_args(Normalisation), options["loss_normalisation"]):
        if value != "constant":
            yield _option("mean", "loss_normalisation", value, own, terms)
    lengths = [length for length in dict.fromkeys([width, 1]) if length != options["constant_length"]]
    for length in lengths:
        also = {"constant_length": length}
        if options["loss_normalisation"] != "constant":
            text = f"the loss is a sum over tokens divided by sequences times {length}, here a mean"
            apply = lambda side, also=also: side.with_options(loss_normalisation="constant", **also)  # noqa: E731
            yield Convention(axis="mean", text=text, terms=terms, apply=apply)
        else:
            yield _option("mean", "constant_length", length, own, terms)
    counted = "sequences without a loss token count in the mean, here they do not"
    yield _knob("counted", counted, terms, counts_masked_sequences=True)
    step = "the mean over tokens divides by the step's tokens over its updates, here by the update's"
    yield _knob("tokens", step, terms, counts_step_tokens=True)


def _of_ratios(own: OwnSide) -> Iterator[Convention]:
    options, terms = own.options, RATIOS
    if options["objective"] == "clipped":
        duals = (3.0,) if options["dual_clip"] is None else (None,)
        for dual in duals:
            yield _option("dual", "dual_clip", dual, own, terms - {"log ratio", "importance weights"})
        yield _option("clip", "clip_high", options["clip_low"], own, terms - {"log ratio", "importance weights"})
        free = {"clip_low": 1.0, "clip_high": inf, "dual_clip": None}
        apply = lambda side: side.with_options(**free)  # noqa: E731
        yield Convention(axis="clip", text="no clip of the ratio, here one", terms=terms - {"log ratio"}, apply=apply)
        masked = "tokens whose probability moved by more than 0.2 are masked, here the ratio is clipped"
        free_mask = lambda side: evolve(side.with_options(**free), probability_bound=0.2)  # noqa: E731
        yield Convention(axis="clip", text=masked, terms=terms, apply=free_mask)
    for level in _others(get_args(RatioLevel), options["ratio"]):
        yield _option("ratio", "ratio", level, own, terms)
    for source in _others(("trainer", "generation"), options["previous_logprobs"]):
        yield _option("previous", "previous_logprobs", source, own, terms)
    yield _knob(
        "previous", "the policy's own log-probabilities are the old ones, here the step's", terms, current_is_previous=True
    )
    if options["previous_logprobs"] != "generation":
        for value in _others(("token", "sequence", "none"), options["importance_correction"]):
            yield _option("importance", "importance_correction", value, own, terms)
        for value in _others(("truncate", "mask"), options["importance_bound"]):
            yield _option("bound", "importance_bound", value, own, terms)
        yield _option("maximum", "importance_maximum", inf, own, terms)
    yield _knob("clamp", "the log ratio is not clamped, here to 20", terms, max_log_ratio=inf)
    yield _knob("clamp", "the log ratio is clamped to 10, here to 20", terms, max_log_ratio=10.0)


def _of_terms(own: OwnSide) -> Iterator[Convention]:
    options = own.options
    by_sequence = "metrics are means over sequences, here over tokens"
    yield _knob("metrics", by_sequence, frozenset({"metrics"}), metrics_by_sequence=True)
    added = "0.001 times the squared log ratio to the generator is added, here nothing"
    yield _knob("generator", added, frozenset({"loss", "gradient"}), generator_weight=1e-3)
    if options["kl_coefficient"]:
        for estimator in _others(get_args(KlEstimator), options["kl_estimator"]):
            yield _option("estimator", "kl_estimator", estimator, own, KL)
        for gradient in _others(get_args(KlGradient), options["kl_gradient"]):
            yield _option("kl gradient", "kl_gradient", gradient, own, frozenset({"gradient"}))
        for source in _others(("none", "previous", "generation"), options["kl_importance"]):
            yield _option("kl importance", "kl_importance", source, own, KL)
        yield _option("kl weight", "kl_coefficient", 0.0, own, KL)
        unbounded = "KL estimates are not clamped, here to 20 and 10"
        yield _knob("kl clamp", unbounded, KL, kl_is_bounded=False)
        mean = "the reported divergence has the mean of the loss, here that over tokens"
        yield _knob("kl metric", mean, frozenset({"metrics"}), kl_metric_as_loss=True)
    if options["entropy_coefficient"]:
        by_token = "the entropy bonus is a mean over tokens, here that of the loss"
        yield _knob("entropy", by_token, ENTROPY, entropy_by_token=True)
        yield _option("entropy", "entropy_coefficient", 0.0, own, ENTROPY)
