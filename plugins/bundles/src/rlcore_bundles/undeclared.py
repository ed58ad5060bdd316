"""Finds what no setting names: another version of a package, a changed file, the generator, or a part of the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.registry.discovery import discover
from rlcore.spi import GENERATION_LOGPROBS, WEIGHT_VERSIONS, RlcoreError
from rlcore_bundles.components import (
    CLIP,
    FORWARD,
    GRADIENT,
    LOGPROBS,
    LOSS,
    METRICS,
    RATE,
    RATIOS,
    REFERENCE,
    WEIGHTS,
    can_show_in,
    layout_settings,
    nested,
)
from rlcore_bundles.difference import GENERATOR, MINIBATCHES, PROMPTS, REWARD
from rlcore_bundles.group_search import OutOfReplaysError
from rlcore_bundles.replaying import logprobs_at, plan_of
from rlcore_bundles.rows import Row
from rlcore_bundles.swaps import Swaps
from rlcore_bundles.trials import Outcome, Trials
from rlcore_bundles.verdicts import Bisection, Evidence

USUAL = {
    PROMPTS: "environment",
    REWARD: "reward",
    GENERATOR: "generator",
    MINIBATCHES: "minibatches",
    REFERENCE: "reference",
    "values": "critic",
    LOGPROBS: "trainer",
    RATIOS: "trainer",
    "previous_logprobs": "trainer",
    LOSS: "loss",
    GRADIENT: "trainer",
    CLIP: "trainer",
    METRICS: "loss",
    RATE: "trainer",
    WEIGHTS: "trainer",
}
"""The component of each quantity, where nothing says more: by the beginning of the quantity's own name."""
ONE_EACH = {"training.max_tokens_per_microbatch": 1}
"""Each sequence in a microbatch of its own."""
TEMPERATURES = (0.25, 4.0)
"""Temperatures relative to the recipe's, between which the generator's is looked for."""
NUM_HALVINGS = 24
REPEATED = "The step is repeated"


def from_undeclared(
    search: Swaps, trials: Trials, own: Outcome, first: Row, evidence: Evidence, *, of_good: bool = False
) -> Bisection:
    """The result for a step that its own settings do not repeat here. `of_good`: it is the good one's."""
    side = "good" if of_good else "bad"
    try:
        for python in search.pythons:
            if (found := _by_package(trials, python, own, first, evidence, side)) is not None:
                return found
        files = {key: name for key, name in evidence.differing_files.items() if can_show_in(name, first.quantity)}
        if files:
            lines = [f"{key}: the file is not the same in the two runs, or has changed since" for key in files]
            return evidence.found(sorted(set(files.values())), "file", first, lines)
        if first.quantity == GENERATOR and _trainers_row(own) is None and not of_good:
            # The trainer repeats itself. Whether it or the generator is wrong, the good step says.
            return of_good_step(search, evidence) or _of_generator(search, trials, first, evidence)
        if (found := probed(trials, first, evidence, exact=False)) is not None:
            return found
    except OutOfReplaysError:
        pass
    name = _usual(_trainers_row(own) or first)
    remark = f"The {side} run computed it otherwise than this installation does with the same settings."
    return evidence.found([name], "not in the recipe", first, _other_versions(trials, own, side), remark=remark)


def of_good_step(search: Swaps, evidence: Evidence) -> Bisection | None:
    """The result where this installation does not repeat the good step; None where it does."""
    trials = search.trials(search.good)
    own = trials.run_own("the good step as it was", 1)
    if (row := own.first(exact=False)) is not None:
        found = from_undeclared(search, trials, own, row, evidence, of_good=True)
        # The good run's generator and trainer may have disagreed too.
        is_known = row.quantity != GENERATOR or found.remark.startswith(REPEATED) or _trainers_row(own) is not None
        return found if is_known else None
    if (row := own.first(exact=True)) is not None:
        return probed(trials, row, evidence, exact=True)
    return None


def probed(trials: Trials, first: Row, evidence: Evidence, *, exact: bool) -> Bisection | None:
    """The result for a way to compute that repeats a step; None where none does, or where no way of it decides the quantity."""
    own = first.quantity.rpartition(": ")[2]
    if not any(own.startswith(kind) for kind in (*FORWARD, LOSS, GRADIENT, METRICS)):
        return None
    ways: list[tuple[str, str, Callable[[str], Outcome]]] = [
        ("packing", "each sequence by itself", lambda what: trials.run(what, {**trials.settings, **ONE_EACH})),
        ("attention kernel", "torch's plain attention", lambda what: trials.run(what, probe="attention kernel")),
        ("dtype of the head", "the head in float32", lambda what: trials.run(what, probe="dtype of the head")),
    ]
    if layout := layout_settings(trials.bundle):
        ranks = f"the {layout['cluster.gpus_per_node']} ranks of its run"
        ways.insert(0, ("layout", ranks, lambda what: trials.run(what, {**trials.settings, **layout})))
    if not exact and (other := _other_trainer(trials)) is not None:
        ways.append(("trainer", f"the trainer {other}", lambda what: trials.run(what, _by_trainer(trials, other))))
    try:
        for name, way, run in ways:
            if run(f"the same step, {way}").agrees_up_to(first.quantity, exact=exact):
                remark = f"{REPEATED} with {way}, and not as this installation computes it."
                return evidence.found([name], "not in the recipe", first, (), exact=exact, remark=remark)
    except OutOfReplaysError:
        pass
    return None


