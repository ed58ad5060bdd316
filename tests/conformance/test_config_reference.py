"""docs/config.md: generated, complete, current."""

from pathlib import Path
from typing import Literal

import attrs
import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import discover
from rlcore.run.plan.sections import sections
from rlcore.schema import describe
from rlcore_conformance.cli.config_reference import reference

ROOT = Path(__file__).parents[2]


def installed_sections() -> dict[str, dict[str, type]]:
    """The config classes of the plugins of this repository."""
    return sections(discover())


def test_the_reference_is_current() -> None:
    pytest.importorskip("rlcore_grpo", reason="the reference is that of all packages of the checkout")
    found = (ROOT / "docs" / "config.md").read_text()
    assert found == CliRunner().invoke(cli, ["reference"]).output, "run: rlcore reference > docs/config.md"


def every_class() -> list[type]:
    found: list[type] = []
    queue: list[object] = [Recipe, *(cls for plugins in installed_sections().values() for cls in plugins.values())]
    while queue:
        tp = queue.pop()
        if isinstance(tp, type) and attrs.has(tp) and tp not in found:
            found.append(tp)
            for field in describe.fields(tp).values():
                queue += [field.type, *getattr(field.type, "__args__", ())]
    return sorted((cls for cls in found if cls is not Recipe), key=lambda cls: (cls.__module__, cls.__qualname__))


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__qualname__)
def test_every_option_says_what_it_means(cls: type) -> None:
    fields = describe.fields(cls)
    assert not [name for name, doc in describe.docs(cls).items() if not doc and not attrs.has(fields[name].type)]


@attrs.frozen(kw_only=True)
class Decay:
    """A nested table."""

    shape: Literal["cosine", "constant"] = "constant"
    """Shape of the decay."""


@attrs.frozen(kw_only=True)
class Zed:
    """Options of a trainer."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Two factors."""
    clip: float | None = None
    """Where to clip."""
    schedule: Decay = attrs.field(factory=Decay)
    """The schedule."""
    size: int | Literal["auto"] = "auto"
    """A number or "auto"."""
    level: int
    """How strict."""


def test_sections_of_plugins_and_of_nested_classes_are_listed() -> None:
    text = reference({"trainer": {"zed": Zed}, "observers": {"watch": Decay}})
    assert "## `[trainer.zed]`" in text
    assert "## `[trainer.zed.schedule]`" in text
    assert "## `[observers.watch]`" in text
    assert '| `size` | `int` or `"auto"` | `"auto"` | A number or "auto". |' in text
    assert "| `level` | `int` | (required) | How strict. |" in text
    assert '| `shape` | `"cosine"`, `"constant"` | `"constant"` | Shape of the decay. |' in text
    assert "| `betas` | array of `float` | `[0.9, 0.95]` | Two factors. |" in text
    assert "| `clip` | `float` or none | none | Where to clip. |" in text


@attrs.frozen(kw_only=True)
class Plain:
    """Does it."""

    size: int = 1
    """How much."""
    name: str = "a"
    """Which."""


@attrs.frozen(kw_only=True)
class Larger(Plain):
    """Does more of it."""

    size: int = 2
    """How much."""


def test_of_a_plugin_that_is_another_with_other_defaults_only_these_are_listed() -> None:
    text = reference({"algorithm": {"larger": Larger, "plain": Plain}})
    assert "| `size` | `int` | `1` | How much. |" in text
    section = text.partition("## `[algorithm.larger]`\n\n")[2].partition("##")[0]
    assert section == (
        "Does more of it. The keys of `[algorithm.plain]`, with other defaults:\n\n"
        "| Key | Default |\n|---|---|\n| `size` | `2` |\n\n"
    )
