"""The providers for the entry points; they import nothing heavy."""

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_math.config import ArithmeticConfig, CalculatorConfig, MathConfig, num_processes

ARITHMETIC = Provider(
    name="arithmetic",
    spi=SPI_VERSION,
    config=ArithmeticConfig,
    backend="rlcore_math.arithmetic:ArithmeticEnvironment",
    capabilities={capabilities.CHEAP_RESET},
    check="rlcore_math.checks:check_arithmetic",
)

CALCULATOR = Provider(
    name="calculator",
    spi=SPI_VERSION,
    config=CalculatorConfig,
    backend="rlcore_math.calculator:CalculatorEnvironment",
    capabilities={capabilities.CHEAP_RESET},
    check="rlcore_math.checks:check_calculator",
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
