"""Figures over the steps, with as many points as a chart can show."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

MAX_BUCKETS = 250
"""Intervals of steps of a curve, of up to four points each."""
MAX_BARS = 120
SIGNIFICANT_DIGITS = 8
"""Ratios lie within millionths of 1."""

Point = tuple[int, float]


def curves(records: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Every figure of metrics.jsonl by name: `x` and `y` of its points, and the steps at which it was not finite."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    return {name: _curve(name, records) for name in names}


def m4(points: Sequence[Point], num_buckets: int = MAX_BUCKETS) -> list[Point]:
    """Points, ordered by step, of which each of `num_buckets` intervals keeps its first, last, least and greatest: what a line
    chart of that many pixels shows of all of them (M4, Jugel et al. 2014, doi:10.14778/2732951.2732953)."""
    if len(points) <= 4 * num_buckets:
        return list(points)
    first, last = points[0][0], points[-1][0]
    kept: list[Point] = []
    for _, group in groupby(points, key=lambda point: min(num_buckets - 1, (point[0] - first) * num_buckets // (last - first))):
        bucket = list(group)
        by_value = sorted(range(len(bucket)), key=lambda index: bucket[index][1])
        kept += [bucket[index] for index in sorted({0, len(bucket) - 1, by_value[0], by_value[-1]})]
    return kept


def bars(records: Sequence[Mapping[str, float]], names: Sequence[str], num_bars: int = MAX_BARS) -> dict[str, Any]:
    """Means of some figures over consecutive steps, one row a bar: the first `steps` of each, how many it holds, and `values`,
    in the order of `names`. Records without any of the figures have no part in it."""
    having = [record for record in records if any(name in record for name in names)]
    per_bar = max(1, math.ceil(len(having) / num_bars))
    groups = [having[start : start + per_bar] for start in range(0, len(having), per_bar)]
    means = [[rounded(sum(_finite(one.get(name, 0.0)) for one in group) / len(group)) for name in names] for group in groups]
    return {"steps": [int(group[0]["step"]) for group in groups], "num": [len(group) for group in groups], "values": means}


def medians(records: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """The median over all steps of each figure that has finite values: one slow step, such as the first, does not move it."""
    finite = {name: [record[name] for record in records if name in record and math.isfinite(record[name])] for name in names}
    return {name: rounded(median(values)) for name, values in finite.items() if values}


def rounded(value: float) -> float:
    """A finite value to the digits that a chart can show."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def evenly(items: Sequence[int], num: int) -> list[int]:
    """At most `num` of some items, the first and the last among them, evenly spread."""
    if len(items) <= num:
        return list(items)
    places = (
        dict.fromkeys(round(place * (len(items) - 1) / (num - 1)) for place in range(num))
        if num > 1
        else {len(items) - 1: None}
    )
    return [items[place] for place in places]


def _curve(name: str, records: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    points = [(int(record["step"]), float(record[name])) for record in records if name in record]
    shown = m4([point for point in points if math.isfinite(point[1])])
    return {
        "x": [step for step, _ in shown],
        "y": [rounded(value) for _, value in shown],
        "bad": [step for step, value in points if not math.isfinite(value)][:MAX_BUCKETS],
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
