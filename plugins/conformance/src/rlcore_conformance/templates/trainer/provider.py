"""Trainer `newplugin`, described without importing torch."""

from attrs import frozen

from rlcore.spi import Provider


@frozen(kw_only=True)
class NewPluginConfig:
    """`[trainer.newplugin]`."""


PROVIDER = Provider(
    name="newplugin",
    spi=(0, 0),
    config=NewPluginConfig,
    backend="rlcore_newplugin.backend:NewPlugin",
    capabilities={"entropy", "previous_logprobs", "save_hf", "schedule_step", "refit.in_process"},
)
