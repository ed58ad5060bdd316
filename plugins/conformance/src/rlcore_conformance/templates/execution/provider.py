"""Execution `newplugin`: its description and options."""

from attrs import frozen

from rlcore.spi import ClusterConfig, Provider


@frozen(kw_only=True)
class NewPluginConfig(ClusterConfig):
    """`[cluster]`, where a recipe sets `execution = "newplugin"`: add options here."""


PROVIDER = Provider(
    name="newplugin",
    spi=(0, 0),
    config=NewPluginConfig,
    backend="rlcore_newplugin.backend:NewPlugin",
)
