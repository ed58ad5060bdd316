"""Which channel weights take: the cheapest that both sides declare on the device, as configured, or the one that is forced."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.entries import ChannelEntry
from rlcore.run.plan.channel import takes_weights
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ChannelProvider, PluginError, Provider, capabilities, installed_channels
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

EVERY = ("in_process", "shared_memory", "cuda_ipc", "nccl", "directory")
"""What the providers of these tests declare: a channel that is added changes none of these choices."""
APART = ("cluster.gpus_per_node=2", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")
THERE_ON_CPU = "On cpu there are " + ", ".join(
    one.name
    for one in sorted(installed_channels().values(), key=attrgetter("cost"))
    if "cpu" in one.devices and not one.sharded
)


@frozen(kw_only=True)
class Layout:
    """Options that rule channels out."""

    lost: tuple[str, ...] = ()
    """Capabilities to take away."""


def declaring(provider: Provider, *channels: str, **changes: Any) -> Provider:
    others = {name for name in provider.capabilities if not name.startswith("refit.")}
    return evolve(provider, capabilities=others | {f"refit.{channel}" for channel in channels}, **changes)


def registry(trainer: Provider, generator: Provider) -> Registry:
    return Registry.from_providers(
        {
            "trainer": [trainer],
            "generator": [generator],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


@pytest.mark.parametrize(
    ("device", "trainer", "generator", "expected"),
    [
        ("cpu", EVERY, EVERY, "in_process"),
        ("cpu", EVERY, EVERY[1:], "shared_memory"),
        ("cpu", ("in_process", "directory"), EVERY[1:], "directory"),
        ("cuda", EVERY, EVERY, "cuda_ipc"),
        ("cuda", EVERY, ("in_process",), "in_process"),
        ("cuda", EVERY, ("in_process", "nccl", "directory"), "nccl"),
        ("cuda", EVERY, ("shared_memory", "directory"), "directory"),
    ],
)
def test_the_cheapest_of_both_is_taken(
    prepared: Callable[..., RunPlan], device: str, trainer: tuple[str, ...], generator: tuple[str, ...], expected: str
) -> None:
    both = registry(declaring(FAKE_TRAINER, *trainer), declaring(FAKE_GENERATOR, *generator))
    assert prepared(f"run.device={device}", "model.dtype=float32", registry=both).channel == expected


def test_a_layout_takes_channels_away(prepared: Callable[..., RunPlan]) -> None:
    generator = declaring(FAKE_GENERATOR, *EVERY, config=Layout, disabled_capabilities=lambda config: frozenset(config.lost))
    both = registry(declaring(FAKE_TRAINER, *EVERY), generator)
    found = prepared('generator.fake.lost=["refit.in_process"]', registry=both)
    assert found.channel == "shared_memory"
    provider = found.chosen["generator"].provider
    assert provider is not None
    assert "refit.in_process" not in provider.capabilities


def test_a_channel_is_chosen_by_its_description_alone(
    prepared: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen, ruled out and counted among the devices that are shared."""
    pipe = ChannelProvider(
        name="pipe", spi=(2, 0), cost=5, devices={"cuda"}, reach="separate", sender="json:loads", receiver="json:loads"
    )
    monkeypatch.setitem(installed_channels(), "pipe", pipe)
    entry = ChannelEntry(name="pipe", distribution="pipes", version="1").holding(pipe)
    for trainer, generator in (("refit.pipe",) * 2, ("separate_channels",) * 2, ("separate_channels", "refit.pipe")):
        both = registry(*(with_names(one, name) for one, name in ((FAKE_TRAINER, trainer), (FAKE_GENERATOR, generator))))
        both = evolve(both, channels=(*both.channels, entry))
        found = prepared("run.device=cuda", "model.dtype=float32", registry=both)
        assert found.channel == "pipe"
        assert not found.shares_devices
        with pytest.raises(PluginError, match=THERE_ON_CPU):
            prepared("run.device=cpu", registry=both)


def with_names(provider: Provider, *names: str) -> Provider:
    return evolve(declaring(provider), capabilities=declaring(provider).capabilities | {*names})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("in_proces", r"refit.channel: 'in_proces' is not installed. Did you mean \"in_process\"\?"),
        ("elsewhere", "refit.channel: 'elsewhere' is not installed$"),
        ("broken", "refit.channel: 'broken' is not usable: it names"),
        ("absent", "refit.channel: 'absent' is not usable: no such driver"),
        ("off", "refit.channel: 'off' is disabled"),
    ],
)
def test_a_named_channel_that_cannot_be_used(prepared: Callable[..., RunPlan], name: str, expected: str) -> None:
    form: dict[str, Any] = {"spi": (2, 0), "cost": 5, "devices": {"cpu"}, "reach": "process"}
    described = (
        ChannelProvider(name="broken", sender="not_there:S", receiver="not_there:R", **form),
        ChannelProvider(name="absent", unavailable=lambda: "no such driver", **form),
    )
    entries = [ChannelEntry(name=one.name, distribution="pipes", version="1").holding(one) for one in described]
    off = ChannelEntry(name="off", distribution="pipes", version="1", disabled=True)
    both = registry(FAKE_TRAINER, FAKE_GENERATOR)
    with pytest.raises(PluginError, match=expected):
        prepared(f"refit.channel={name}", registry=evolve(both, channels=(*both.channels, *entries, off)))


