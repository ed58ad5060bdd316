"""The calls of two steps of own loops side by side, and what commands on runs refuse of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlcore.spi import Problem
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.file_digests import leaves
from rlcore_bundles.header import HEADER

OWN_LOOP = "a step of a program's own loop"


def own_step_problems(good: Bundle, bad: Bundle) -> Iterator[Problem]:
    """Yield a problem where one bundle alone is of an own loop, or the calls of the two differ: no recipe names these."""
    if good.own_step is None and bad.own_step is None:
        return
    if good.own_step is None or bad.own_step is None:
        found, expected = f"{OWN_LOOP}, and a run's", "two of runs or two of own loops"
        yield Problem(path="GOOD, BAD", found=found, expected=expected, remedy="Name another bundle.")
        return
    first, second = (_calls(one) for one in (good, bad))
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    if names:
        found = ", ".join(f"{name} = {second.get(name)!r}, in the good one {first.get(name)!r}" for name in names)
        remedy = "That is a difference of the programs. Record both steps with equal calls to find another one."
        yield Problem(path="GOOD, BAD", found=found, expected="equal arguments of the session's calls", remedy=remedy)


def bundle_problem(path: Path, key: str) -> Iterator[Problem]:
    """Yield a problem where a path is a bundle, and a run's directory is expected."""
    if (path / HEADER).is_file():
        remedy = "`rlcore bisect` compares two bundles, and `rlcore replay` computes one again."
        yield Problem(path=key, found=f"{path}, a bundle", expected="a run directory", remedy=remedy)


def _calls(bundle: Bundle) -> Mapping[str, Any]:
    """The arguments of the calls of a step, as dotted keys."""
    assert bundle.own_step is not None, "a bundle of an own loop"
    [update] = bundle.updates
    counts = {"num_loss_tokens": update.num_loss_tokens, "num_loss_sequences": update.num_loss_sequences}
    own = {**attrs.asdict(bundle.own_step), "loss": update.loss, "config": dict(update.loss_config), "counts": counts}
    return dict(leaves(own))
