"""The tiers of tests: `make test` runs every behaviour once, `make test-all` every case.

`@pytest.mark.wide` marks what `make test` leaves out: a function, a class, or a module by its `pytestmark`. Its arguments name
the cases that `make test` runs all the same:

- `keep=["one rank", ...]`: the cases of these ids;
- `pairwise=True`: as many as it takes that each two values of different parameters meet in one;
- `sample=15`: so many, spread evenly over all.

A test that finds a planted fault of `tests/mutants` is always run. pytest without `--narrow` runs every case.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import combinations

import attrs
import pytest

MARK = "wide"
Value = tuple[str, Hashable]
"""A parameter's name, and one of its values or that value's index."""


def wide_items(items: Sequence[pytest.Item], killers: Collection[str]) -> set[pytest.Item]:
    """Return the items that `make test` leaves out. UsageError where a mark keeps an id that no case has."""
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[_function_of(item)].append(item)
    wide: set[pytest.Item] = set()
    for cases in functions.values():
        if (mark := cases[0].get_closest_marker(MARK)) is not None:
            kept = kept_cases(cases, **mark.kwargs)
            wide.update(case for number, case in enumerate(cases) if number not in kept and not _is_killer(case, killers))
    return wide


def kept_cases(cases: Sequence[pytest.Item], keep: Sequence[str] = (), pairwise: bool = False, sample: int = 0) -> set[int]:
    """Return the numbers of the cases that a mark with these arguments keeps."""
    ids = [_id_of(case) for case in cases]
    if unknown := set(keep) - set(ids):
        raise pytest.UsageError(f"{_function_of(cases[0])} keeps {sorted(unknown)}; expected ids of its cases, which are {ids}")
    kept = {number for number, name in enumerate(ids) if name in keep}
    if sample:
        kept.update(number * len(cases) // sample for number in range(sample))
    if pairwise:
        kept.update(cover([_values_of(case) for case in cases], 2, kept))
    return kept


def each_part(names: Sequence[str]) -> list[str]:
    """Return names that hold every part of any of them: `tp2/qwen3/packed` has three parts."""
    chosen = cover([tuple(enumerate(name.split("/"))) for name in names], 1)
    return [names[number] for number in sorted(chosen)]


def cover(rows: Sequence[Sequence[Hashable]], size: int, kept: Iterable[int] = ()) -> set[int]:
    """Return the numbers of rows that, with those kept already, hold each combination of so many values that any row holds.

    Greedy: the row with the most combinations that no other has yet comes next, the first of equals. A row of fewer values is
    one combination.
    """
    combined = [set(combinations(row, min(size, len(row)))) for row in rows]
    chosen = set(kept)
    missing = set().union(*combined).difference(*(combined[number] for number in chosen))
    while missing:
        best = max(range(len(rows)), key=lambda number: len(combined[number] & missing))
        chosen.add(best)
        missing -= combined[best]
    return chosen


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _id_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _is_killer(item: pytest.Item, killers: Collection[str]) -> bool:
    """Return whether a planted fault names the item, the function of which it is a case, or its file."""
    return not {item.nodeid, _function_of(item), item.nodeid.partition("::")[0]}.isdisjoint(killers)


def _values_of(item: pytest.Item) -> tuple[Value, ...]:
    """The values of a case's parameters; where one is a record of attrs, those of its fields."""
    callspec = getattr(item, "callspec", None)
    return tuple(_split(callspec.params, callspec.indices)) if callspec is not None else ()


def _split(params: dict[str, object], indices: dict[str, int]) -> Iterator[Value]:
    for name, value in params.items():
        if attrs.has(type(value)):
            yield from ((f"{name}.{key}", repr(own)) for key, own in attrs.asdict(value, recurse=False).items())
        else:
            yield name, indices[name]
