"""The description of `rlcore import`."""

from rlcore.spi import SPI_VERSION, CommandSpec

IMPORT = CommandSpec(
    name="import",
    spi=SPI_VERSION,
    help="Turn the recipe of another library into one of rlcore.",
    command="rlcore_import.command:import_command",
    priority=45,
)
