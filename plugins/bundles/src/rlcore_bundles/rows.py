"""Rows of a comparison: the numbers of a quantity on two sides, and how much of their difference is rounding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi.arrays import AnyArray, Int64Array

FACTOR = 8.0
"""Roundings of activations, in every layer, in units of one rounding of all weights."""
UNITS_OF_FLOAT32 = 4 * 2.0**-23
"""Share of a number that a few operations in float32 may change."""
Verdict: TypeAlias = Literal["equal", "rounding", "differs", "not compared"]
Float64Array: TypeAlias = NDArray[np.float64]


@frozen(kw_only=True)
class Row:
    """The comparison of one quantity."""

    quantity: str
    verdict: Verdict
    count: int = 0
    """The numbers compared."""
    difference: float = 0.0
    """The greatest absolute difference, of those beyond their bound where there are any."""
    bound: float = 0.0
    """The bound there."""
    where: str = ""
    """The place of that difference, with both values."""
    reason: str = ""
    """The cause, where the quantity is not compared."""

    @classmethod
    def of(
        cls,
        quantity: str,
        sides: Mapping[str, AnyArray],
        bounds: Float64Array | float,
        place: Callable[[int], str],
        scale: float = 0.0,
    ) -> Self:
        """Compare the numbers [n] of two named sides. A few units of float32 are added to the bounds, [n] or one for all;
        `scale` is the sum of absolute parts, of a quantity that is a sum."""
        one, other = (numbers.astype(np.float64) for numbers in sides.values())
        first, second = sides
        if len(one) != len(other):
            where = f"{first} {len(one)} numbers, {second} {len(other)}"
            return cls(quantity=quantity, verdict="differs", count=len(one), where=where)
        if not len(one):
            return cls(quantity=quantity, verdict="not compared", reason="it has no numbers")
        found, most = differences(one, other), bounds + units(one, other, scale)
        beyond = found > most
        worst = int(np.where(beyond, found, -1.0).argmax() if beyond.any() else found.argmax())
        where = f"{place(worst)}: {first} {one[worst]:.9g}, {second} {other[worst]:.9g}"
        return cls(
            quantity=quantity,
            verdict="differs" if beyond.any() else "rounding" if found.any() else "equal",
            count=len(one),
            difference=float(found[worst]),
            bound=float(most[worst]),
            where=where if found.any() else "",
        )


def differences(one: Float64Array, other: Float64Array) -> Float64Array:
    """float64 [n]: absolute differences; inf where one side alone is NaN."""
    with np.errstate(invalid="ignore"):
        found = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other))
    return np.where(np.isnan(found), np.inf, found)


def units(one: Float64Array, other: Float64Array, scale: float = 0.0) -> Float64Array:
    """float64 [n]: a few units of float32 of the greater of two numbers, or of `scale`."""
    greatest = np.maximum(*(np.nan_to_num(np.abs(numbers), posinf=0.0) for numbers in (one, other)))
    found: Float64Array = UNITS_OF_FLOAT32 * np.maximum(greatest, scale)
    return found


def place_of(offsets: Int64Array, token: int) -> tuple[int, int]:
    """The sequence of a token of a packed batch, and its place there."""
    sequence = int(np.searchsorted(offsets, token, side="right")) - 1
    return sequence, token - int(offsets[sequence])


def table(heading: str, rows: Sequence[Row], result: Callable[[Row], str] = lambda row: row.verdict) -> list[str]:
    """The lines of a table of rows, with its head."""
    width = max(len(row.quantity) for row in rows)
    lines = [f"{heading:<{width}}  {'numbers':>8}  {'difference':>10}  {'bound':>9}  result"]
    for row in rows:
        if row.verdict == "not compared":
            lines.append(f"{row.quantity:<{width}}  {'':>8}  {'':>10}  {'':>9}  not compared: {row.reason}")
        else:
            figures = f"{row.count:>8,}  {row.difference:>10.3g}  {row.bound:>9.2g}"
            lines.append(f"{row.quantity:<{width}}  {figures}  {result(row)}")
    return lines
