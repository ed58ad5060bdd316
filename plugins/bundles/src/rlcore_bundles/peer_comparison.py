"""Compares rlcore's terms with those of another framework, and names the conventions behind each difference.

A difference is rounding where it is within `FACTOR` times what the float32 of either side differs from its float64, plus a few
units of float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from attrs import evolve, field, frozen

from rlcore.spi.arrays import AnyArray
from rlcore_bundles.compared_batch import ComparedBatch, as_dtype
from rlcore_bundles.conventions import Convention, combinations_of, conventions_of, scaling
from rlcore_bundles.own_side import OwnSide
from rlcore_bundles.peers.terms import LossTerms
from rlcore_bundles.rows import FACTOR, Float64Array, Row, differences, units

MOST_SETS = 400
"""Sets of conventions that are tried for one term."""
QUANTILE = 0.9
"""Share of the roundings of a term that its bound covers: those of a few tokens, whose derivative jumps, do not count."""


@frozen(kw_only=True, eq=False)
class PeerTerms:
    """The values that another framework computed from a batch."""

    terms: Mapping[str, AnyArray]
    """float32 by term, at loss tokens."""
    wide: Mapping[str, AnyArray]
    """float64 by term, at loss tokens."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Metrics by the framework's names."""
    metric_names: Mapping[str, str] = field(factory=dict)
    """rlcore's names of those that have one."""


@frozen(kw_only=True)
class TermRow(Row):
    """The comparison of one term."""

    conventions: Sequence[str] = ()
    """The conventions that explain the difference, those of earlier terms too."""

    @property
    def is_explained(self) -> bool:
        """Return whether the term is equal, or its difference has a name."""
        return self.verdict != "differs" or bool(self.conventions)


@frozen(kw_only=True, eq=False)
class _Numbers:
    """The numbers of a term on one side, [n], and how far float32 moves each."""

    values: Float64Array
    rounding: Float64Array
    scale: float = 0.0
    """The sum of absolute parts, of a term that is a sum."""


Ours: TypeAlias = Callable[[OwnSide], _Numbers | None]


class Terms:
    """The terms of rlcore's side, each computed when it is asked for."""

    def __init__(self, side: OwnSide) -> None:
        self.side = side
        self._sides = [as_dtype(side, dtype) for dtype in (torch.float32, torch.float64)]
        self._losses: list[LossTerms] = []

    def numbers(self, term: str) -> _Numbers:
        """The numbers of a term, at loss tokens."""
        if term == "advantages":
            return _numbers(*(one.advantages()[one.samples.mask].numpy() for one in self._sides if one.samples is not None))
        narrow, wide = (self._at_tokens(one[term]) for one in self._of_loss())
        return _numbers(narrow, wide, scale=self._scale() if len(narrow) == 1 else 0.0)

    def metric(self, name: str) -> _Numbers | None:
        """A metric; None where the loss reports no such one."""
        found = [one.metrics.get(name) for one in self._of_loss()]
        return None if None in found else _numbers(*(np.array([one], np.float64) for one in found))

    @property
    def names(self) -> list[str]:
        """The terms that this side has."""
        of_loss = [] if self.side.update is None else self._of_loss()[0].names
        return [*([] if self.side.samples is None else ["advantages"]), *of_loss]

    def _of_loss(self) -> list[LossTerms]:
        if not self._losses:
            self._losses = [terms_of(one) for one in self._sides]
        return self._losses

    def _at_tokens(self, found: torch.Tensor) -> AnyArray:
        assert self.side.update is not None
        array: AnyArray = (found[self.side.update.mask] if found.ndim else found[None]).numpy()
        return array

    def _scale(self) -> float:
        terms = self._of_loss()[1]
        return float((terms["policy loss"] * terms["token weights"]).abs().sum())


def terms_of(side: OwnSide) -> LossTerms:
    """The terms of a side's loss."""
    assert side.update is not None
    options = side.options
    return LossTerms(side.loss, side.update, **has_of(options))


def has_of(options: Mapping[str, object]) -> dict[str, bool]:
    """The terms that a loss with these options has beside those of every loss."""
    return {
        "has_ratio": options["objective"] == "clipped",
        "has_kl": bool(options["kl_coefficient"]),
        "has_entropy": bool(options["entropy_coefficient"]),
    }


