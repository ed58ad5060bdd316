"""The descriptions of the commands on bundles and runs, and of the observers that write bundles and receipts."""

from rlcore.spi import SPI_VERSION, CommandSpec, LoopObserverProvider
from rlcore_bundles.receipts.config import ReceiptsConfig

RECORD = CommandSpec(
    name="record",
    spi=SPI_VERSION,
    help="Write one step of a run to a bundle.",
    command="rlcore_bundles.record_command:record_command",
    priority=62,
)
REPLAY = CommandSpec(
    name="replay",
    spi=SPI_VERSION,
    help="Compute a bundle's step again, and name the first difference.",
    command="rlcore_bundles.replay_command:replay_command",
    priority=61,
)
DIFF = CommandSpec(
    name="diff",
    spi=SPI_VERSION,
    help="Name the step, the figure and the token where two runs part.",
    command="rlcore_bundles.diff_command:diff_command",
    priority=60,
)
BISECT = CommandSpec(
    name="bisect",
    spi=SPI_VERSION,
    help="Name the component that brings the difference of two steps.",
    command="rlcore_bundles.bisect_command:bisect_command",
    priority=58,
)
CERTIFY = CommandSpec(
    name="certify",
    spi=SPI_VERSION,
    help="Write one page: which proofs a run holds.",
    command="rlcore_bundles.certificate.command:certify_command",
    priority=59,
)
COMPARE = CommandSpec(
    name="compare",
    spi=SPI_VERSION,
    help="Compute a bundle's step by another framework's code, and name the conventions that differ.",
    command="rlcore_bundles.compare_command:compare_command",
    priority=57,
)
BUNDLES = LoopObserverProvider(name="bundles", spi=SPI_VERSION, observer="rlcore_bundles.observer:BundleObserver")
RECEIPTS = LoopObserverProvider(
    name="receipts",
    spi=SPI_VERSION,
    observer="rlcore_bundles.receipts.observer:Receipts",
    config=ReceiptsConfig,
    check="rlcore_bundles.receipts.rules:section_problems",
)
