"""Trainers of several ranks are launched from a server that has imported what the other tests of ranks need too."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "megatron_backend"))
sys.path.insert(0, str(Path(__file__).parent.parent / "fsdp2_backend"))

import rank_launch  # noqa: F401 - names what the server imports


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a class, what takes a generator of adapters comes last: engines that others share would start anew behind it."""
    kits = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent and item.cls is not None]
    order = {cls: number for number, cls in enumerate(dict.fromkeys(items[index].cls for index in kits))}
    ordered = sorted(
        (items[index] for index in kits), key=lambda item: (order[item.cls], "adapted_context" in item.fixturenames)
    )
    for index, item in zip(kits, ordered, strict=True):
        items[index] = item


@pytest.fixture(autouse=True)
def torchao_for_moments_in_8_bits(request: pytest.FixtureRequest) -> None:
    """The checks of recipes refuse such moments without torchao, which encodes them; the kit calls no checks."""
    if "8_bits" in request.node.name or "[8bit]" in request.node.name:
        find_spec("torchao") or pytest.skip("moments in 8 bits need torchao")
