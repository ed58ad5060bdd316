"""Compare a resumed run's recipe with its earlier one, and find changes that make it another run."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from rlcore.config.data import DatasetConfig
from rlcore.reading import parse_toml

ANOTHER_RUN = (
    "run.seed",
    *("model.chat_template", "model.chat_template_kwargs"),
    "lora",
    "algorithm.name",
    "environment.name",
    *("data.train", "data.zero_variance_weight", "data.prompt_weights", "data.curriculum_threshold", "data.level_window"),
    "training.prompts_per_step",
)
"""Keys and sections that determine a checkpoint's meaning: the order and text of prompts, random draws and what is learned.
For model.path the model's digest decides."""
LOCATION_KEYS = ("run.directory", "run.name")
"""The keys of the run's place, which may change."""
ABSENT, SECTION = "none", "a section"
"""The texts for the value of a missing key, and of a table."""


@frozen(kw_only=True)
class Change:
    """A changed key, or a section that is new or gone; its keys are not listed."""

    key: str
    before: str
    after: str

    @property
    def makes_another_run(self) -> bool:
        """Return whether a run with the new value is not the one that was begun."""
        return self.is_of(ANOTHER_RUN)

    def is_of(self, keys: Iterable[str]) -> bool:
        """Return whether the key is one of these, or in a section of them; of a section, whether one of them is in it."""
        return any(f"{self.key}.".startswith(f"{key}.") or f"{key}.".startswith(f"{self.key}.") for key in keys)

    def __str__(self) -> str:
        if SECTION in (self.before, self.after):
            return f"[{self.key}] is {'new' if self.after == SECTION else 'gone'}"
        return f"{self.key} {self.before} -> {self.after}"


def recipe_changes(before: str, after: str) -> list[Change]:
    """Return how two recipes written by `dump_toml` differ, key by key; `run.directory` and `run.name` aside.

    Raises ValueError where `before` is no TOML.
    """
    changes = _differences(parse_toml(before), parse_toml(after), "")
    return [change for change in changes if change.key not in LOCATION_KEYS]


def earlier_recipes(directory: Path) -> Mapping[int, Path]:
    """The recipes that were resumed with others, by number; the first has the least."""
    return {int(match[1]): path for path in directory.iterdir() if (match := re.fullmatch(r"recipe-([0-9]+)\.toml", path.name))}


_DEFAULTS = {
    f"data.{split}.{key.name}": key.default for split in ("train", "evaluation") for key in attrs.fields(DatasetConfig)
}
"""Values of keys of data sets that a recipe does not write."""


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> Iterator[Change]:
    """Yield the differences of two tables. Values of None, which `dump_toml` writes as comments, are in neither; an empty
    table, such as that of a plugin without options, says no more than none. A recipe of before a data set had some key has that
    key's default."""
    for name in [*new, *(name for name in old if name not in new)]:
        usual = _DEFAULTS.get(f"{prefix}{name}")
        before, after = old.get(name, usual), new.get(name, usual)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif (was := _text(before)) != (now := _text(after)):
            yield Change(key=f"{prefix}{name}", before=_shortened(was), after=_shortened(now))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return SECTION if value else ABSENT
    return ABSENT if value is None else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
