"""Installed entry points of any group, each with the object that it names or with its error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from inspect import iscoroutine
from typing import Any, ClassVar, TypeVar, get_args

from attrs import evolve, fields_dict, frozen

from rlcore.registry.module_source import path_problem
from rlcore.registry.plugin_errors import fault_of
from rlcore.registry.provider_checks import DEVICES, OBJECT_PATH, config_problems, kind_of, spi_mismatch
from rlcore.spi.channels import ChannelProvider, Reach
from rlcore.spi.data_source import DataSourceProvider, PathKind
from rlcore.spi.provider import ROLES, Role
from rlcore.time_limit import FalseInterruptError, LateError, loading

_LATE_PROBES: list[tuple[object, str]] = []
"""Probes that were late, each with its message. No later listing waits for them again."""


@frozen(kw_only=True, eq=False)
class InstalledPlugin:
    """An installed entry point of any role."""

    is_of_recipes: ClassVar[bool] = True
    """False where no recipe can name or disable it, as it is used before one is read."""
    role: Role | str
    name: str
    distribution: str
    version: str
    error: str | None = None
    """The fault that makes it unfit for use on every machine."""
    disabled: bool = False
    """True where the user disables it; nothing of it is imported."""

    def holding(self: "AnyEntry", loaded: object) -> "AnyEntry":  # noqa: ARG002 - an entry of a role keeps it
        """Return this entry with the object that it names, and with the object's error."""
        return self

    @property
    def origin(self) -> str:
        """Name and version of its distribution."""
        return f"{self.distribution} {self.version}"

    @property
    def label(self) -> str:
        """The name that messages use for it."""
        return f"{self.role} {self.name!r} ({self.origin})"

    @property
    def is_of_another_interface(self) -> bool:
        """True where it is written for another version of the SPI."""
        return False

    def unavailable(self) -> str | None:
        """Return the reason why it cannot run on this machine, by its own probe."""
        return None


AnyEntry = TypeVar("AnyEntry", bound=InstalledPlugin)


@frozen(kw_only=True, eq=False)
class DescribedEntry(InstalledPlugin):
    """An installed description with a name and a version of the SPI."""

    described_by: ClassVar[type]
    """The class of the description."""
    path_fields: ClassVar[tuple[str, ...]] = ()
    """The description's fields that name what it brings, each as `package.module:name` or None."""
    provider: Any = None
    """The description. None where it is disabled or could not be imported; there may be one besides an error (a wrong SPI
    version, say)."""

    def holding(self: "AnyEntry", loaded: object) -> "AnyEntry":
        """Return this entry with the object that it names, and with the object's error."""
        assert isinstance(self, DescribedEntry)
        if not isinstance(loaded, self.described_by):
            expected = f"expected an instance of rlcore.spi.{self.described_by.__name__}"
            return evolve(self, error=f"the entry point names {kind_of(loaded)}; {expected}")
        made = evolve(self, provider=loaded)
        return evolve(made, error=spi_mismatch(made.provider.spi) or "; ".join(made.problems()) or None)

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        if self.provider.name != self.name:
            yield f"the {self.role} calls itself {self.provider.name!r}, its entry point {self.name!r}; expected one name"
        for name, path in self.paths().items():
            if not isinstance(path, str) or not OBJECT_PATH.fullmatch(path):
                yield f"{name} is {path!r}; expected 'package.module:name'"
        priority = getattr(self.provider, "priority", 0)
        if type(priority) is not int:
            yield f"priority is {priority!r}; expected an integer"
        if (config := getattr(self.provider, "config", None)) is not None or self.role in ROLES:
            yield from config_problems(config)

    def paths(self) -> dict[str, str]:
        """Return the paths of the description, by field."""
        found = {} if self.provider is None else {name: getattr(self.provider, name) for name in self.path_fields}
        declared = fields_dict(self.described_by)
        return {name: path for name, path in found.items() if path is not None or declared[name].default is not None}

    @property
    def is_of_another_interface(self) -> bool:
        """True where it is written for another version of the SPI."""
        return self.provider is not None and spi_mismatch(self.provider.spi) is not None

    def unavailable(self) -> str | None:
        """Return the reason of its own probe, or which of its paths name nothing. The modules themselves are not imported."""
        if self.provider is None:
            return self.error
        reason = probed(self.provider.unavailable) if hasattr(self.provider, "unavailable") else None
        problems = dict.fromkeys(path_problem(path, quick=True) for path in self.paths().values())
        return reason or "; ".join(f"it names {problem}" for problem in problems if problem is not None) or None


