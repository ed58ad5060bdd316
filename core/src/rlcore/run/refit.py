"""Bringing the generator to the trainer's weights."""

from typing import Literal

from attrs import frozen

from rlcore.plugins.handles import GeneratorHandle, TrainerHandle
from rlcore.spi import DtypeName, ExportWeightsRequest, RefitRequest

Channel = Literal["in_process"]
CHANNELS: tuple[Channel, ...] = ("in_process",)
"""Cheapest first."""


@frozen(kw_only=True, eq=False)
class Refitter:
    """Exports, hands over, and counts a version only once the generator has acknowledged every digest."""

    trainer: TrainerHandle
    generator: GeneratorHandle
    channel: Channel
    dtype: DtypeName
    max_bucket_bytes: int

    def refit(self, weight_version: int) -> None:
        """Raises RefitError where the generator does not hold what the trainer exported."""
        export = self.trainer.export_weights(
            ExportWeightsRequest(weight_version=weight_version, dtype=self.dtype, max_bucket_bytes=self.max_bucket_bytes)
        )
        # The loop refits after every update and before it generates again, so the generator may share the trainer's tensors.
        request = RefitRequest(weight_version=weight_version, channel=self.channel, weights=export, may_alias=True)
        self.generator.refit(request)
