"""The descriptions of `rlcore check`, `rlcore doctor`, `rlcore plugins` and `rlcore version`."""

from rlcore.spi import SPI_VERSION, CommandSpec

CHECK = CommandSpec(
    name="check",
    spi=SPI_VERSION,
    help="Check a recipe and say what would run.",
    command="rlcore_doctor.check_command:check_command",
    priority=55,
)
DOCTOR = CommandSpec(
    name="doctor",
    spi=SPI_VERSION,
    help="Show what is installed, what does not fit together, and what mends it.",
    command="rlcore_doctor.command:doctor_command",
    priority=30,
)
PLUGINS = CommandSpec(
    name="plugins",
    spi=SPI_VERSION,
    help='List the installed plugins, and which ones "auto" takes.',
    command="rlcore_doctor.plugins_command:plugins_command",
    priority=35,
)
VERSION = CommandSpec(
    name="version",
    spi=SPI_VERSION,
    help="Print the versions in use.",
    command="rlcore_doctor.version_command:version_command",
    priority=20,
)
