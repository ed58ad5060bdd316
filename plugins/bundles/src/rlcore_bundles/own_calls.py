"""The arguments of the calls of two own loops' steps, side by side."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from rlcore.spi import Problem
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.file_digests import leaves

OWN_LOOP = "a step of a program's own loop"


def own_step_problems(good: Bundle, bad: Bundle) -> Iterator[Problem]:
    """Yield a problem where one bundle alone is of an own loop, or the calls of the two differ: no recipe names these."""
    if good.own_step is None and bad.own_step is None:
        return
    if good.own_step is None or bad.own_step is None:
        found, expected = f"{OWN_LOOP}, and a run's", "two of runs or two of own loops"
        yield Problem(path="GOOD, BAD", found=found, expected=expected, remedy="Name another bundle.")
        return
    if changes := differing_calls(good, bad):
        found = "; ".join(f"{name} = {second!r}, in the good one {first!r}" for name, first, second in changes)
        remedy = "That is a difference of the programs. Record both steps with equal calls to find another one."
        yield Problem(path="GOOD, BAD", found=found, expected="equal arguments of the session's calls", remedy=remedy)


def differing_calls(first: Bundle, second: Bundle) -> list[tuple[str, Any, Any]]:
    """The arguments that differ in the calls of two steps of own loops, each with both values."""
    one, other = (_calls(bundle) for bundle in (first, second))
    names = (name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name))
    return [(name, one.get(name), other.get(name)) for name in names]


def _calls(bundle: Bundle) -> Mapping[str, Any]:
    """The arguments of the calls of a step, as dotted keys."""
    assert bundle.own_step is not None, "a bundle of an own loop"
    [update] = bundle.updates
    counts = {"num_loss_tokens": update.num_loss_tokens, "num_loss_sequences": update.num_loss_sequences}
    own = {**attrs.asdict(bundle.own_step), "loss": update.loss, "config": dict(update.loss_config), "counts": counts}
    return dict(leaves(own))
