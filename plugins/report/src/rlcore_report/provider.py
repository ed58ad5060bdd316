"""The descriptions of `rlcore report`, `rlcore show` and `rlcore trace`."""

from rlcore.spi import SPI_VERSION, CommandSpec

REPORT = CommandSpec(
    name="report",
    spi=SPI_VERSION,
    help="Write one HTML page about one or more runs.",
    command="rlcore_report.command:report_command",
    priority=75,
)
SHOW = CommandSpec(
    name="show",
    spi=SPI_VERSION,
    help="Show samples with their rewards and advantages.",
    command="rlcore_report.show_command:show_command",
    priority=80,
)
TRACE = CommandSpec(
    name="trace",
    spi=SPI_VERSION,
    help="Write the timeline of some steps for ui.perfetto.dev.",
    command="rlcore_report.trace_command:trace_command",
    priority=65,
)