def compare_terms(batch: ComparedBatch, peer: PeerTerms, reasons: Mapping[str, str]) -> list[TermRow]:
    """Compare all terms and metrics. `reasons`: why "advantages" or "loss" is missing on either side."""
    return _Comparison(batch, peer).rows(reasons)


class _Comparison:
    """One comparison, with the conventions that it has found so far."""

    def __init__(self, batch: ComparedBatch, peer: PeerTerms) -> None:
        self._batch, self._peer = batch, peer
        width = 1 if batch.own.update is None else batch.own.update.mask.shape[1]
        self._known = list(conventions_of(batch.own, width))
        self._found: list[Convention] = []
        self._settled: list[tuple[str, Ours, _Numbers]] = []
        """The terms that are equal or explained, which a later convention may not undo."""
        self._replaced: dict[str, str] = {}
        """The text of a convention, by that of the one which it stands for since a later term."""
        self._own = Terms(batch.own)

    def rows(self, reasons: Mapping[str, str]) -> list[TermRow]:
        """The rows, in the order in which the terms follow from each other."""
        rows = (
            [TermRow(quantity="advantages", verdict="not compared", reason=reasons["advantages"])]
            if "advantages" in reasons
            else []
        )
        for term in self._own.names:
            if term in self._peer.terms:
                theirs = _numbers(self._peer.terms[term], self._peer.wide[term])
                rows.append(self._row(term, term, theirs, partial(_term, term)))
        if "loss" in reasons:
            rows.append(TermRow(quantity="loss", verdict="not compared", reason=reasons["loss"]))
        else:
            rows += self._metric_rows()
        return [evolve(row, conventions=tuple(dict.fromkeys(map(self._current, row.conventions)))) for row in rows]

    def _current(self, text: str) -> str:
        while text in self._replaced:
            text = self._replaced[text]
        return text

    def _metric_rows(self) -> Iterator[TermRow]:
        for theirs, ours in self._peer.metric_names.items():
            if theirs in self._peer.metrics and self._own.metric(ours) is not None:
                value = np.array([self._peer.metrics[theirs]], np.float64)
                one = _numbers(value.astype(np.float32), value)
                yield self._row("metrics", f"{ours} ({theirs})", one, partial(_metric, ours))

    def _row(self, term: str, name: str, theirs: _Numbers, ours: Ours) -> TermRow:
        plain = ours(self._batch.own)
        assert plain is not None
        row = self._explained(term, self._compared(term, name, plain, theirs), ours, theirs)
        if row.verdict != "differs" or self._fits(ours, self._with(term, ()), theirs) is not None:
            self._settled.append((term, ours, theirs))
        return row

    def _explained(self, term: str, row: TermRow, ours: Ours, theirs: _Numbers) -> TermRow:
        """The row with the conventions that explain its difference."""
        if row.verdict != "differs":
            return row
        earlier = self._with(term, ())
        if earlier and self._fits(ours, earlier, theirs) is not None:
            return evolve(row, conventions=_texts(earlier))
        new = self._explanation(term, ours, theirs)
        if not new and (changed := ours(_changed(self._batch.own, earlier))) is not None:
            factor = _factor(changed, theirs)
            if factor is None:
                return row
            scaled = scaling(term, factor, _changed(self._batch.own, self._found))
            if scaled is None:
                return evolve(row, conventions=(*_texts(earlier), f"{factor:.6g} times rlcore's"))
            new = (scaled,)
        self._take(new)
        return evolve(row, conventions=_texts(self._with(term, ())))

    def _with(self, term: str, chosen: Sequence[Convention]) -> list[Convention]:
        """The conventions of a term that were found so far, with these in place of others of their axes."""
        axes = {one.axis for one in chosen}
        return [*(one for one in self._found if term in one.terms and one.axis not in axes), *chosen]

    def _take(self, new: Sequence[Convention]) -> None:
        by_axis = {one.axis: one for one in new}
        self._replaced |= {one.text: by_axis[one.axis].text for one in self._found if one.axis in by_axis}
        self._found = [*(one for one in self._found if one.axis not in by_axis), *new]

    def _explanation(self, term: str, ours: Ours, theirs: _Numbers) -> tuple[Convention, ...]:
        """The smallest set of conventions under which the sides are equal, of these that which leaves the least; none is ()."""
        best: tuple[float, tuple[Convention, ...]] | None = None
        candidates = [one for one in self._known if term in one.terms and one not in self._found]
        for tried, chosen in enumerate(combinations_of(candidates)):
            if tried >= MOST_SETS or (best is not None and len(chosen) > len(best[1])):
                break
            left = self._fits(ours, self._with(term, chosen), theirs)
            if left is not None and (best is None or left < best[0]) and self._undoes_nothing(chosen):
                best = left, chosen
        return () if best is None else best[1]

    def _undoes_nothing(self, chosen: Sequence[Convention]) -> bool:
        """Return whether the terms before are equal under these conventions too."""
        axes = {one.axis for one in chosen}
        return all(
            self._fits(ours, self._with(term, [one for one in chosen if term in one.terms]), theirs) is not None
            for term, ours, theirs in self._settled
            if any(term in one.terms for one in (*chosen, *(one for one in self._found if one.axis in axes)))
        )

    def _fits(self, ours: Ours, chosen: Sequence[Convention], theirs: _Numbers) -> float | None:
        """The rest of the difference under some conventions; None where it is more than rounding."""
        found = ours(_changed(self._batch.own, chosen))
        if found is None or len(found.values) != len(theirs.values):
            return None
        differences, bounds = _differences(found, theirs)
        return None if (differences > bounds).any() else float(differences.max(initial=0.0))

    def _compared(self, term: str, name: str, ours: _Numbers, theirs: _Numbers) -> TermRow:
        sides = {"rlcore": ours.values, "the other": theirs.values}
        if len(ours.values) != len(theirs.values):
            return TermRow.of(name, sides, 0.0, str)
        return TermRow.of(name, sides, _roundings(ours, theirs), partial(self._place, term, count=len(ours.values)), ours.scale)

    def _place(self, term: str, index: int, *, count: int) -> str:
        rows = self._batch.sample_rows if term == "advantages" else self._batch.update_rows
        return "the update" if count == 1 or rows is None else rows.place(index)


