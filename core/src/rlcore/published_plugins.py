"""The plugins that are released with this version of the core, and the `pip install` command of each."""

import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.resources import files

from rlcore.schema.suggestions import nearest


@cache
def published() -> Mapping[str, Mapping[str, str]]:
    """Return role -> name of a plugin -> the requirement that installs it. The first of a role is the recommended one."""
    return tomllib.loads((files("rlcore") / "published_plugins.toml").read_text(encoding="utf-8"))


def first_published(role: str) -> str | None:
    """Return the requirement of a role's recommended plugin; None where no plugin of the role is released."""
    return next(iter(published().get(role, {}).values()), None)


def pip_line(requirements: Iterable[str]) -> str:
    """Return the command that installs all of the requirements."""
    return f"pip install {' '.join(map(shlex.quote, dict.fromkeys(requirements)))}"


def remedy_for(role: str) -> str:
    """Return the sentence that has a role's recommended plugin installed; "" where no plugin of the role is released."""
    requirement = first_published(role)
    return f"Run: {pip_line([requirement])}" if requirement else ""


def how_to_install(role: str, name: str, installed: Collection[str]) -> str:
    """Return a hint for a plugin's name that is not installed: a similar name, and the command that installs the plugin.

    The hint is "" where no released or installed plugin has a similar name.
    """
    known = published().get(role, {})
    meant = name if name in known else nearest(name, {*installed, *known})
    if meant is None:
        return ""
    question = "" if meant == name else f'Did you mean "{meant}"? '
    return f"{question}{'' if meant in installed else f'Run: {pip_line([known[meant]])}'}".rstrip()
