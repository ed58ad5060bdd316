"""Plugin sections to convert with, and recipes written in a line."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest
from attrs import field, frozen, validators

from rlcore.config.convert import convert
from rlcore.config.load import read_raw
from rlcore.config.recipe import Recipe
from rlcore.spi import ConfigError, Problem


@frozen(kw_only=True)
class ScheduleOptions:
    """A nested table."""

    warmup_steps: int = 0
    """Steps of warm-up."""
    shape: Literal["cosine", "constant"] = "constant"
    """Shape of the decay."""


@frozen(kw_only=True)
class ZedOptions:
    """Options of a trainer."""

    rate: float = 1e-6
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Two factors."""
    clip: float | None = None
    """Where to clip."""
    targets: tuple[str, ...] = ()
    """Names."""
    schedule: ScheduleOptions = field(factory=ScheduleOptions)
    """The schedule."""
    extra: Mapping[str, object] = field(factory=dict)
    """Anything."""
    size: int | Literal["auto"] = "auto"
    """A number or "auto"."""
    weights: Mapping[str, float] = field(factory=dict)
    """Numbers by name."""


@frozen(kw_only=True)
class StrictOptions:
    """Options with a required key and a check."""

    level: int = field(validator=validators.ge(1))
    """How strict."""
    fast: bool = False
    """Whether it is fast."""


@frozen(kw_only=True)
class NoOptions:
    """No options."""


SECTIONS = {
    "trainer": {"zed": ZedOptions, "strict": StrictOptions},
    "generator": {},
    "algorithm": {"alg": ScheduleOptions},
    "environment": {"env": StrictOptions, "other": NoOptions},
    "observers": {"watch": ScheduleOptions, "guard": StrictOptions},
}

Load = Callable[..., Recipe]
Problems = Callable[..., dict[str, Problem]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a recipe that is complete but for `text` and converts it."""

    def load(text: str = "", *overrides: str, complete: bool = True) -> Recipe:
        path = tmp_path / "recipe.toml"
        (tmp_path / "base.toml").write_text(COMPLETE)
        path.write_text(f'extends = "base.toml"\n{text}' if complete else text)
        return convert(read_raw(path, overrides), SECTIONS)

    return load


COMPLETE = """
model.path = "some/model"
algorithm.name = "alg"
environment.name = "other"
"""


@pytest.fixture
def problems(load: Load) -> Problems:
    """The problems of a recipe by path; fails where there are none or two of one path."""

    def problems(text: str = "", *overrides: str, complete: bool = True) -> dict[str, Problem]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, complete=complete)
        found = {problem.path: problem for problem in caught.value.problems}
        assert len(found) == len(caught.value.problems)
        return found

    return problems


@pytest.fixture
def sections() -> dict[str, dict[str, type]]:
    """The classes above."""
    return SECTIONS
