"""The descriptions of both observers."""

from rlcore.spi import SPI_VERSION, LoopObserverProvider

MODEL_CARD = LoopObserverProvider(name="model_card", spi=SPI_VERSION, observer="rlcore_hub.model_card:ModelCard")
PUSH_TO_HUB = LoopObserverProvider(
    name="push_to_hub", spi=SPI_VERSION, observer="rlcore_hub.upload:HubUpload", check="rlcore_hub.check:hub_problems"
)
