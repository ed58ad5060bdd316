"""Finds the component that brings the difference between two bundles, by replays that swap one component or several.

The bad bundle's step is computed again from its own samples: as it was, and with the good one's settings. What differs in the
second alone is brought by a setting; what differs in the first too is brought by something that no setting names.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlcore.reading import parse_toml
from rlcore.spi import ConfigError, Problem
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.components import Change, can_show_in, changes_of, component_of
from rlcore_bundles.file_digests import file_digests, leaves
from rlcore_bundles.group_search import OutOfReplaysError, smallest_set
from rlcore_bundles.interpreters import executable
from rlcore_bundles.own_calls import own_step_problems
from rlcore_bundles.rows import Row
from rlcore_bundles.run_difference import differing_versions
from rlcore_bundles.swaps import MOST_REPLAYS, Swaps, sides_of
from rlcore_bundles.trials import Trials
from rlcore_bundles.undeclared import from_undeclared, of_good_step, probed
from rlcore_bundles.verdicts import Bisection, Evidence, from_inputs

GENERATES = ("generator", "refit", "async")


def bisect(
    good: Bundle,
    bad: Bundle,
    pythons: Sequence[Path] = (),
    *,
    most: int = MOST_REPLAYS,
    trusts: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Bisection:
    """Find the component that brings the difference of `bad` to `good`, in at most so many replays. `pythons` are
    interpreters of other environments. `trusts`: code that comes with a model is executed. ConfigError where an interpreter is
    missing, a bundle has no prompts or no weights, or the calls of two own loops differ."""
    if problems := [*_problems("good", good), *_problems("bad", bad), *own_step_problems(good, bad)]:
        raise ConfigError(problems)
    others = [Path(executable(python)) for python in pythons]
    first, second = sides_of(good, bad, trusts=trusts)
    search = Swaps(good=first, bad=second, pythons=others, tell=tell, most=most)
    changes = changes_of(first.settings, second.settings)
    evidence = _evidence(search, changes)
    trials = search.trials(second)
    own = trials.run_own("the bad step as it was", 2)
    base = search.with_changes(trials, changes, frozenset()) if changes else own
    swapped = base.first(exact=False)
    if swapped is not None and own.agrees_up_to(swapped.quantity, exact=False):
        return _declared(search, trials, changes, swapped, evidence, exact=False)
    if (row := own.first(exact=False)) is not None:
        return from_undeclared(search, trials, own, row, evidence)
    if own.first(exact=True) is None and (row := base.first(exact=True)) is not None:
        return _declared(search, trials, changes, row, evidence, exact=True)
    if (row := own.first(exact=True)) is not None and (found := probed(trials, row, evidence, exact=True)):
        return found
    try:
        return of_good_step(search, evidence) or from_inputs(good, bad, evidence)
    except OutOfReplaysError:
        return from_inputs(good, bad, evidence)


def _problems(name: str, bundle: Bundle) -> Iterator[Problem]:
    """Yield what keeps a bundle's step from being computed again."""
    if bundle.prompts != "kept":
        yield Problem(path=name, found=f"a bundle whose prompts are {bundle.prompts}", expected="one with its prompts")
    if bundle.weight_version > 0 and (bundle.weights == "none" or bundle.directory is None):
        found = f"a bundle without weights, of weight version {bundle.weight_version}"
        remedy = "Record the step with --weights state."
        yield Problem(path=name, found=found, expected="the weights at the beginning of the step", remedy=remedy)


def _declared(
    search: Swaps, trials: Trials, changes: Sequence[Change], first: Row, evidence: Evidence, *, exact: bool
) -> Bisection:
    """The result for the smallest set of changed components that brings a quantity. Those in which it can show come first."""
    names = sorted((change.name for change in changes), key=lambda name: not can_show_in(name, first.quantity))
    likely = [name for name in names if can_show_in(name, first.quantity)]

    known = names
    """The smallest set that is known to bring it."""

    def brings(some: frozenset[str]) -> bool:
        nonlocal known
        found = search.with_changes(trials, changes, some).agrees_up_to(first.quantity, exact=exact)
        if found and len(some) < len(known):
            known = [name for name in names if name in some]
        return found

    is_complete = True
    try:
        if likely and len(likely) < len(names) and brings(frozenset(likely)):
            names = likely
        names = smallest_set(names, brings)
    except OutOfReplaysError:
        names, is_complete = known, False
    guilty = [change for change in changes if change.name in names]
    lines = [line for change in guilty for line in change.lines(search.good.settings, search.bad.settings)]
    return evidence.found(names, "setting", first, lines, exact=exact, is_complete=is_complete)


def _evidence(search: Swaps, changes: Sequence[Change]) -> Evidence:
    good, bad = search.good, search.bad
    recipes = [parse_toml(side.bundle.recipe) for side in (good, bad)]
    generating = [{key: value for key, value in leaves(recipe) if key.partition(".")[0] in GENERATES} for recipe in recipes]
    of_generator = [line for one in changes_of(*generating) for line in one.lines(*generating)]
    found = [line for change in changes for line in change.lines(good.settings, bad.settings)] + of_generator
    versions = (side.bundle.environment["distributions"] for side in (good, bad))
    found += [f"{name} {after}; in the good one {before}" for name, before, after in differing_versions(*versions)]
    digests = [side.bundle.environment.get("files", {}) for side in (good, bad)]
    pairs = [digests, (digests[0], file_digests(recipes[0])), (digests[1], file_digests(recipes[1]))]
    keys = {key for one, other in pairs for key in one.keys() & other.keys() if one[key] != other[key]}
    files = {key: component_of(key).name for key in sorted(keys)}
    return Evidence(changes=found, differing_files=files, of_generator=of_generator, done=search.done)
