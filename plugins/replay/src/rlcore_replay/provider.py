"""The description of the collector that repeats a run."""

from rlcore.spi import SPI_VERSION, CollectorProvider

REPLAY = CollectorProvider(
    name="replay",
    spi=SPI_VERSION,
    priority=50,
    collector="rlcore_replay.schedule_reader:ReplayCollector",
    check="rlcore_rollout.check:check",
    runs={"replay"},
)
