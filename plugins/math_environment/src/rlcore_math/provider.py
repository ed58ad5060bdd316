"""What the entry points name. Nothing heavy is imported here."""

from rlcore.spi import SPI_VERSION, Provider
from rlcore_math.config import ArithmeticConfig, MathConfig

ARITHMETIC = Provider(
    name="arithmetic",
    spi=SPI_VERSION,
    config=ArithmeticConfig,
    backend="rlcore_math.arithmetic:ArithmeticEnvironment",
    check="rlcore_math.checks:check_arithmetic",
)

MATH = Provider(
    name="math",
    spi=SPI_VERSION,
    config=MathConfig,
    backend="rlcore_math.mathematics:MathEnvironment",
    check="rlcore_math.checks:check_math",
)
