"""A data source: a kind of data set that `[data]` of a recipe names, described so that nothing heavy is imported.

In `pyproject.toml`::

    [project.entry-points."rlcore.datasets"]
    ini = "my_package.provider:INI"

In `my_package/provider.py`::

    INI = DataSourceProvider(name="ini", spi=(2, 0), read="my_package.ini:read", suffixes={".ini"})

In `my_package/ini.py`::

    def read(request: DataSourceRequest) -> Sequence[Row]: ...

A source's rows are a sequence of N >= 1 mappings, by random access:

- `len(rows)` is N, an int, which never changes.
- `rows[number]`, for the int 0 <= number < N, maps field names (str) to None, bool, int, float, str, bytes, and lists and
  mappings of these. It is the same in every process, and in a resumed run. The core asks for no slices. A source may read or
  make each row on access.
- `iter(rows)` gives the same rows in their order. The sequence may do that faster than row by row.
- `rows.line(number)`, where there is such a method, is the line of the file that a row begins on, from 1, for messages.

The run decides in which order rows come, and remembers where it stands: a source keeps no position. A run asks for all rows
before its first step, to check their prompts, and compares a digest of them when it is resumed.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import field, frozen

from rlcore.schema.printable import plain_texts
from rlcore.spi.provider import always_available, as_frozen, installed_in

if TYPE_CHECKING:  # providers, which `rlcore plugins` lists, need no numpy
    from rlcore.spi.environment import Row

DATASET_GROUP = "rlcore.datasets"
"""Entry-point group of data sources, each a DataSourceProvider under the source's name."""
PathKind: TypeAlias = Literal["file", "name"]


@frozen(kw_only=True, field_transformer=plain_texts)
class DataSourceProvider:
    """The description of one data source."""

    name: str
    """The name in `data.train.source`; equal to the entry point's name."""
    spi: tuple[int, int]
    """The SPI version that the source was written for: (major, minor)."""
    read: str
    """`package.module:function`, called as function(DataSourceRequest) -> Sequence[Row] once for each data set of a recipe."""
    path: PathKind = "file"
    """The meaning of `data.train.path`. "file": a file, looked up from the recipe that names it; it is there when `read` is
    called. "name": a name that `read` knows, such as one on a hub; a file or folder of that name beside the recipe comes first.
    `rlcore check` opens no name that is not on this machine."""
    suffixes: frozenset[str] = field(default=frozenset(), converter=as_frozen)
    """How the names of its files end, such as ".csv", in small letters. A recipe that names such a file and another source is
    refused, with this one as the remedy."""
    priority: int = 0
    """Messages name the source of the highest priority among several for one suffix."""
    keys: frozenset[str] = field(default=frozenset(), converter=as_frozen)
    """Which of the keys `subset` and `split` of a data set's section it reads; any other is refused."""
    unavailable: Callable[[], str | None] = always_available
    """A reason why it cannot be used here, with its remedy, or None. Must be quick and import nothing heavy."""


@frozen(kw_only=True)
class DataSourceRequest:
    """One data set of a recipe, as its source reads it."""

    path: str
    """`data.train.path`, without "~"."""
    key: str
    """The data set's section, which DataErrors begin with: "data.train", or "data.train.mix.NAME"."""
    limit: int | None
    """No more rows than these are used; later ones may be left unread."""
    subset: str | None
    split: str | None
    prompt_field: str | None
    """The field that has to hold a prompt in every row: a text, or a list of chat messages. None where rows need none."""
    check: Callable[[Mapping[str, Any], str], object]
    """check(row, where) raises a DataError that begins with the key and `where`, such as "rows.ini, line 7", for a row that
    cannot be used. A source that goes through its rows to read them calls it, so that the message has the row's place. Every
    row is checked again when it is taken."""


def installed_data_sources() -> dict[str, DataSourceProvider]:
    """Return the installed data sources by name. One that cannot be imported is left out; `rlcore plugins` says why."""
    return installed_in(DATASET_GROUP, DataSourceProvider)


def source_of_suffix(suffix: str) -> str | None:
    """Return the source whose files end so; None where there is none."""
    sources = [
        one
        for one in installed_data_sources().values()
        if suffix and isinstance(one.suffixes, frozenset) and suffix in one.suffixes
    ]
    return max(sources, key=lambda one: one.priority).name if sources else None


def read_rows(provider: DataSourceProvider, request: DataSourceRequest) -> "Sequence[Row]":
    """Import a source and read a data set."""
    rows: Sequence[Row] = pkgutil.resolve_name(provider.read)(request)
    return rows
