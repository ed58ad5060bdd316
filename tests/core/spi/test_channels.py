"""The table of refit channels."""

from rlcore.spi import CHANNELS, channel_capabilities


def test_every_channel_has_its_own_name_and_capability_and_a_device():
    assert all(name == channel.name and channel.devices for name, channel in CHANNELS.items())
    assert len({channel.capability for channel in CHANNELS.values()}) == len(CHANNELS)


def test_trainers_that_export_whole_tensors_declare_no_channel_for_parts():
    assert channel_capabilities() == {f"refit.{name}" for name in CHANNELS} - {"refit.shards"}


def test_every_device_has_a_channel_that_finds_the_generator_anywhere():
    for device in ("cpu", "cuda"):
        assert any(channel.reach == "any" for channel in CHANNELS.values() if device in channel.devices)
