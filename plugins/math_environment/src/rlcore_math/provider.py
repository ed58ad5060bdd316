"""What the entry points name. Nothing heavy is imported here."""

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_math.config import ArithmeticConfig, MathConfig, num_processes

ARITHMETIC = Provider(
    name="arithmetic",
    spi=SPI_VERSION,
    config=ArithmeticConfig,
    backend="rlcore_math.arithmetic:ArithmeticEnvironment",
    capabilities={capabilities.CHEAP_RESET},
    check="rlcore_math.checks:check_arithmetic",
)

MATH = Provider(
    name="math",
    spi=SPI_VERSION,
    config=MathConfig,
    backend="rlcore_math.mathematics:MathEnvironment",
    capabilities={capabilities.CHEAP_RESET},
    check="rlcore_math.checks:check_math",
    max_concurrent=num_processes,
)
