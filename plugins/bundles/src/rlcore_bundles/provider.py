"""The descriptions of the commands on bundles and runs, and of the observers that write bundles and receipts."""

from rlcore.spi import SPI_VERSION, CommandSpec, LoopObserverProvider
from rlcore_bundles.receipts.config import ReceiptsConfig


def _command(name: str, priority: int, text: str, module: str) -> CommandSpec:
    path = f"rlcore_bundles.{module}:{name}_command"
    return CommandSpec(name=name, spi=SPI_VERSION, help=text, command=path, priority=priority)


RECORD = _command("record", 62, "Write one step of a run to a bundle.", "record_command")
REPLAY = _command("replay", 61, "Compute a bundle's step again, and name the first difference.", "replay_command")
DIFF = _command("diff", 60, "Name the step, the figure and the token where two runs begin to differ.", "diff_command")
BISECT = _command("bisect", 58, "Name the component that makes two steps differ.", "bisect_command")
CERTIFY = _command("certify", 59, "Write one page: which proofs a run holds.", "certificate.command")
COMPARE = _command(
    "compare",
    57,
    "Compute a bundle's step by another framework's code, and name the conventions that differ.",
    "compare_command",
)
BUNDLES = LoopObserverProvider(name="bundles", spi=SPI_VERSION, observer="rlcore_bundles.observer:BundleObserver")
RECEIPTS = LoopObserverProvider(
    name="receipts",
    spi=SPI_VERSION,
    observer="rlcore_bundles.receipts.observer:Receipts",
    config=ReceiptsConfig,
    check="rlcore_bundles.receipts.rules:section_problems",
)
