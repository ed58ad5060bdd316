"""Another library's values, each of which is taken once, or told with what becomes of it."""

import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from attrs import field, frozen

from rlcore.spi import ConfigError, Problem
from rlcore.spi.importing import ImportedRecipe, Unmapped

UNKNOWN = "not known to this importer: look up what it does"
UNREAD = "not read in a recipe of this kind"
SWITCHES = ("enabled", "enable")
LONGEST_VALUE = 80
LARGEST_INTEGER = 2**63
EMPTY: tuple[Any, ...] = (None, [], {}, "")
OFF = (*EMPTY, False)
"""Values that switch off what a key is about, where its row names no others."""
_FLAGS: Mapping[str, bool] = {"true": True, "false": False}


@frozen(kw_only=True)
class Dropped:
    """A listed key that has no counterpart."""

    pattern: str
    """A dotted key; with `.*` at its end all keys of a table, whose keys must all have the same fate."""
    why: str
    changes_meaning: bool = False
    neutral: tuple[Any, ...] = ()
    """The values at which nothing differs, null beside them; where there are none, those of OFF, or of EMPTY."""

    def is_off(self, value: Any) -> bool:
        """Whether nothing differs at a value. In a table that is passed on false is as much of a choice as true."""
        neutral = self.neutral or (EMPTY if self.changes_meaning and self.pattern.endswith(".*") else OFF)
        return value is None or any(_same(value, one) for one in neutral)


