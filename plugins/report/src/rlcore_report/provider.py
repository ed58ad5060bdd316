"""The description of `rlcore report`."""

from rlcore.spi import SPI_VERSION, CommandSpec

REPORT = CommandSpec(
    name="report",
    spi=SPI_VERSION,
    help="Write one HTML page about one or more runs.",
    command="rlcore_report.command:report_command",
    priority=75,
)
