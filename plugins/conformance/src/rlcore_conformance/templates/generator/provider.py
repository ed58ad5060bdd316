"""Generator `newplugin`, described without importing torch."""

from attrs import frozen

from rlcore.spi import Provider, capabilities


@frozen(kw_only=True)
class NewPluginConfig:
    """`[generator.newplugin]`."""


PROVIDER = Provider(
    name="newplugin",
    spi=(0, 0),
    config=NewPluginConfig,
    backend="rlcore_newplugin.backend:NewPlugin",
    capabilities={capabilities.PER_SAMPLE_SEEDS, "refit.in_process"},
)
