"""The provider for the entry point; it imports nothing heavy."""

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_shapes.config import ShapesConfig

SHAPES = Provider(
    name="drawn_shapes",
    spi=SPI_VERSION,
    config=ShapesConfig,
    backend="rlcore_shapes.environment:ShapesEnvironment",
    capabilities={capabilities.CHEAP_RESET},
)
