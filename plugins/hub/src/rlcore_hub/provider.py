"""The descriptions of the observers."""

from rlcore.spi import SPI_VERSION, LoopObserverProvider
from rlcore_hub.config import ExportsConfig

MODEL_CARD = LoopObserverProvider(name="model_card", spi=SPI_VERSION, observer="rlcore_hub.model_card:ModelCard")
PUSH_TO_HUB = LoopObserverProvider(
    name="push_to_hub", spi=SPI_VERSION, observer="rlcore_hub.upload:HubUpload", check="rlcore_hub.check:hub_problems"
)
EXPORTS = LoopObserverProvider(
    name="exports",
    spi=SPI_VERSION,
    observer="rlcore_hub.exports:Exports",
    config=ExportsConfig,
    check="rlcore_hub.exports:export_problems",
)