def _by_package(trials: Trials, python: Path, own: Outcome, first: Row, evidence: Evidence, side: str) -> Bisection | None:
    """The result where an interpreter of another environment repeats the step."""
    there = trials.run(f"the {side} step by {python}", python=python)
    if not there.agrees_up_to(first.quantity, exact=False):
        return None
    names = [name for name in sorted(there.versions) if there.versions[name] != own.versions.get(name)]
    lines = [f"{name} {there.versions[name]} there; here {own.versions.get(name, 'none')}" for name in names]
    remark = f"{REPEATED} by {python}, and not here: the {side} one."
    return evidence.found(names or ["environment of Python"], "package", first, lines, remark=remark)


def _of_generator(search: Swaps, trials: Trials, first: Row, evidence: Evidence) -> Bisection:
    """The result where the trainer's own log-probabilities are repeated, and those of the generator are others."""
    remark = "The trainer's log-probabilities are repeated; the generator's are those of another distribution."
    found = _temperature(search, trials, first)
    lines = list(evidence.of_generator)
    if found is not None:
        wanted = trials.settings["rollout.temperature"]
        lines = [f"the generator sampled at the temperature {found:.4g}; rollout.temperature = {wanted:g}", *lines]
    return evidence.found(["generator"], "not in the recipe", first, lines, remark=remark)


def _temperature(search: Swaps, trials: Trials, first: Row) -> float | None:
    """The temperature at which the generator's log-probabilities are those of the weights; None where there is none."""
    bundle = trials.bundle
    try:
        search.count("log-probabilities at other temperatures")
    except OutOfReplaysError:
        return None
    batch = bundle.sampled.batch
    mask = batch.loss_mask & (batch.token_columns[WEIGHT_VERSIONS] == bundle.weight_version)
    recorded = batch.token_columns[GENERATION_LOGPROBS][mask]
    usual = float(trials.settings["rollout.temperature"])
    plan = plan_of(bundle, trials.start, (), nested(trials.settings))
    with logprobs_at(bundle, plan, trials.start) as at:

        def distance(temperature: float) -> float:
            return float(np.abs(at(temperature)[mask] - recorded).mean())

        low, high = (usual * factor for factor in TEMPERATURES)
        share = (5**0.5 - 1) / 2  # golden-section search, on the logarithm
        for _ in range(NUM_HALVINGS):
            inner = [float(low ** (1 - part) * high**part) for part in (1 - share, share)]
            low, high = (low, inner[1]) if distance(inner[0]) < distance(inner[1]) else (inner[0], high)
        found = float((low * high) ** 0.5)
        residual = float(np.abs(at(found)[mask] - recorded).max())
    return found if residual <= max(first.bound, 1e-4) else None


def _trainers_row(own: Outcome) -> Row | None:
    """The first row of an update that differs, where the generator's differs before it."""
    return next((row for row in own.rows if row.verdict == "differs" and row.quantity != GENERATOR), None)


def _other_versions(trials: Trials, own: Outcome, side: str) -> list[str]:
    """Packages of which the run had another version than this environment has."""
    there: Any = trials.bundle.environment["distributions"]
    names = [name for name in sorted(there.keys() & own.versions.keys()) if there[name] != own.versions[name]]
    return [f"{name} {there[name]} in the {side} run; here {own.versions[name]}: try it with --python" for name in names]


def _usual(row: Row) -> str:
    own = row.quantity.rpartition(": ")[2]
    return next((name for kind, name in USUAL.items() if own.startswith(kind)), "algorithm")


def _other_trainer(trials: Trials) -> str | None:
    """Another installed trainer than that of the settings, which can compute the step."""
    names = [entry.name for entry in discover(()).entries if entry.role == "trainer" and entry.error is None]
    for name in sorted({*names} - {trials.settings["trainer.name"]}):
        try:
            plan_of(trials.bundle, trials.start, (), nested(_by_trainer(trials, name)))
        except RlcoreError:
            continue
        return name
    return None


def _by_trainer(trials: Trials, name: str) -> dict[str, object]:
    own = {key: value for key, value in trials.settings.items() if not key.startswith("trainer.")}
    return {**own, "trainer.name": name}
