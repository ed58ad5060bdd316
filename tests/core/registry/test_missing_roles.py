"""Tests of the roles that no usable plugin fills, and of the command that installs a plugin for each."""

from collections.abc import Callable, Sequence

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.registry.selection import install_line, missing_roles, missing_text
from rlcore.spi import Provider, Role

LINE = "pip install rlcore-fsdp2 rlcore-transformers rlcore-grpo"


@pytest.mark.parametrize(
    ("present", "told"),
    [
        ((), f"missing for a run with rewards: trainer, generator, algorithm. Run: {LINE}"),
        (
            ("trainer",),
            "missing for a run with rewards: generator, algorithm. Run: pip install rlcore-transformers rlcore-grpo",
        ),
        (("trainer", "generator"), "missing for a run with rewards: algorithm. Run: pip install rlcore-grpo"),
        (("trainer", "generator", "algorithm"), None),
    ],
)
def test_missing_roles_are_reported_with_the_install_command(
    make_provider: Callable[..., Provider], present: Sequence[Role], told: str | None
) -> None:
    """The core brings environments itself."""
    registry = Registry.from_providers({role: [make_provider("swift")] for role in present})
    assert missing_text(registry) == told


def test_a_plugin_that_cannot_be_used_fills_no_role_and_one_for_another_device_does(
    make_provider: Callable[..., Provider],
) -> None:
    absent = evolve(make_provider("absent"), unavailable=lambda: "its engine is not installed")
    elsewhere = evolve(make_provider("elsewhere"), devices=frozenset({"cuda"}))
    registry = Registry.from_providers({"trainer": [absent], "generator": [elsewhere]})
    assert missing_roles(registry) == ("trainer", "algorithm")
    assert install_line(("trainer", "algorithm")) == "pip install rlcore-fsdp2 rlcore-grpo"
    assert install_line(()) is None
