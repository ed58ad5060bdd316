"""The description of the collector of episodes."""

from rlcore.spi import SPI_VERSION, CollectorProvider

EPISODES = CollectorProvider(
    name="episodes",
    spi=SPI_VERSION,
    priority=50,
    collector="rlcore_rollout.episode_collector:EpisodeCollector",
    check="rlcore_rollout.check:check",
)
