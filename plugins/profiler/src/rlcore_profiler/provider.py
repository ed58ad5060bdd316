"""The entry point of the loop's observer, which imports no torch."""

from rlcore.spi import SPI_VERSION, LoopObserverProvider

PROFILE = LoopObserverProvider(
    name="profile",
    spi=SPI_VERSION,
    observer="rlcore_profiler.driver_profile:driver_profile",
    check="rlcore_profiler.driver_profile:profile_problems",
)
