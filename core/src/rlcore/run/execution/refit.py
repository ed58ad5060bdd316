"""Bringing the generator to the trainer's weights."""

from collections.abc import Callable
from typing import TypeVar

from attrs import define, field

from rlcore.registry.plugin_errors import first_line
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import Delta, DraftCounts, DtypeName, ExportWeightsRequest, RefitError, WorkerError, find_channel
from rlcore.spi.execution import Backends, GeneratorGroup, RefitCommand, Refitted, WeightRoute

ResultT = TypeVar("ResultT")


@define(kw_only=True, eq=False)
class Refitter:
    """Exports, hands over, and counts a version only once the generator has acknowledged every digest."""

    route: WeightRoute
    generator: GeneratorGroup
    channel: str
    dtype: DtypeName
    max_bucket_bytes: int
    max_attempts: int
    delta: Delta = "off"
    unmerged: bool = False
    """True where adapters travel without the weights, which the generator keeps."""
    may_alias: bool
    """True where the generator may keep the trainer's own tensors: not where it goes on while the trainer steps."""
    clock: PhaseClock
    progress: Progress
    max_adapters: int = 1
    """Most adapters that the generator holds. Beyond it a refit drops those that were used longest ago."""
    adapter: str = ""
    """The adapter that refits bring, which is the trainer's in use."""
    held: dict[str, int] = field(factory=dict)
    """The version of each adapter that the generator has acknowledged, -1 of one to be brought again; those used longest ago
    come first. Empty where it may hold no weights."""
    drafts: DraftCounts | None = None
    """Counts of draft tokens that `take_metrics` has not reported yet."""
    sent_bytes: int | None = None
    """Bytes that refits have sent and `take_metrics` has not reported yet."""

    @classmethod
    def of(cls, plan: BackendPlan, backends: Backends, clock: PhaseClock, progress: Progress) -> "Refitter | None":
        """A plan's; None where nothing generates."""
        if backends.generator is None or backends.route is None or plan.channel is None:
            return None
        return cls(
            route=backends.route,
            generator=backends.generator,
            channel=plan.channel,
            dtype=plan.model.dtype,
            max_bucket_bytes=plan.recipe.refit.max_bucket_mib * 2**20,
            max_attempts=plan.recipe.refit.max_attempts,
            delta=plan.recipe.refit.delta,
            unmerged=plan.generator_lora is not None,
            max_adapters=plan.recipe.refit.max_adapters,
            may_alias=not plan.overlaps,
            clock=clock,
            progress=progress,
        )

    @property
    def version(self) -> int:
        """The version of the adapter that the generator has acknowledged; -1 where it may hold none."""
        return self.held.get(self.adapter, -1)

    def forget(self, adapter: str) -> None:
        """Bring an adapter again, whatever version of it is held."""
        if adapter in self.held:
            self.held = {**self.held, adapter: -1}

    def use(self, adapter: str) -> None:
        """Note that samples of an adapter that is held are asked for."""
        self.held = {**_without(self.held, adapter), adapter: self.held[adapter]}

    def refit(self, weight_version: int) -> None:
        """Bring the generator to a version that it does not hold yet. RefitError or WorkerError where no attempt does."""
        if self.version == weight_version:
            return
        with self.clock.phase("refit"):
            refitted, kept = Refitted(), dict[str, int]()
            for attempt in range(1, self.max_attempts + 1):
                order, kept = self._order(weight_version)
                self.held = {}
                try:
                    refitted = self.route.sync_weights(order)
                    break
                except (RefitError, WorkerError) as error:
                    if attempt == self.max_attempts or not self.generator.is_usable:
                        raise
                    self.progress.note(f"refit to version {weight_version} failed and is tried again: {first_line(error)}")
        self.held = {**kept, self.adapter: weight_version}
        if refitted.drafts is not None:
            self.drafts = refitted.drafts + (self.drafts or DraftCounts())
        if refitted.sent_bytes is not None:
            self.sent_bytes = refitted.sent_bytes + (self.sent_bytes or 0)

    def take_metrics(self) -> dict[str, float]:
        """Figures since they were taken last: of engines that came back, of bytes sent, and of what the generator has guessed;
        none of what has not been."""
        num_restarts = self.generator.take_restarts()
        figures = {"generation/engine_restarts": float(num_restarts)} if num_restarts else {}
        sent_bytes, self.sent_bytes = self.sent_bytes, None
        if sent_bytes is not None:
            figures["refit/sent_mib"] = sent_bytes / 2**20
        drafts, self.drafts = self.drafts, None
        if drafts is None or not drafts.num_drafts:
            return figures
        return figures | {
            "speculative/draft_tokens": float(drafts.num_draft_tokens),
            "speculative/accepted_tokens": float(drafts.num_accepted_tokens),
            "speculative/acceptance_rate": drafts.num_accepted_tokens / drafts.num_draft_tokens,
            "speculative/mean_acceptance_length": 1 + drafts.num_accepted_tokens / drafts.num_drafts,
        }

    def _order(self, weight_version: int) -> tuple[RefitCommand, dict[str, int]]:
        """Return the command that brings a version to a generator which holds what it has acknowledged, or nothing, and the
        other adapters that it then keeps."""
        lacks_weights = not self.held or self.generator.lacks_weights
        is_alone = self.unmerged and not lacks_weights
        others = _without(self.held, self.adapter) if is_alone else {}
        drops = tuple(others)[: max(len(others) + 1 - self.max_adapters, 0)]
        export = ExportWeightsRequest(
            weight_version=weight_version,
            dtype=self.dtype,
            max_bucket_bytes=self.max_bucket_bytes,
            sharded=find_channel(self.channel).sharded,
            delta=self.delta if find_channel(self.channel).sharded else "off",
            adapters="merged" if not self.unmerged else "alone" if is_alone else "apart",
        )
        order = RefitCommand(
            export=export,
            channel=self.channel,
            may_alias=self.may_alias,
            delta=self.delta,
            adapter=self.adapter,
            drops=drops,
        )
        return order, _without(others, *drops)

    def generating(self, generate: Callable[[], ResultT], refit: Callable[[], None]) -> ResultT:
        """Return the result of `generate` after `refit`, which calls `self.refit`, has brought the weights. A worker that dies
        in it costs one more attempt: the seeds are the same, and so are the samples."""
        for attempt in range(1, self.max_attempts + 1):
            refit()
            try:
                return generate()
            except WorkerError as error:
                self.held = {}
                if attempt == self.max_attempts or not self.generator.is_usable:
                    raise
                self.progress.note(f"generation failed and is tried again: {first_line(error)}")
        raise AssertionError("unreachable: refit.max_attempts is at least 1")


def _without(held: dict[str, int], *names: str) -> dict[str, int]:
    return {name: version for name, version in held.items() if name not in names}
