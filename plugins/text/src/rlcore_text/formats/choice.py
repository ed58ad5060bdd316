"""Chooses the format of a data set's rows: the one that the recipe names, or with "auto" the one that the first row has."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from rlcore.installed import installed_entry_points
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.run_parts import functions
from rlcore.schema.suggestions import nearest
from rlcore.spi import ConfigError, ContractError, DataError, Problem
from rlcore.spi.provider import group_of
from rlcore_text.chats.public_fields import names_of
from rlcore_text.formats.layout import Fields, Use

Convert = Callable[[Fields, Use], Mapping[str, Any] | None]
AUTO, OWN = "auto", "rlcore"
"""The names in a recipe for the detected format, and for rows whose fields are read as they are."""


@define
class FormatChoice:
    """The format of one data set. The first row that it converts decides where the recipe says "auto"."""

    wanted: str
    """`data.*.format`."""
    key: str
    """The data set's section of the recipe."""
    use: Use
    told: dict[str, str]
    """Collects fields that the format does not have, each with its note."""
    detects: bool = True
    """False where "auto" stands for rlcore's own fields: the recipe names fields, or an agent gets the rows."""
    name: str | None = None
    """The format, or the names of several that read the first row alike; None before the first row."""
    _convert: Convert | None = field(default=None, init=False)
    """None where rows are read as they are."""
    _keeps_others: bool = field(default=False, init=False)
    """True where the first row has rlcore's fields already: rows of another layout are then read as they are."""

    def row(self, row: Fields) -> Fields:
        """Return the fields of a row in rlcore's form. The DataError's text completes a sentence that begins with "found"."""
        if self.name is None:
            self._choose(row)
        if self._convert is None:
            return row
        found = self._convert(row, self.use)
        if found is None and self._keeps_others:
            return row
        if found is None:
            listed = ", ".join(map(repr, row)) or "none"
            raise DataError(f"the fields {listed}; expected a row in the format {self.name!r} ({self.key}.format)")
        if not self._keeps_others and self.use != "rollouts":  # an environment gets all fields
            self._tell(row, found)
        return found

    def _choose(self, row: Fields) -> None:
        """Take the format that the recipe names, or that the first row has."""
        if self.wanted != AUTO:
            self._convert = None if self.wanted == OWN else _installed(self.wanted, self.key)
            self.name = self.wanted
            return
        self.name = OWN
        if not self.detects:
            return
        fitting = {name: found for name, convert in _all() if (found := convert(row, self.use)) is not None}
        if not fitting:
            return
        (name, found), *others = fitting.items()
        if not all(_equal(other, found) for _, other in others):
            raise DataError(
                f"fields of {len(fitting)} formats, {' and '.join(map(repr, fitting))}; expected one. Name it with "
                f'{self.key}.format, or "{OWN}" to read the fields as they are'
            )
        if isinstance(row.get("prompt"), str) and _equal(found, row):
            return  # such a row has nothing that is another library's alone
        self.name = ", ".join(fitting)
        self._convert, self._keeps_others = dict(_all())[name], _equal(found, row)

    def _tell(self, row: Fields, found: Fields) -> None:
        """Collect notes on fields that nothing reads."""
        known = names_of("row", "used", "refused", "reported", "no effect")
        for name in row:
            if name in found and name not in known:
                self.told[name] = f"the format {self.name!r} has no such field, and nothing reads it"


def _all() -> list[tuple[str, Convert]]:
    """Return the usable formats, in the order of their names."""
    return [
        (state.entry.name, _attributed(state.entry.label, state.entry.function))
        for state in functions("row_format")
        if state.is_usable and state.entry.function is not None
    ]


def _installed(name: str, key: str) -> Convert:
    """Return the format of a name. ConfigError where none is installed."""
    found = dict(_all())
    if name not in found:
        names = sorted({AUTO, OWN, *installed_entry_points().entry_points.select(group=group_of("row_format")).names})
        near = nearest(name, names)
        problem = Problem(
            path=f"{key}.format",
            found=f'"{name}", which is not installed or not usable',
            expected=f"one of {', '.join(names)}",
            remedy=f'Did you mean "{near}"?' if near else "",
        )
        raise ConfigError([problem])
    return found[name]


def _attributed(label: str, function: Convert) -> Convert:
    """Return the function, with its package named in each error but a DataError, which is about the row."""

    def convert(row: Fields, use: Use) -> Mapping[str, Any] | None:
        with attributed("raised by", label):
            try:
                found: Any = function(row, use)
            except DataError as error:
                found = error
        if isinstance(found, DataError):
            raise found
        if found is not None and not isinstance(found, Mapping):
            raise ContractError(f"{label} returned a {type(found).__name__}; expected a mapping of fields, or None")
        return found

    return convert


def _equal(one: Fields, other: Fields) -> bool:
    """Return whether two rows have the same fields and values. Arrays are equal where they are one object."""
    return one.keys() == other.keys() and all(one[name] is other[name] or one[name] == other[name] for name in one)