def test_a_forced_channel_is_taken_or_refused(prepared: Callable[..., RunPlan]) -> None:
    both = registry(declaring(FAKE_TRAINER, *EVERY), declaring(FAKE_GENERATOR, "in_process", "directory"))
    assert prepared("refit.channel=directory", registry=both).channel == "directory"
    with pytest.raises(PluginError, match=r"on cpu. Wanted: shared_memory. Declared, as configured: .*refit.directory"):
        prepared("refit.channel=shared_memory", registry=both)
    with pytest.raises(PluginError, match=THERE_ON_CPU):
        prepared("refit.channel=nccl", registry=registry(FAKE_TRAINER, declaring(FAKE_GENERATOR, *EVERY)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_travel_between_devices_where_they_are_asked_for(prepared: Callable[..., RunPlan], device: str) -> None:
    """Whatever a section takes away: it does not know of the cluster's layout."""
    lost = {"config": Layout, "disabled_capabilities": lambda config: frozenset({"refit.shards"})}
    both = registry(declaring(FAKE_TRAINER, *EVERY, "shards"), declaring(FAKE_GENERATOR, *EVERY, "shards", **lost))
    options = (f"run.device={device}", "model.dtype=float32")
    apart = ("cluster.gpus_per_node=2", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")
    assert prepared(*options, *apart, "refit.channel=shards", registry=both).channel == "shards"
    assert prepared(*options, *apart, registry=both).channel == ("nccl" if device == "cuda" else "in_process")
    with pytest.raises(PluginError, match="Wanted: shards"):
        prepared(*options, "refit.channel=shards", registry=both)


@pytest.mark.parametrize(
    ("trainer", "generator", "options", "expected"),
    [
        ((*EVERY, "shards"), (*EVERY, "shards"), APART, "nccl"),
        (("nccl", "shards"), ("nccl", "shards"), APART, "nccl"),
        ((*EVERY, "shards"), (*EVERY, "shards"), (*APART, "refit.delta=device"), "shards"),
        ((*EVERY, "shards"), (*EVERY, "shards"), (), "cuda_ipc"),
        (("shards",), ("shards",), (), None),
        (("shards", "directory"), (*EVERY, "shards"), APART, "shards"),
        ((*EVERY, "shards"), ("shards", "directory"), APART, "shards"),
    ],
)
def test_parts_are_chosen_only_where_whole_tensors_have_no_channel_between_devices(
    prepared: Callable[..., RunPlan],
    trainer: tuple[str, ...],
    generator: tuple[str, ...],
    options: tuple[str, ...],
    expected: str | None,
) -> None:
    """Between GPUs of a machine broadcasts are the faster of the two, unless changes alone are asked for."""
    delta = frozenset({capabilities.DELTA_REFIT})
    sides = (declaring(FAKE_TRAINER, *trainer), declaring(FAKE_GENERATOR, *generator))
    both = registry(*(evolve(provider, capabilities=provider.capabilities | delta) for provider in sides))
    call = partial(prepared, "run.device=cuda", "model.dtype=float32", *options, registry=both)
    if expected is None:
        with pytest.raises(PluginError, match="no channel brings weights"):
            call()
    else:
        assert call().channel == expected


def test_changes_alone_need_a_channel_and_two_sides_that_know_them(prepared: Callable[..., RunPlan]) -> None:
    def both(*capabilities_of_each: frozenset[str]) -> Registry:
        trainer, generator = (
            evolve(provider, capabilities=provider.capabilities | more)
            for provider, more in zip(
                (declaring(FAKE_TRAINER, *EVERY, "shards"), declaring(FAKE_GENERATOR, *EVERY, "shards")),
                capabilities_of_each,
                strict=True,
            )
        )
        return registry(trainer, generator)

    delta = frozenset({capabilities.DELTA_REFIT})
    options = ("model.dtype=float32", "refit.delta=host")
    apart = ("cluster.gpus_per_node=2", "cluster.placement=separate", "cluster.generator_gpus_per_node=1")
    assert prepared(*options, *apart, registry=both(delta, delta)).channel == "shards"
    for which in ((delta, frozenset[str]()), (frozenset[str](), delta)):
        with pytest.raises(PluginError, match=r'delta_refit.*refit\.delta = "host"'):
            prepared(*options, *apart, registry=both(*which))
    assert prepared(*options, registry=both(delta, delta)).channel == "directory"
    with pytest.raises(PluginError, match=r'On cpu with refit\.delta = "host"'):
        prepared(*options, "refit.channel=in_process", registry=both(delta, delta))
    with pytest.raises(PluginError, match=r"Wanted: nccl.*there are shards, directory\."):
        prepared(*options, *apart, "refit.channel=nccl", registry=both(delta, delta))


def test_a_generator_that_takes_no_weights_is_refused_to_train(prepared: Callable[..., RunPlan]) -> None:
    assert takes_weights(Entry(role="generator", name="fake", distribution="fakes", version="1").holding(FAKE_GENERATOR))
    with pytest.raises(PluginError, match="takes no weights"):
        prepared(registry=registry(FAKE_TRAINER, declaring(FAKE_GENERATOR)))


def test_a_broken_function_is_named(prepared: Callable[..., RunPlan]) -> None:
    generator = evolve(FAKE_GENERATOR, disabled_capabilities=lambda config: 1 / 0)
    expected = "generator 'fake' is not usable: its function `disabled_capabilities` raised ZeroDivisionError"
    with pytest.raises(PluginError, match=expected):
        prepared("generator.name=fake", registry=registry(FAKE_TRAINER, generator))
