"""Algorithm `newplugin`, described without importing torch."""

from attrs import frozen

from rlcore.spi import Provider


@frozen(kw_only=True)
class NewPluginConfig:
    """`[algorithm.newplugin]`."""

    positive_only: bool = False
    """Learn only from samples that are better than the mean."""


PROVIDER = Provider(name="newplugin", spi=(0, 0), config=NewPluginConfig, backend="rlcore_newplugin.backend:NewPlugin")
