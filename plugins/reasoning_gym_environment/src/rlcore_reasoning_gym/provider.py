"""The provider for the entry point; it imports nothing heavy."""

from rlcore.installed import is_installed
from rlcore.spi import SPI_VERSION, Provider
from rlcore_reasoning_gym.config import ReasoningGymConfig, num_processes


def unavailable() -> str | None:
    """Why it cannot run here."""
    if is_installed("reasoning_gym"):
        return None
    return 'needs the package reasoning-gym, which is not installed: pip install "reasoning-gym>=0.1.25,<0.2"'


# Without the capability cheap_reset, for which every row would be made before the run: some families take 0.3 s for each.
REASONING_GYM = Provider(
    name="reasoning_gym",
    spi=SPI_VERSION,
    config=ReasoningGymConfig,
    backend="rlcore_reasoning_gym.environment:ReasoningGymEnvironment",
    check="rlcore_reasoning_gym.checks:check_reasoning_gym",
    unavailable=unavailable,
    max_concurrent=num_processes,
)
