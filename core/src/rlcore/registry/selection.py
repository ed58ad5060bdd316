"""Which plugin fills a role: the named one, or under "auto" the usable one of the highest priority; never a fallback."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from inspect import iscoroutine

from attrs import frozen

from rlcore.gpu import Device
from rlcore.installed import distribution_of, installed_entry_points
from rlcore.published_plugins import first_published, how_to_install, pip_line
from rlcore.registry.discovery import Entry, Registry, load_entry, provided_by
from rlcore.registry.plugin_errors import is_outside, listing_error
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import ENTRY_POINT_GROUPS, Provider, Role
from rlcore.spi.weights import DtypeName

AUTO = "auto"
AUTO_ROLES: tuple[Role, ...] = ("trainer", "generator")
"""Roles whose plugins do the same work, so that "auto" may choose; each algorithm and environment does something else."""
_REMEDY = "disable all but one by distribution"


@frozen(kw_only=True)
class Row:
    """What the listing says about one plugin."""

    entry: Entry
    usable: bool
    """Whether a recipe may name it."""
    reason: str | None
    """Why it is not usable, or why "auto" passes it over."""
    auto: bool
    """Whether "auto" considers it."""


@frozen(kw_only=True)
class ChosenPlugin:
    """What the driver chose, in plain data, for the workers to load."""

    role: Role
    name: str
    distribution: str
    version: str

    @classmethod
    def of(cls, entry: Entry) -> "ChosenPlugin":
        """The plain data of a selected entry."""
        return cls(role=entry.role, name=entry.name, distribution=entry.distribution, version=entry.version)


@frozen(kw_only=True)
class _Verdict:
    """Whether one entry can be used by its name."""

    entry: Entry
    reason: str | None
    broken: bool = False
    """It has a defect, which "auto" reports instead of passing the entry over."""


def select(
    registry: Registry, role: Role, name: str, *, device: Device, needs: Mapping[str, str], dtype: DtypeName | None = None
) -> Entry:
    """The plugin of a role. `needs` maps capabilities that the recipe needs to the reason why; `dtype` is the one that it
    computes in, where that matters.

    PluginError lists every installed plugin of the role with the reason why it was not taken.
    """
    verdicts = [_judge(entry, needs, dtype) for entry in registry.of(role)]
    if name == AUTO:
        return _select_auto(role, verdicts, device)
    return _select_named(role, name, verdicts)


def passed_over(
    registry: Registry, taken: Entry, *, device: Device, needs: Mapping[str, str], dtype: DtypeName | None = None
) -> tuple[str, ...]:
    """Why "auto", which took `taken`, could take none of the plugins that are meant for the device and rank higher: a sentence
    for each. What the user has disabled is left out."""
    role = taken.role
    higher = [entry for entry in registry.of(role) if not entry.disabled and _priority(entry) > _priority(taken)]
    verdicts = [_judge(entry, needs, dtype) for entry in higher if _wrong_device(entry, device) is None]
    return tuple(
        f"{role} {taken.name!r} (priority {_priority(taken)}) is taken, as {verdict.entry.name!r} "
        f"(priority {_priority(verdict.entry)}) cannot be: {verdict.reason}"
        for verdict in sorted(verdicts, key=lambda verdict: -_priority(verdict.entry))
    )


def explain(registry: Registry, role: Role, device: Device) -> tuple[Row, ...]:
    """Every installed plugin of a role, whether it is usable or why not, and which one "auto" takes."""
    verdicts = [_judge(entry, {}) for entry in registry.of(role)]
    duplicates = _duplicates(verdicts)
    try:
        chosen = _select_auto(role, verdicts, device)
    except PluginError:
        chosen = None
    rows = []
    for verdict in verdicts:
        reason = verdict.reason
        if reason is None and verdict.entry.name in duplicates:
            reason = f"{duplicates[verdict.entry.name]}; {_REMEDY}"
        usable = reason is None
        if usable and role in AUTO_ROLES:
            reason = _wrong_device(verdict.entry, device)
        rows.append(Row(entry=verdict.entry, usable=usable, reason=reason, auto=verdict.entry is chosen))
    return tuple(rows)


def auto_error(registry: Registry, role: Role, device: Device) -> str | None:
    """Why "auto" would choose nothing in a role, or None where it does."""
    try:
        _select_auto(role, [_judge(entry, {}) for entry in registry.of(role)], device)
    except PluginError as error:
        return str(error).partition("\n")[0]
    return None


def load_chosen(chosen: ChosenPlugin) -> Entry:
    """Load, in a worker, the one plugin that the driver chose; PluginError unless it is exactly that here too."""
    group = ENTRY_POINT_GROUPS[chosen.role]
    wanted = f"{chosen.role} {chosen.name!r} of {chosen.distribution} {chosen.version}"
    found = installed_entry_points().entry_points.select(group=group, name=chosen.name)
    matching = [point for point in found if distribution_of(point)[0] == chosen.distribution]
    if len(matching) != 1:
        here = ", ".join(" ".join(distribution_of(point)) for point in found) or "nothing"
        raise PluginError(
            f"the driver chose {wanted}; this worker finds {here} of that name in {group}. Install the same packages"
        )
    version = distribution_of(matching[0])[1]
    if version != chosen.version:
        raise PluginError(f"the driver chose {wanted}; this worker has version {version}. Install the same version")
    entry = load_entry(chosen.role, matching[0])
    if entry.error is not None:
        raise PluginError(f"the driver chose {wanted}; in this worker it is broken: {entry.error}")
    return entry


def _judge(entry: Entry, needs: Mapping[str, str], dtype: DtypeName | None = None) -> _Verdict:
    if entry.disabled:
        return _Verdict(entry=entry, reason="disabled")
    if entry.error is not None or entry.provider is None:
        return _Verdict(entry=entry, reason=entry.error, broken=True)
    reason, broken = _probe(entry.provider)
    if reason is not None:
        return _Verdict(entry=entry, reason=reason, broken=broken)
    missing = [f"{capability!r} ({why})" for capability, why in needs.items() if capability not in entry.provider.capabilities]
    reasons = [f"lacks the capability {', '.join(missing)}"] if missing else []
    taken = [repr(capability) for capability in needs if capability in entry.taken_away]
    if taken:
        reasons.append(f"[{entry.role}.{entry.name}] takes {', '.join(taken)} away")
    if dtype is not None and dtype not in entry.provider.dtypes:
        reasons.append(f"does not compute in {dtype} (model.dtype), only in {', '.join(sorted(entry.provider.dtypes))}")
    return _Verdict(entry=entry, reason="; ".join(reasons) or None)


def _probe(provider: Provider) -> tuple[str | None, bool]:
    """The reason that the provider's own probe gives, and whether the probe itself is broken."""
    try:
        reason = provider.unavailable()
    except BaseException as error:
        if is_outside(error):
            raise
        return f"its probe `unavailable` raised {type(error).__name__}: {error}", True
    if reason is None or (isinstance(reason, str) and reason):
        return reason, False
    if iscoroutine(reason):
        reason.close()  # or Python prints a warning of its own
    return f"its probe `unavailable` returned {reason!r}; expected a reason or None", True


