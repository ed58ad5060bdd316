"""The names that providers declare."""

from rlcore.spi import CHANNELS, capabilities


def test_capability_constants_and_the_known_set_agree():
    constants = {value for name, value in vars(capabilities).items() if name.isupper() and isinstance(value, str)}
    assert constants | {channel.capability for channel in CHANNELS.values()} == capabilities.KNOWN
