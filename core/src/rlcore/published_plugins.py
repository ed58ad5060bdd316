"""What installs a plugin that is not installed: the plugins that are released with this version of the core."""

import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.resources import files

from rlcore.schema.suggestions import nearest


@cache
def published() -> Mapping[str, Mapping[str, str]]:
    """Role -> name of a plugin -> the requirement that installs it; the first of a role is the one to begin with."""
    return tomllib.loads((files("rlcore") / "published_plugins.toml").read_text(encoding="utf-8"))


def first_published(role: str) -> str | None:
    """The requirement of the plugin to begin with; None where none of the role is released."""
    return next(iter(published().get(role, {}).values()), None)


def pip_line(requirements: Iterable[str]) -> str:
    """The command that installs all of them."""
    return f"pip install {' '.join(map(shlex.quote, dict.fromkeys(requirements)))}"


def how_to_install(role: str, name: str, installed: Collection[str]) -> str:
    """What to do where no plugin of a role has a name: which one was meant, and the command that installs it; "" where neither
    is known."""
    known = published().get(role, {})
    meant = name if name in known else nearest(name, {*installed, *known})
    if meant is None:
        return ""
    question = "" if meant == name else f'Did you mean "{meant}"? '
    return f"{question}{'' if meant in installed else f'Run: {pip_line([known[meant]])}'}".rstrip()
