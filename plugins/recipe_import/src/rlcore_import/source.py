"""Another library's values, of which each is taken once, or told of."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from attrs import field, frozen

from rlcore.spi import ConfigError, Problem
from rlcore.spi.importing import Unmapped

UNKNOWN = "not known to this importer: look up what it does"
ENABLED = "enabled"


@frozen(kw_only=True)
class Dropped:
    """Keys that have no counterpart."""

    pattern: str
    """A dotted key, with * as in file names."""
    why: str
    changes_meaning: bool = False
    neutral: tuple[Any, ...] = ()
    """Values that say nothing, beside null, false and what is empty."""

    def is_off(self, value: Any) -> bool:
        """Whether a value switches off what the key is about."""
        return value is None or value is False or value in ([], {}, "") or any(value == one for one in self.neutral)


@frozen(kw_only=True, eq=False)
class Source:
    """The values of one recipe. Only keys of `mapped` can be taken, so that the table in the documents is the code's."""

    values: Mapping[str, Any]
    """Nested tables, with all references resolved."""
    mapped: Mapping[str, str]
    """What becomes of each key that is read."""
    dropped: Sequence[Dropped]
    taken: dict[str, None] = field(factory=dict)
    """Keys, the last that was taken at the end."""
    reports: list[Unmapped] = field(factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as mapped from then on; the default where it is not there or null."""
        assert key in self.mapped, f"{key} is not in the table of mapped keys"
        self.taken.pop(key, None)
        self.taken[key] = None
        found = self.look(key)
        return default if found is None else found

    @contextmanager
    def checked(self) -> Iterator[None]:
        """ConfigError where the last value that was taken is of a type that it cannot have."""
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:
            key = next(reversed(self.taken), "")
            expected = "a value of the type that the key has in that library"
            raise ConfigError([Problem(path=key, found=f"{self.look(key)!r} ({error})", expected=expected)]) from error

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

    def unmapped(self) -> tuple[tuple[Unmapped, ...], int]:
        """All that is to be told, what changes the meaning first; and how many other keys switch something off."""
        found, num_off = list(self.reports), 0
        for key, value in self._leaves(self.values):
            if any(key == taken or key.startswith(f"{taken}.") for taken in self.taken):
                continue
            rule = next((one for one in self.dropped if fnmatchcase(key, one.pattern)), None)
            if self._is_disabled(key) or (rule is not None and rule.is_off(value)):
                num_off += 1
            elif rule is None:
                found.append(Unmapped(key=key, value=value, why=UNKNOWN, changes_meaning=True))
            else:
                found.append(Unmapped(key=key, value=value, why=rule.why, changes_meaning=rule.changes_meaning))
        return tuple(sorted(found, key=lambda one: not one.changes_meaning)), num_off

    def _is_disabled(self, key: str) -> bool:
        """Whether a table around the key says `enabled: false`."""
        names = key.split(".")
        return any(self.look(".".join((*names[:depth], ENABLED))) is False for depth in range(1, len(names)))

    def _leaves(self, tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tables.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value:
                yield from self._leaves(value, f"{key}.")
            else:
                yield key, value
