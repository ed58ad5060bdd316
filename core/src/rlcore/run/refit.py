"""Bringing the generator to the trainer's weights."""

from typing import Literal

from attrs import frozen

from rlcore.run.groups import GeneratorGroup, RefitOrder, WeightRoute
from rlcore.run.progress import Progress
from rlcore.spi import DtypeName, RefitChannel, RefitError, WorkerError

CHANNELS: dict[Literal["cpu", "cuda"], tuple[RefitChannel, ...]] = {
    # Mapping the sender's memory costs as little as handing it over, and leaves the generator an interpreter of its own.
    "cuda": ("cuda_ipc", "nccl", "in_process", "directory"),
    "cpu": ("in_process", "shared_memory", "directory"),
}
"""By device, cheapest first."""
BETWEEN_DEVICES: tuple[RefitChannel, ...] = ("nccl", "directory")
"""From a GPU that trains to those that generate, cheapest first."""


@frozen(kw_only=True, eq=False)
class Refitter:
    """Exports, hands over, and counts a version only once the generator has acknowledged every digest."""

    route: WeightRoute
    generator: GeneratorGroup
    channel: RefitChannel
    dtype: DtypeName
    max_bucket_bytes: int
    max_attempts: int
    progress: Progress

    def refit(self, weight_version: int) -> None:
        """Raises RefitError or WorkerError where the generator does not hold what the trainer exported, in no attempt."""
        order = RefitOrder.of(weight_version, self.dtype, self.max_bucket_bytes, self.channel)
        for attempt in range(1, self.max_attempts + 1):
            try:
                self.route.hand_over(order)
            except (RefitError, WorkerError) as error:
                if attempt == self.max_attempts or not self.generator.is_usable:
                    raise
                self.progress.note(f"refit to version {weight_version} failed and is tried again: {first_line(error)}")
            else:
                return


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]