@frozen(kw_only=True, eq=False)
class ChannelEntry(DescribedEntry):
    """One installed refit channel."""

    described_by: ClassVar[type] = ChannelProvider
    path_fields: ClassVar[tuple[str, ...]] = ("sender", "receiver")
    role: str = "channel"
    provider: ChannelProvider | None = None

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        yield from super().problems()
        channel = self.provider
        assert channel is not None
        if self.name == "auto":
            yield "'auto' cannot be the name of a channel: a recipe writes it to have one chosen; expected another name"
        if isinstance(channel.devices, str) or not channel.devices or not channel.devices <= DEVICES:
            yield f"devices are {channel.devices!r}; expected some of {sorted(DEVICES)}"
        if channel.reach not in get_args(Reach):
            yield f"reach is {channel.reach!r}; expected one of {', '.join(get_args(Reach))}"
        if type(channel.cost) is not int:
            yield f"cost is {channel.cost!r}; expected an integer"
        if (channel.sender is None) != (channel.receiver is None):
            yield f"sender is {channel.sender!r}, receiver {channel.receiver!r}; expected both or neither"


@frozen(kw_only=True, eq=False)
class DataSourceEntry(DescribedEntry):
    """One installed data source."""

    described_by: ClassVar[type] = DataSourceProvider
    path_fields: ClassVar[tuple[str, ...]] = ("read",)
    role: str = "dataset"
    provider: DataSourceProvider | None = None

    def problems(self) -> Iterator[str]:
        """Yield the faults of the description."""
        yield from super().problems()
        source = self.provider
        assert source is not None
        if self.name in ("environment", "python"):
            yield f"{self.name!r} cannot be the name of a data source: its rows come from no file; expected another name"
        if source.path not in get_args(PathKind):
            yield f"path is {source.path!r}; expected one of {', '.join(get_args(PathKind))}"
        if wrong := sorted(one for one in source.suffixes if not one.startswith(".") or one != one.lower()):
            yield f"suffixes are {', '.join(wrong)}; expected small letters behind a dot, such as .csv"
        if not source.keys <= {"subset", "split"}:
            yield f"keys are {sorted(source.keys)}; expected some of subset and split"


def probed(unavailable: Callable[[], str | None]) -> str | None:
    """Return the reason that a provider's own probe gives, or the fault of the probe; None where it can be used."""
    for probe, told in _LATE_PROBES:
        if probe is unavailable:
            return told
    try:
        with quietly("its probe `unavailable`"):
            reason = unavailable()
            if reason is None or (isinstance(reason, str) and reason):
                return reason and str(reason)
            if iscoroutine(reason):
                reason.close()  # or Python prints a warning of its own
            return f"its probe `unavailable` returned {reason!r}; expected a reason or None"
    except (LateError, FalseInterruptError) as error:
        _LATE_PROBES.append((unavailable, str(error)))
        return str(error)
    except BaseException as error:
        return f"its probe `unavailable` raised {fault_of(error)}"


@contextmanager
def quietly(what: str, times: float = 1.0) -> Iterator[None]:
    """Limit what a plugin does while it is listed. What it prints is no part of what a command tells."""
    with redirect_stdout(sys.stderr), loading(what, times):
        yield
