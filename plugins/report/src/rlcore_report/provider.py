"""The descriptions of the commands on runs, and of the observers of a run."""

from rlcore.spi import SPI_VERSION, CommandSpec, LoopObserverProvider
from rlcore_report.callbacks_config import CallbacksConfig

REPORT = CommandSpec(
    name="report",
    spi=SPI_VERSION,
    help="Write one HTML page about one or more runs.",
    command="rlcore_report.command:report_command",
    priority=75,
)
STATUS = CommandSpec(
    name="status",
    spi=SPI_VERSION,
    help="Say what a run is doing, or how it ended.",
    command="rlcore_report.status_command:status_command",
    priority=70,
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
FAILURES = CommandSpec(
    name="failures",
    spi=SPI_VERSION,
    help="Say how the episodes of a run ended, and what failures moved.",
    command="rlcore_report.failures_command:failures_command",
    priority=63,
)
TOP = CommandSpec(
    name="top",
    spi=SPI_VERSION,
    help="Show where the time and the memory of a run go, until it ends.",
    command="rlcore_report.top_command:top_command",
    priority=68,
)
LOGPROB_MISMATCH = LoopObserverProvider(
    name="logprob_mismatch", spi=SPI_VERSION, observer="rlcore_report.mismatch_report:MismatchReport"
)
CALLBACKS = LoopObserverProvider(
    name="callbacks",
    spi=SPI_VERSION,
    observer="rlcore_report.callbacks:Callbacks",
    config=CallbacksConfig,
    check="rlcore_report.callbacks:callback_problems",
)
