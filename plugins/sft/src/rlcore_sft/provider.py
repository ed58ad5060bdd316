"""The provider for the entry point."""

from rlcore.spi import Provider
from rlcore_sft.config import SftConfig

PROVIDER = Provider(name="sft", spi=(2, 0), priority=50, config=SftConfig, backend="rlcore_sft.algorithm:Sft")
