"""Sink `newplugin`: its description and options."""

from attrs import frozen

from rlcore.spi import Provider


@frozen(kw_only=True)
class NewPluginConfig:
    """`[sinks.newplugin]`."""

    figure: str = "reward_mean"
    """Name of a figure of metrics.jsonl."""


PROVIDER = Provider(name="newplugin", spi=(0, 0), config=NewPluginConfig, backend="rlcore_newplugin.backend:NewPlugin")
