"""Measures answers to held-out rows after the steps that the recipe names: pass@k."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.run.data.mixes import rows_at
from rlcore.run.data.prompt_stream import RandomPurpose
from rlcore.run.protocols import CollectedRollouts, Source
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import DRIVER
from rlcore.run.train_step.held_out import HeldOutObserver
from rlcore.run.train_step.metrics import rollout_metrics
from rlcore.spi import Row
from rlcore.spi.arrays import BoolArray, Int32Array, Int64Array
from rlcore_rollout.sampler import StepSampler


@frozen(kw_only=True, eq=False)
class HeldOutEvaluator:
    """pass@1 on the held-out rows; the same draws at every evaluation, so that curves differ by the weights alone."""

    sampler: StepSampler[Any]
    rows: Sequence[Row]
    kept: Int64Array
    """int64 [P]: the rows within the limits."""
    seed: int
    ks: Sequence[int] = ()
    """The k of pass@k, besides 1."""
    with_bounds: bool = False
    """True where each pass@k comes with the bounds of its interval."""

    def evaluate(self, weight_version: int, keep: Callable[[CollectedRollouts], None] | None = None) -> dict[str, float]:
        """Return the metrics of an evaluation, named `eval/…`; `keep` is called with its answers."""
        rows = rows_at(self.rows, self.kept)
        collected = self.sampler.collect(rows, weight_version, (self.seed, RandomPurpose.EVALUATION))
        if keep is not None:
            keep(collected)
        return evaluation_metrics(collected, self.ks, with_bounds=self.with_bounds)


@frozen(kw_only=True, eq=False)
class AnswerObserver(HeldOutObserver):
    """Has the environment judge answers to held-out prompts, while the source of training samples rests."""

    evaluator: HeldOutEvaluator
    source: Source
    progress: Progress
    keep: Callable[[int, CollectedRollouts], None] | None = None
    """Called with the step and its answers; None where nobody keeps them."""

    def evaluate(self, step: int, weight_version: int) -> Mapping[str, float]:
        """See HeldOutObserver."""
        self.source.pause()
        if self.source.has_failed:
            self.weights.forget()
        with self.source.still():
            self.weights.refit(weight_version)
            start = time.perf_counter()
            keep = None if self.keep is None else partial(self.keep, step)
            metrics = self.weights.generating(lambda: self.evaluator.evaluate(weight_version, keep), weight_version)
        self.progress.phase("evaluation")
        seconds = time.perf_counter() - start
        self.clock.totals["evaluation"] += seconds
        self.progress.span(DRIVER, "evaluation", start, (seconds,))
        return metrics


def evaluation_metrics(collected: CollectedRollouts, ks: Sequence[int] = (), *, with_bounds: bool = False) -> dict[str, float]:
    """pass@1, and pass@k for each of `ks`, with the bounds of each where they are asked for. They count a sample whose
    environment failed as not solved: a share of all samples is the one that evaluations of several models can be
    compared by."""
    metrics = rollout_metrics(collected)
    names = ("reward_mean", "response_length_mean", "truncated_fraction")
    first = collected.first_sequences
    set_of = np.asarray(collected.data_sets, object)[collected.group_ids[first]] if collected.data_sets else None
    solved = collected.success[first]
    return {
        "eval/pass@1": float(solved.mean()),
        **pass_metrics(solved, collected.group_ids[first], [1, *ks] if with_bounds else ks, with_bounds=with_bounds),
        **{f"eval/{name}": metrics[name] for name in names},
        "eval/failed": metrics["environment/failed"],
        **{f"eval/pass@1/{name}": float(solved[set_of == name].mean()) for name in sorted({*collected.data_sets})},
    }


Float64Array: TypeAlias = NDArray[np.float64]

CONFIDENCE = 0.95
"""The share of evaluations whose interval is to hold what it estimates."""
NUM_RESAMPLES = 2000


@frozen(kw_only=True)
class Interval:
    """A mean over prompts, and its bounds at CONFIDENCE."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: Int64Array, num_solved: Int64Array, k: int) -> Float64Array:
    """float64 [P]: the unbiased estimate for each prompt that one of k samples solves it, 1 - C(n-c, k) / C(n, k), from n >= k
    samples of which c solve it, int64 [P] each (Chen et al. 2021, arXiv:2107.03374, equation 1, as the product that its listing
    computes, which no large binomial enters)."""
    if (num_samples < k).any():
        raise ValueError(f"pass@{k} of {int(num_samples.min())} samples; expected at least {k} of each prompt")
    none_solves = np.ones(len(num_samples))
    unsolved = num_samples - num_solved
    for drawn in range(k):
        none_solves *= np.maximum(unsolved - drawn, 0) / (num_samples - drawn)
    return 1.0 - none_solves


def pass_at_k_interval(num_samples: Int64Array, num_solved: Int64Array, k: int) -> Interval:
    """The mean of pass@k over P prompts, P >= 1, and how far it might be from that of all such prompts.

    Of one sample a prompt it is a share, with Wilson's score interval (Wilson 1927, JASA 22:209-212). Otherwise prompts are
    drawn anew with replacement, NUM_RESAMPLES times, always the same draws: the percentile bootstrap (Efron and Tibshirani
    1993, section 13.3). That has no width where all prompts have the same estimate.
    """
    estimates = pass_at_k(num_samples, num_solved, k)
    if k == 1 and (num_samples == 1).all():
        return _wilson(float(estimates.mean()), len(estimates))
    low, high = np.quantile(_resampled_means(estimates), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(mean=float(estimates.mean()), low=float(low), high=float(high))


def pass_metrics(solved: BoolArray, prompt_of: Int32Array, ks: Sequence[int], *, with_bounds: bool) -> dict[str, float]:
    """`eval/pass@K` for each k, from samples, bool [N], and the prompt that each is of, int32 [N]; with bounds also
    `eval/pass@K_low` and `eval/pass@K_high`."""
    _, index, num_samples = np.unique(prompt_of, return_inverse=True, return_counts=True)
    num_solved = np.bincount(index, weights=solved).astype(np.int64)
    metrics: dict[str, float] = {}
    for k in ks:
        name = f"eval/pass@{k}"
        if with_bounds:
            found = pass_at_k_interval(num_samples, num_solved, k)
            metrics |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
        else:
            metrics[name] = float(pass_at_k(num_samples, num_solved, k).mean())
    return metrics


def _resampled_means(values: Float64Array) -> Float64Array:
    """float64 [NUM_RESAMPLES]: many at once, in blocks that stay small where there are many prompts."""
    random, number = np.random.default_rng(0), len(values)
    block = max(1, 2**20 // number)
    blocks = [min(block, NUM_RESAMPLES - start) for start in range(0, NUM_RESAMPLES, block)]
    return np.concatenate([values[random.integers(number, size=(size, number))].mean(axis=1) for size in blocks])


def _wilson(share: float, number: int) -> Interval:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    center = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * (share * (1 - share) / number + z * z / (4 * number * number)) ** 0.5
    return Interval(mean=share, low=max(0.0, center - half), high=min(1.0, center + half))
