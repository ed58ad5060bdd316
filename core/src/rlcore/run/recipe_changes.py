"""A resumed run's recipe beside the one that it ran with before: what is different, and what of it makes another run."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

ANOTHER_RUN = (
    "run.seed",
    "model.chat_template",
    "model.chat_template_kwargs",
    "algorithm.name",
    "environment.name",
    "data.train",
    "training.prompts_per_step",
)
"""Keys, and sections, that what a checkpoint stands for depends on: which prompts come in which step, how they read, what is
random and what is learned. Whether model.path is another model its digest says."""
PLACES = ("run.directory", "run.name")
"""Where the run lies, which may be moved."""
ABSENT = "none"


@frozen(kw_only=True)
class Change:
    """A key with another value than before."""

    key: str
    before: str
    after: str

    @property
    def makes_another_run(self) -> bool:
        """Whether a run with the new value is not the one that was begun."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in ANOTHER_RUN)

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def recipe_changes(before: str, after: str) -> list[Change]:
    """By key, what two recipes written by `dump_toml` differ in; `run.directory` and `run.name` aside.

    Raises ValueError where `before` is no TOML.
    """
    old, new = _leaves(before), _leaves(after)
    keys = [*new, *(key for key in old if key not in new)]
    return [
        Change(key=key, before=_shown(old.get(key)), after=_shown(new.get(key)))
        for key in keys
        if key not in PLACES and old.get(key) != new.get(key)
    ]


def earlier_recipes(directory: Path) -> Mapping[int, Path]:
    """The recipes that were resumed with others, by number; the first has the least."""
    return {int(match[1]): path for path in directory.iterdir() if (match := re.fullmatch(r"recipe-([0-9]+)\.toml", path.name))}


def _leaves(text: str) -> dict[str, Any]:
    """Every value by its dotted key. What `dump_toml` writes as a comment, being None, has no key."""
    return dict(_walk(tomllib.loads(text), ""))


def _walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    text = ABSENT if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