def _term(term: str, side: OwnSide) -> _Numbers:
    return Terms(side).numbers(term)


def _metric(name: str, side: OwnSide) -> _Numbers | None:
    return Terms(side).metric(name)


def _changed(side: OwnSide, conventions: Sequence[Convention]) -> OwnSide:
    for one in conventions:
        side = one.apply(side)
    return side


def _texts(conventions: Sequence[Convention]) -> tuple[str, ...]:
    return tuple(one.text for one in conventions)


def _numbers(narrow: AnyArray, wide: AnyArray, *, scale: float = 0.0) -> _Numbers:
    values = narrow.astype(np.float64)
    with np.errstate(invalid="ignore"):
        rounding = np.abs(values - wide)
    return _Numbers(values=values, rounding=np.nan_to_num(rounding, nan=0.0, posinf=0.0), scale=scale)


def _differences(ours: _Numbers, theirs: _Numbers) -> tuple[Float64Array, Float64Array]:
    """The absolute differences, and the bound of each."""
    bounds = _roundings(ours, theirs) + units(ours.values, theirs.values, ours.scale)
    return differences(ours.values, theirs.values), bounds


def _roundings(ours: _Numbers, theirs: _Numbers) -> Float64Array:
    """The distance by which the roundings of both sides move each number."""
    rounding = ours.rounding + theirs.rounding
    usual = float(np.quantile(rounding, QUANTILE)) if len(rounding) else 0.0
    return FACTOR * (rounding + usual)


def _factor(ours: _Numbers, theirs: _Numbers) -> float | None:
    """The constant by which rlcore's numbers are multiplied to get the other's; None where there is none."""
    is_there = ours.values != 0
    if len(ours.values) != len(theirs.values) or not is_there.any() or not theirs.values.any():
        return None
    factor = float(np.median(theirs.values[is_there] / ours.values[is_there]))
    scaled = evolve(ours, values=ours.values * factor, rounding=ours.rounding * abs(factor), scale=ours.scale * abs(factor))
    differences, bounds = _differences(scaled, theirs)
    return factor if (differences <= bounds).all() and len(ours.values) > 1 else None  # of NaN neither holds
