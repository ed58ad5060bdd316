"""Descriptions of channels and data sources: their faults, all at once."""

from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.entries import ChannelEntry, DataSourceEntry, DescribedEntry
from rlcore.spi import ChannelProvider, DataSourceProvider

CHANNEL = ChannelProvider(
    name="pipe", spi=(2, 0), cost=5, devices={"cpu"}, reach="shared", sender="json:JSONEncoder", receiver="json:JSONDecoder"
)
SOURCE = DataSourceProvider(name="pipe", spi=(2, 0), read="json:loads", suffixes={".pipe"}, keys={"split"})


def held(kind: type[DescribedEntry], provider: object, name: str = "pipe") -> DescribedEntry:
    return kind(name=name, distribution="pipes", version="1").holding(provider)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "provider", "changes", "expected"),
    [
        (ChannelEntry, CHANNEL, {}, None),
        (ChannelEntry, CHANNEL, {"sender": None, "receiver": None}, None),
        (ChannelEntry, CHANNEL, {"name": "tube"}, "the channel calls itself 'tube', its entry point 'pipe'; expected one name"),
        (ChannelEntry, CHANNEL, {"spi": (9, 0)}, "another major version; upgrade rlcore"),
        (ChannelEntry, CHANNEL, {"sender": "json"}, "sender is 'json'; expected 'package.module:name'"),
        (ChannelEntry, CHANNEL, {"receiver": None}, "receiver None; expected both or neither"),
        (ChannelEntry, CHANNEL, {"devices": "cpu"}, "devices are 'cpu'; expected some of"),
        (ChannelEntry, CHANNEL, {"devices": {"tpu"}}, "expected some of ['cpu', 'cuda']"),
        (ChannelEntry, CHANNEL, {"reach": "any"}, "reach is 'any'; expected one of process, shared, separate, anywhere"),
        (ChannelEntry, CHANNEL, {"cost": "low"}, "cost is 'low'; expected an integer"),
        (DataSourceEntry, SOURCE, {}, None),
        (DataSourceEntry, SOURCE, {"read": None}, "read is None; expected 'package.module:name'"),
        (DataSourceEntry, SOURCE, {"path": "url"}, "path is 'url'; expected one of file, name"),
        (DataSourceEntry, SOURCE, {"suffixes": {"CSV"}}, "suffixes are CSV; expected small letters behind a dot"),
        (DataSourceEntry, SOURCE, {"keys": {"limit"}}, "keys are ['limit']; expected some of subset and split"),
        (DataSourceEntry, SOURCE, {"priority": None}, "priority is None; expected an integer"),
    ],
)
def test_faults_of_descriptions(
    kind: type[DescribedEntry], provider: Any, changes: dict[str, Any], expected: str | None
) -> None:
    error = held(kind, evolve(provider, **changes)).error
    assert error is None if expected is None else expected in str(error)


def test_what_else_an_entry_point_may_name() -> None:
    assert held(ChannelEntry, SOURCE).error == (
        "the entry point names a DataSourceProvider; expected an instance of rlcore.spi.ChannelProvider"
    )
    assert held(ChannelEntry, evolve(CHANNEL, name="auto"), "auto").error == (
        "'auto' cannot be the name of a channel: a recipe writes it to have one chosen; expected another name"
    )
    assert "its rows come from no file" in str(held(DataSourceEntry, evolve(SOURCE, name="python"), "python").error)


def test_what_cannot_be_used_here() -> None:
    assert held(ChannelEntry, CHANNEL).unavailable() is None
    assert held(ChannelEntry, evolve(CHANNEL, unavailable=lambda: "no GPU")).unavailable() == "no GPU"
    broken = held(DataSourceEntry, evolve(SOURCE, read="rlcore.not_there:read")).unavailable()
    assert broken is not None
    assert "not_there" in broken
