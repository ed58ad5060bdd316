"""Reads another library's configuration: each key is mapped to the recipe, or reported with the reason."""

import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from attrs import field, frozen

from rlcore.spi import ConfigError, Problem
from rlcore_import.recipe import ImportedRecipe, Unmapped

UNKNOWN = "not known to this importer: look up what it does"
UNREAD = "not read in a recipe of this kind"
SWITCHES = ("enabled", "enable")
LONGEST_VALUE = 80
LARGEST_INTEGER = 2**63
EMPTY: tuple[Any, ...] = (None, [], {}, "")
OFF = (*EMPTY, False)
"""Values that switch an option off, where its row names no others."""
_FLAGS: Mapping[str, bool] = {"true": True, "false": False}


@frozen(kw_only=True)
class Dropped:
    """A key of the library's own files without a counterpart in recipes."""

    pattern: str
    """A dotted key; with `.*` at its end all keys of a table."""
    why: str
    changes_meaning: bool = False
    neutral: tuple[Any, ...] = ()
    """The values, besides null, that need no report. Default: OFF, or EMPTY for a table that is passed on."""

    def is_off(self, value: Any) -> bool:
        """Return whether a value needs no report. In a table that is passed on, false is a choice like true."""
        neutral = self.neutral or (EMPTY if self.changes_meaning and self.pattern.endswith(".*") else OFF)
        return value is None or any(_same(value, one) for one in neutral)


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; True does not equal 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def same(tables: str, why: str, keys: str, *neutral: Any) -> tuple[Dropped, ...]:
    """Return a row for each of the `keys` of each of the tables, both separated by spaces: what is trained is the same without
    them."""
    return _rows(tables, why, keys, neutral, changes_meaning=False)


def differs(tables: str, why: str, keys: str, *neutral: Any) -> tuple[Dropped, ...]:
    """Return such rows of keys without which what is trained differs, but for neutral values."""
    return _rows(tables, why, keys, neutral, changes_meaning=True)


def _rows(tables: str, why: str, keys: str, neutral: tuple[Any, ...], *, changes_meaning: bool) -> tuple[Dropped, ...]:
    names = [f"{table}.{key}" if table else key for table in tables.split() or [""] for key in keys.split()]
    return tuple(Dropped(pattern=name, why=why, changes_meaning=changes_meaning, neutral=neutral) for name in names)


def of_each(tables: Sequence[str], meanings: Mapping[str, str]) -> dict[str, str]:
    """Return the meanings of keys that several tables have alike, by full key."""
    return {f"{table}.{key}": meaning for key, meaning in meanings.items() for table in tables}


@frozen(kw_only=True, eq=False)
class Source:
    """The configuration that is imported. `take` allows keys of `mapped` alone, so the table in the docs is complete."""

    values: Mapping[str, Any]
    """Nested tables, with all references resolved."""
    mapped: Mapping[str, str]
    """The meaning in a recipe of each key that is read."""
    dropped: Sequence[Dropped]
    """Rows of the other known keys: a key's own row counts, else the first of a table that contains it."""
    by_key: Mapping[str, Dropped] = field(init=False)
    """Rows of single keys."""
    partial_switches: Collection[str] = ()
    """Keys `enable` and `enabled` that switch off a part of their table."""
    aliases: dict[str, str] = field(factory=dict)
    """Tables that the user named, with the listed table whose rows count for each."""
    taken: dict[str, None] = field(factory=dict)
    """Keys that were read, in order."""
    ignored: set[str] = field(factory=set)
    """Tables that the library does not read in this configuration."""
    reports: list[Unmapped] = field(factory=list)
    problems: list[Problem] = field(factory=list)

    @by_key.default
    def _by_key(self) -> Mapping[str, Dropped]:
        return {row.pattern: row for row in reversed(self.dropped) if "*" not in row.pattern}

    def take(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or the default where it is missing or null. The key, or the whole table, counts as mapped."""
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
        """Return a key's number within its bounds; infinity only with `infinite`."""
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
        """Return a key's whole number of at least `least`."""
        num_problems = len(self.problems)
        value = self.number(key, default, least=least)
        if len(self.problems) > num_problems or value is default:
            return value
        if value.is_integer() and abs(value) < LARGEST_INTEGER:
            return int(value)
        return self._wrong(key, self.look(key), "a whole number of 64 bits", default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a key's Boolean."""
        found = self.take(key)
        value = _FLAGS.get(found.lower(), found) if isinstance(found, str) else found
        if value is None or isinstance(value, bool):
            return default if value is None else value
        return bool(self._wrong(key, found, "true or false", default))

    def text(self, key: str, default: Any = None) -> Any:
        """Return a key's text; a number becomes a text."""
        found = self.take(key)
        if found is None or isinstance(found, str | int | float):
            return default if found is None else str(found)
        return self._wrong(key, found, "a text", default)

    def table(self, key: str) -> Mapping[str, Any]:
        """Return a key's table, empty where it is missing. The caller reads all of its keys."""
        found = self.take(key, {})
        return found if isinstance(found, Mapping) else self._wrong(key, found, "a table", {})

    def _wrong(self, key: str, found: Any, expected: str, default: Any) -> Any:
        self.problems.append(Problem(path=key, found=_shown(found), expected=expected))
        return default

    def refuse(self, key: str, expected: str, remedy: str = "") -> None:
        """Record a problem with a key's value; `checked` raises all of them."""
        self.problems.append(Problem(path=key, found=_shown(self.look(key)), expected=expected, remedy=remedy))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise ConfigError with all recorded problems; an error of the code is a problem of the key that was read last."""
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
        """Return the value of any key, without counting it as mapped; None where it is missing."""
        found: Any = self.values
        for name in key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        return found

    def report(self, key: str, why: str, *, changes_meaning: bool = True) -> None:
        """Report a mapped key whose meaning differs in the recipe."""
        self.reports.append(Unmapped(key=key, value=self.look(key), why=why, changes_meaning=changes_meaning))

    def recipe(self, values: Mapping[str, Any]) -> ImportedRecipe:
        """Return the recipe with its reports: unknown keys first, then those that change the meaning.

        Keys that are off are counted, not reported.
        """
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
        reports = sorted(found, key=lambda one: (one.why != UNKNOWN, not one.changes_meaning))
        return ImportedRecipe(values=values, unmapped=tuple(reports), num_off=num_off)

    def _rule(self, key: str) -> Dropped | None:
        """Return the row of a key that was not read; None for an unknown key."""
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
        """Return whether a table that contains the key has `enabled: false` or `enable: false`."""
        names = key.split(".")
        switches = (".".join((*names[:depth], switch)) for depth in range(1, len(names)) for switch in SWITCHES)
        counted = (switch for switch in switches if switch != key and switch not in self.partial_switches)
        return any(self.look(switch) is False and self._rule(switch) is not None for switch in counted)

    def ignore(self, *tables: str) -> None:
        """Count the known keys of tables as off: the library does not read them in this configuration."""
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
