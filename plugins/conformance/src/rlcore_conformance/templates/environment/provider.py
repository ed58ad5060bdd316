"""Environment `newplugin`: its description and options."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import between
from rlcore.spi import Provider, capabilities


@frozen(kw_only=True)
class NewPluginConfig:
    """`[environment.newplugin]`."""

    num_train: Annotated[int, between(1, 8000)] = 1000
    """Problems to learn from."""
    num_evaluation: Annotated[int, between(1, 100)] = 100
    """Problems that are held out."""


PROVIDER = Provider(
    name="newplugin",
    spi=(0, 0),
    config=NewPluginConfig,
    backend="rlcore_newplugin.backend:NewPlugin",
    capabilities={capabilities.CHEAP_RESET},
)
