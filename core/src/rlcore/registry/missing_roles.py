"""Find the roles that no usable plugin fills, and the command that installs a plugin for each."""

from rlcore.gpu import Device
from rlcore.published_plugins import first_published, pip_line
from rlcore.registry.collectors import collector
from rlcore.registry.discovery import Registry
from rlcore.registry.selection import explain
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import Role

NEEDED: tuple[Role, ...] = ("trainer", "generator", "algorithm", "environment")
"""The roles of a run with rewards."""


def missing_roles(registry: Registry, device: Device) -> tuple[str, ...]:
    """Return the roles of a run with rewards that no usable plugin fills; the collector of its samples is one."""
    missing = tuple(role for role in NEEDED if not any(row.is_usable for row in explain(registry, role, device)))
    try:
        collector("episodes")
    except PluginError:
        return (*missing, "collector")
    return missing


def install_line(roles: tuple[str, ...]) -> str | None:
    """Return the command that installs a plugin for each role; None where no such plugin is released."""
    requirements = [requirement for role in roles if (requirement := first_published(role)) is not None]
    return pip_line(requirements) if requirements else None


def missing_text(registry: Registry, device: Device) -> str | None:
    """Return a line that names the missing roles and the command for them; None where no role is missing."""
    roles = missing_roles(registry, device)
    if not roles:
        return None
    line = install_line(roles)
    return f"missing for a run with rewards: {', '.join(roles)}{f'. Run: {line}' if line else ''}"
