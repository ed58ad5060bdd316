"""A broken plugin that nobody asks for: the recipe is read, and the others are selected, as if it were not there."""

from rlcore.registry.discovery import discover
from rlcore.registry.selection import select
from rlcore.run.plan.sections import sections
from rlcore.spi import SPI_VERSION


def test_the_sections_of_a_recipe_are_those_of_sound_plugins(installer):
    installer.trainer("good")
    installer.trainer("shapeless", backend="no path")
    installer.trainer("future", spi=(SPI_VERSION[0] + 1, 0))
    installer.add("acme-broken", {"rlcore.trainers": {"broken": "broken_section:PROVIDER"}}, broken_section="1 / 0\n")
    registry = discover()
    assert list(sections(registry)["trainer"]) == ["good"]
    assert select(registry, "trainer", "good", device="cpu", needs={}).name == "good"