def _select_named(role: Role, name: str, verdicts: Sequence[_Verdict]) -> Entry:
    named = [verdict for verdict in verdicts if verdict.entry.name == name]
    active = next((verdict for verdict in named if not verdict.entry.disabled), None)
    if not named:
        hint = how_to_install(role, name, [verdict.entry.name for verdict in verdicts])
        problem = f"not installed. {hint}".removesuffix(". ")
    elif active is None:
        problem = "disabled"
    elif duplicate := _duplicates(verdicts).get(name):
        problem = f"a {duplicate}; {_REMEDY}"
    elif active.reason is not None:
        problem = f"not usable: {active.reason}"
    else:
        return active.entry
    raise _error(role, f"{role} {name!r} is {problem}", verdicts)


def _select_auto(role: Role, verdicts: Sequence[_Verdict], device: Device) -> Entry:
    if role not in AUTO_ROLES:
        raise _error(role, f"the {role} has to be named: each does something else", verdicts)
    defects = [f"{verdict.entry.label} is broken" for verdict in verdicts if verdict.broken]
    defects += [f"{name!r} is a {duplicate}" for name, duplicate in _duplicates(verdicts).items()]
    if defects:
        remedy = "repair or disable what is wrong, or name the one to use"
        raise _error(role, f"'auto' chooses no {role}: {', '.join(defects)}; {remedy}", verdicts, device)
    usable = [entry for entry in (v.entry for v in verdicts if v.reason is None) if _wrong_device(entry, device) is None]
    if not usable:
        headline = f"no usable {role} is installed for device {device}; install, enable or repair one"
        raise _error(role, headline, verdicts, device)
    highest = max(_priority(entry) for entry in usable)
    top = [entry for entry in usable if _priority(entry) == highest]
    if len(top) > 1:
        names = " and ".join(entry.label for entry in top)
        raise _error(role, f"'auto' chooses no {role}: {names} tie at priority {highest}; name one of them", verdicts, device)
    return top[0]


def _error(role: Role, headline: str, verdicts: Sequence[_Verdict], device: Device | None = None) -> PluginError:
    if not verdicts:
        group = ENTRY_POINT_GROUPS[role]
        first = first_published(role)
        such = f", such as by {pip_line([first])}" if first else ""
        return PluginError(f"{headline}\nNo {role} is installed: install a package with an entry point in {group}{such}.")
    lines = []
    for entry, reason in ((verdict.entry, verdict.reason) for verdict in verdicts):
        priority = f", priority {entry.provider.priority}" if entry.provider else ""
        status = reason or (_wrong_device(entry, device) if device else None) or "usable"
        lines.append(f"{entry.name} ({entry.origin}{priority}): {status}")
    return listing_error(f"{headline}\nInstalled {role}s", lines)


def _wrong_device(entry: Entry, device: Device) -> str | None:
    if entry.provider is None or device in entry.provider.devices:
        return None
    if not entry.provider.devices:
        return "has to be named"
    return f"meant for {', '.join(sorted(entry.provider.devices))}, so 'auto' passes it over on {device}; it can be named"


def _priority(entry: Entry) -> int:
    return entry.provider.priority if entry.provider else 0


def _duplicates(verdicts: Sequence[_Verdict]) -> dict[str, str]:
    """What is wrong with each name that several plugins have."""
    active: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in (verdict.entry for verdict in verdicts if not verdict.entry.disabled):
        active[entry.name].append(entry)
    return {name: f"duplicate name: {provided_by(entries)}" for name, entries in active.items() if len(entries) > 1}
