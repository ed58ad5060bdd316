"""Kinds of devices, and how a number of them is written."""

import pytest

from rlcore.spi import ConfigError
from rlcore_plan.devices import DEVICES, parse_devices


@pytest.mark.parametrize(
    ("text", "nodes", "expected"),
    [
        ("8xH100", None, (1, 8)),
        ("h200", None, (1, 1)),
        ("64 x H100", None, (8, 8)),
        ("16xGB200", None, (4, 4)),
        ("4xH100", 3, (3, 4)),
    ],
)
def test_numbers_of_devices_are_machines(text: str, nodes: int | None, expected: tuple[int, int]) -> None:
    devices = parse_devices(text, nodes)
    assert (devices.nodes, devices.per_node) == expected
    assert devices.number == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("text", "nodes", "words"),
    [
        ("8xA100", None, ["A100", "H100, H200, GB200"]),
        ("8xH10", None, ["did you mean 'H100'"]),
        ("12xH100", None, ["found 12", "a multiple of 8"]),
        ("16xH100", 2, ["16 on each machine", "at most 8"]),
        ("0xH100", None, ['such as "8xH100"']),
        ("lots", 1, ["lots"]),
        ("8 gpus, please", None, ['such as "8xH100"']),
    ],
)
def test_what_is_no_number_of_a_known_kind_is_refused(text: str, nodes: int | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_devices(text, nodes)
    assert all(word in str(error.value) for word in [*words, "--gpus"])


def test_newer_devices_are_no_slower_and_no_smaller() -> None:
    for older, newer in (("H100", "H200"), ("H200", "GB200")):
        for rate in ("memory_bytes", "flops", "bandwidth", "link"):
            assert getattr(DEVICES[older], rate) <= getattr(DEVICES[newer], rate)


def test_products_of_8_bits_are_twice_as_fast_at_their_peak() -> None:
    for device in DEVICES.values():
        assert device.float8_flops == pytest.approx(2 * device.flops, rel=1e-3)
