"""Two bundles of which components are swapped, and the count of replays."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from rlcore.reading import parse_toml, read_json
from rlcore.registry.discovery import discover
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.components import Change, trainer_settings
from rlcore_bundles.group_search import OutOfReplaysError
from rlcore_bundles.replaying import TRUST, Start
from rlcore_bundles.trials import Outcome, Trials

MOST_REPLAYS = 10
PATH_KEY = "model.path"
"""Stands for the model, with whose weights the step begins, in tables of dotted keys."""
TEMPLATE_KEY = "model.chat_template"


@frozen(kw_only=True, eq=False)
class Side:
    """One of two bundles."""

    bundle: Bundle
    settings: Mapping[str, Any]
    """Return `trainer_settings` with the model."""
    start: Start

    @classmethod
    def of(cls, bundle: Bundle, *, trusts: bool = False) -> "Side":
        """The side of a bundle. `trusts`: code of the model is executed where its recipe says so. ConfigError where its weights
        are missing."""
        trainers = [entry.name for entry in discover(()).entries if entry.role == "trainer"]
        model = parse_toml(bundle.recipe)["model"]
        settings = trainer_settings(bundle, trainers) | {PATH_KEY: str(model["path"])}
        settings |= {f"model.{TRUST}": True} if trusts and model.get(TRUST) else {}
        return cls(bundle=bundle, settings=settings, start=Start.of(bundle))


def sides_of(good: Bundle, bad: Bundle, *, trusts: bool) -> tuple[Side, Side]:
    """Both sides. Chat templates of the models' own count as a key where they differ."""
    sides = Side.of(good, trusts=trusts), Side.of(bad, trusts=trusts)
    texts = [side.settings.get(TEMPLATE_KEY) or _template(Path(side.start.model)) for side in sides]
    if texts[0] == texts[1] or None in texts:
        return sides
    first, second = (
        evolve(side, settings={**side.settings, TEMPLATE_KEY: text}) for side, text in zip(sides, texts, strict=True)
    )
    return first, second


@define(kw_only=True, eq=False)
class Swaps:
    """The replays of one search."""

    good: Side
    bad: Side
    pythons: Sequence[Path]
    tell: Callable[[str], None]
    most: int = MOST_REPLAYS
    """The most replays."""
    done: list[str] = field(factory=list)
    """A line for each replay."""

    def count(self, what: str) -> None:
        """Note a replay. OutOfReplaysError where none is left."""
        if len(self.done) >= self.most:
            raise OutOfReplaysError
        self.done.append(what)
        self.tell(f"replay {len(self.done)}: {what}")

    def trials(self, side: Side) -> Trials:
        """The replays of one side's samples."""
        return Trials(bundle=side.bundle, settings=_recipe_keys(side.settings), start=side.start, count=self.count)

    def with_changes(self, trials: Trials, changes: Sequence[Change], names: frozenset[str]) -> Outcome:
        """Replay the bad bundle's samples with the good one's settings, and these components of the bad one."""
        differing = {key: change.name in names for change in changes for key in change.keys}
        settings = {key: value for key, value in self.bad.settings.items() if key not in differing}
        for key, is_bad in differing.items():
            source = self.bad.settings if is_bad else self.good.settings
            settings |= {key: source[key]} if key in source else {}
        what = f"{' and '.join(sorted(names))} of the bad one, the rest of the good one" if names else "as the good one is set"
        # Another model's optimizer may have made another number of updates.
        start = self.bad.start if differing.get(PATH_KEY, True) else evolve(self.good.start, state=None)
        return trials.run(f"the bad step, {what}", _recipe_keys(settings), start=start)


def _recipe_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if key != PATH_KEY}


def _template(model: Path) -> str | None:
    """The chat template of a model's directory; None where it has none."""
    if (model / "chat_template.jinja").is_file():
        return (model / "chat_template.jinja").read_text(encoding="utf-8")
    if not (model / "tokenizer_config.json").is_file():
        return None
    found = read_json(model / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None
