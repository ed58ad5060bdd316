"""The environment `python`, which a program hands to a run."""

from attrs import frozen

from rlcore.spi.provider import Provider
from rlcore.spi.version import SPI_VERSION


@frozen(kw_only=True)
class PythonConfig:
    """`[environment.python]`: takes no options. The environment is an object of the program that calls rlcore.train."""


PROVIDER = Provider(
    name="python", spi=SPI_VERSION, config=PythonConfig, backend="rlcore.registry.missing_environment:MissingEnvironment"
)
