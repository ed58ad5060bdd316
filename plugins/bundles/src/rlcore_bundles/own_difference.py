"""The place where two recorded steps of own loops part, without computing them again."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from attrs import frozen

from rlcore.run.storage.recipe_changes import recipe_changes
from rlcore.spi import ConfigError, Problem
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.difference import digests_row, quantities, token_place, with_common_names
from rlcore_bundles.header import HEADER
from rlcore_bundles.own_calls import differing_calls
from rlcore_bundles.rows import Row, place_of, table
from rlcore_bundles.run_difference import differing_versions
from rlcore_bundles.storage import read_bundle
from rlcore_bundles.verdicts import first_column


@frozen(kw_only=True)
class OwnDifference:
    """The differences of two steps of own loops."""

    changes: Sequence[str]
    """Keys of the recipes, arguments of calls, and versions of packages that differ."""
    rows: Sequence[Row]
    """The quantities in the order in which a step makes them, up to data that differ in their tokens."""

    @property
    def first(self) -> Row | None:
        """Return the first quantity that is not equal to the bit; None where all are."""
        return next((row for row in self.rows if row.verdict in ("differs", "rounding")), None)


def own_difference(first: Path, second: Path) -> OwnDifference | None:
    """Compare two bundles of own loops; None where neither path is a bundle. ConfigError where one path is no such bundle."""
    are_bundles = [(path / HEADER).is_file() for path in (first, second)]
    if not any(are_bundles):
        return None
    paths = {"FIRST": first, "SECOND": second}
    bundles = [read_bundle(path) if is_one else None for path, is_one in zip(paths.values(), are_bundles, strict=True)]
    remedy = "`rlcore bisect` compares two bundles of runs, and `rlcore replay` computes one again."
    expected = "two run directories, or two bundles that sessions wrote"
    problems = [
        Problem(
            path=key,
            found=f"{path}, {'a run directory' if one is None else 'a step of a run'}",
            expected=expected,
            remedy=remedy,
        )
        for (key, path), one in zip(paths.items(), bundles, strict=True)
        if one is None or one.own_step is None
    ]
    if problems:
        raise ConfigError(problems)
    one, other = (bundle for bundle in bundles if bundle is not None)
    return OwnDifference(changes=list(_changes(one, other)), rows=list(_rows(one, other)))


def lines_of(found: OwnDifference) -> Iterator[str]:
    """Yield the differences as text."""
    if found.changes:
        yield from ["different:", *(f"  {change}" for change in found.changes)]
    yield from table("quantity", found.rows)
    if found.first is None:
        yield "Every number of the two steps is equal to the last bit."
    else:
        yield f"The steps part in {found.first.quantity}: {found.first.where}."


def _changes(first: Bundle, second: Bundle) -> Iterator[str]:
    yield from (str(change) for change in recipe_changes(first.recipe, second.recipe))
    yield from (f"{name} {one!r} -> {other!r}" for name, one, other in differing_calls(first, second))
    versions = (bundle.environment["distributions"] for bundle in (first, second))
    yield from (f"{name} {one} -> {other}" for name, one, other in differing_versions(*versions))


def _rows(first: Bundle, second: Bundle) -> Iterator[Row]:
    if first.digests_before and second.digests_before:
        yield digests_row("weights before the step", first.digests_before, second.digests_before, rounded=False)
    one, other = first.trained, second.trained
    shared = min(one.num_tokens, other.num_tokens)
    differing = np.flatnonzero(one.tokens[:shared] != other.tokens[:shared])
    if len(differing) or not np.array_equal(one.offsets, other.offsets):
        token = "sample {}, token {}".format(*place_of(one.offsets, int(differing[0]))) if len(differing) else "lengths"
        yield Row(quantity="tokens", verdict="differs", count=one.num_tokens, where=token)
        return
    yield Row(quantity="tokens", verdict="equal", count=one.num_tokens)
    name, where = first_column(one, other)
    if one.token_columns.keys() != other.token_columns.keys() or (
        name and name.removeprefix("column ") not in one.token_columns
    ):
        yield Row(quantity=name, verdict="differs", count=one.num_tokens, where=where)
        return
    mask, place = one.loss_mask, token_place(one, one.loss_mask)
    for name, column in sorted(one.token_columns.items()):
        if column.ndim == 1:
            yield Row.of(name, {"first": column[mask], "second": other.token_columns[name][mask]}, 0.0, place)
    first, second = with_common_names([first, second])
    found = dict(quantities(second, first))
    for quantity, values in quantities(first, first):
        if quantity in found and quantity.startswith("update "):
            yield Row.of(quantity, {"first": values.numbers, "second": found[quantity].numbers}, 0.0, values.place)
    if first.digests_after and second.digests_after:
        yield digests_row("weights after the step", first.digests_after, second.digests_after, rounded=False)