def _same(value: Any, other: Any) -> bool:
    """Equality in which True is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def rows(
    why: str, keys: str, *, prefix: str = "", changes_meaning: bool = False, neutral: tuple[Any, ...] = ()
) -> tuple[Dropped, ...]:
    """Rows of keys, written with spaces between them and without their prefix, that share a reason."""
    names = [f"{prefix}.{key}" if prefix else key for key in keys.split()]
    return tuple(Dropped(pattern=name, why=why, changes_meaning=changes_meaning, neutral=neutral) for name in names)


@frozen(kw_only=True, eq=False)
class Source:
    """The values of one recipe. Only keys of `mapped` can be taken, so that the table in the documents is the code's."""

    values: Mapping[str, Any]
    """Nested tables, with all references resolved."""
    mapped: Mapping[str, str]
    """What becomes of each key that is read."""
    dropped: Sequence[Dropped]
    """What becomes of each other key that is listed: by its own row, else the first of a table around it."""
    by_key: Mapping[str, Dropped] = field(init=False)
    """Rows of single keys."""
    partial_switches: Collection[str] = ()
    """Keys `enable` and `enabled` that switch off less than the table which they are in."""
    aliases: dict[str, str] = field(factory=dict)
    """Tables whose names are the user's, and those whose rows theirs are."""
    taken: dict[str, None] = field(factory=dict)
    """Keys, the last that was taken at the end."""
    ignored: set[str] = field(factory=set)
    """Tables of which that library reads nothing in such a recipe."""
    reports: list[Unmapped] = field(factory=list)
    problems: list[Problem] = field(factory=list)

    @by_key.default
    def _by_key(self) -> Mapping[str, Dropped]:
        return {row.pattern: row for row in reversed(self.dropped) if "*" not in row.pattern}

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key as it is written, which counts as mapped from then on, a table with all that is in it; the default
        where it is not there or null."""
        assert key in self.mapped, f"{key} is not in the table of mapped keys"
        self.taken.pop(key, None)
        self.taken[key] = None
        found = self.look(key)
        return default if found is None else found

    def number(
        self,
        key: str,
        default: Any = None,
        *,
        least: float = -math.inf,
        above: float = -math.inf,
        most: float = math.inf,
        infinite: bool = False,
    ) -> Any:
        """A key's number within its bounds; infinity where it may be."""
        found = self.take(key)
        if found is None:
            return default
        try:
            value = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        is_finite = math.isfinite(value) or (infinite and value == math.inf)
        if is_finite and least <= value <= most and value > above:
            return value
        bounds = ((" of at least ", least), (" above ", above), (" of at most ", most))
        words = "".join(f"{word}{bound:g}" for word, bound in bounds if math.isfinite(bound))
        return self._wrong(key, found, f"a {'' if infinite else 'finite '}number{words}", default)

    def integer(self, key: str, default: Any = None, *, least: float = -math.inf) -> Any:
        """A key's whole number, never less than `least`."""
        num_problems = len(self.problems)
        value = self.number(key, default, least=least)
        if len(self.problems) > num_problems or value is default:
            return value
        if value.is_integer() and abs(value) < LARGEST_INTEGER:
            return int(value)
        return self._wrong(key, self.look(key), "a whole number of 64 bits", default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A key's true or false."""
        found = self.take(key)
        value = _FLAGS.get(found.lower(), found) if isinstance(found, str) else found
        if value is None or isinstance(value, bool):
            return default if value is None else value
        return bool(self._wrong(key, found, "true or false", default))

    def text(self, key: str, default: Any = None) -> Any:
        """A key's text, of which numbers and names are."""
        found = self.take(key)
        if found is None or isinstance(found, str | int | float):
            return default if found is None else str(found)
        return self._wrong(key, found, "a text", default)

    def table(self, key: str) -> Mapping[str, Any]:
        """A key's table, all of whose keys the caller reads; empty where it is not there."""
        found = self.take(key, {})
        return found if isinstance(found, Mapping) else self._wrong(key, found, "a table", {})

    def _wrong(self, key: str, found: Any, expected: str, default: Any) -> Any:
        self.problems.append(Problem(path=key, found=_shown(found), expected=expected))
        return default

    def refuse(self, key: str, expected: str, remedy: str = "") -> None:
        """Note a problem with a key's value; `recipe` tells all."""
        self.problems.append(Problem(path=key, found=_shown(self.look(key)), expected=expected, remedy=remedy))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """ConfigError with all problems that were noted; and where the last value that was taken cannot be computed with."""
        try:
            yield
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            key = next(reversed(self.taken), "")
            expected = "a value of the type that the key has in that library"
            self.problems.append(Problem(path=key, found=f"{_shown(self.look(key))} ({error})", expected=expected))
            raise ConfigError(self.problems) from error
        if self.problems:
            raise ConfigError(self.problems)

    def look(self, key: str) -> Any:
        """The value of a key, which may be mapped or not; None where it is not there."""
        found: Any = self.values
        for name in key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        return found

    def report(self, key: str, why: str, *, changes_meaning: bool = True) -> None:
        """Tell of a key that is taken but means something else here."""
        self.reports.append(Unmapped(key=key, value=self.look(key), why=why, changes_meaning=changes_meaning))

    def recipe(self, values: Mapping[str, Any]) -> ImportedRecipe:
        """The recipe with all that is to be told: unknown keys first, then what changes the meaning; the number of other keys
        that switch something off."""
        found, num_off = list(self.reports), 0
        for key, value in self._leaves(self.values):
            if _is_within(key, self.taken):
                continue
            rule = self._rule(key)
            if rule is None:
                found.append(Unmapped(key=key, value=value, why=UNKNOWN, changes_meaning=True))
            elif rule.is_off(value) or self._is_disabled(key) or _is_within(key, self.ignored):
                num_off += 1
            else:
                found.append(Unmapped(key=key, value=value, why=rule.why, changes_meaning=rule.changes_meaning))
        told = sorted(found, key=lambda one: (one.why != UNKNOWN, not one.changes_meaning))
        return ImportedRecipe(values=values, unmapped=tuple(told), num_off=num_off)

    def _rule(self, key: str) -> Dropped | None:
        """The row of a key that was not taken, None where it is not listed."""
        for table, listed in self.aliases.items():
            if key.startswith(f"{table}."):
                key = listed + key.removeprefix(table)
                break
        if key in self.mapped:
            return Dropped(pattern=key, why=UNREAD, changes_meaning=True)
        if key in self.by_key:
            return self.by_key[key]
        return next((row for row in self.dropped if "*" in row.pattern and fnmatchcase(key, row.pattern)), None)

    def _is_disabled(self, key: str) -> bool:
        """Whether a table around a listed key says `enabled: false` by a key that is listed."""
        names = key.split(".")
        switches = (".".join((*names[:depth], switch)) for depth in range(1, len(names)) for switch in SWITCHES)
        counted = (switch for switch in switches if switch != key and switch not in self.partial_switches)
        return any(self.look(switch) is False and self._rule(switch) is not None for switch in counted)

    def ignore(self, *tables: str) -> None:
        """Count a table's listed keys as off: the other library does not read them in such a recipe."""
        self.ignored.update(tables)

    def _leaves(self, tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tables.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value:
                yield from self._leaves(value, f"{key}.")
            else:
                yield key, value


def _is_within(key: str, tables: Container[str]) -> bool:
    names = key.split(".")
    return any(".".join(names[:depth]) in tables for depth in range(1, len(names) + 1))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
