"""Which trainers and generators a channel fits, and what is installed."""

from collections.abc import Set
from typing import Any

import pytest

from rlcore.spi import ChannelProvider, PluginError, find_channel, installed_channels


def channel(**changes: Any) -> ChannelProvider:
    form = {"name": "pipe", "spi": (2, 0), "cost": 1, "devices": {"cpu"}, "reach": "anywhere"}
    return ChannelProvider(**{**form, "sender": "m:S", "receiver": "m:R", **changes})


@pytest.mark.parametrize(
    ("changes", "declared", "fits", "fits_separate"),
    [
        ({}, {"refit.pipe"}, True, True),
        ({"sender": None}, {"refit.pipe"}, True, True),
        ({}, {"refit.other"}, False, False),
        ({}, {"anywhere_channels"}, True, True),
        ({}, {"process_channels"}, True, False),
        ({}, {"shared_channels", "separate_channels"}, False, False),
        ({"sender": None}, {"anywhere_channels", "process_channels"}, False, False),
        ({"reach": "separate"}, {"separate_channels"}, True, True),
        ({"reach": "shared"}, {"process_channels", "anywhere_channels"}, False, False),
    ],
)
def test_a_channel_fits_who_knows_it_or_any_of_its_reach(
    changes: dict[str, Any], declared: Set[str], fits: bool, fits_separate: bool
) -> None:
    made = channel(**changes)
    assert made.fits(frozenset(declared)) is fits
    assert made.fits(frozenset(declared), separate=True) is fits_separate


def test_every_installation_hands_tensors_over_within_a_process() -> None:
    assert find_channel("in_process").reach == "process"
    assert all(name == found.name for name, found in installed_channels().items())
    with pytest.raises(PluginError, match=r"refit.channel: 'pipe' is not installed .*in_process"):
        find_channel("pipe")
    with pytest.raises(PluginError, match="in_process"):
        find_channel("in_process").make_sender(None, None)  # type: ignore[arg-type]
