"""Trainer, generator and the way between them, on the ranks of a pool."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from rlcore import spi
from rlcore.execution import WIDTH, GradientsRequest, GradientsResult, MinibatchTrainer, TokensRequest, read_by, with_columns
from rlcore.spi.arrays import Float32Array, Int64Array, offsets_of
from rlcore.spi.execution import LogprobsColumn, Minibatch, RefitCommand, Refitted, ResponseFeed
from rlcore_ray.calls import Calls
from rlcore_ray.collector_hosts import CollectorPlaces, HostedCollector, start_collectors
from rlcore_ray.commands import RefittedRank, TrainedModel
from rlcore_ray.dispatch import Dispatch
from rlcore_ray.elastic import ElasticEngines
from rlcore_ray.engines import Engines
from rlcore_ray.pool_stream import PoolStream
from rlcore_ray.step_data_cache import CachedColumn, CachedMinibatch

TOLERANCE = 1e-6
"""Relative and absolute tolerance: ranks may round a reduction differently."""


@frozen(kw_only=True, eq=False)
class _PoolGroup:
    """The common part of trainers and generators of a pool."""

    calls: Calls
    capabilities: frozenset[str]

    @property
    def is_usable(self) -> bool:
        """Return whether every rank lives and is in a known state."""
        return self.calls.is_usable

    def has(self, capability: str) -> bool:
        """Return whether the provider declares a capability."""
        return capability in self.capabilities


@frozen(kw_only=True, eq=False)
class PoolTrainer(_PoolGroup, MinibatchTrainer):
    """The trainer on all ranks."""

    model: TrainedModel
    """The one of the ranks' trainers that it is."""
    members: Sequence[Sequence[int]]
    """The ranks of each data-parallel rank; they get the same data, and the first returns what comes of it."""
    max_tokens_per_microbatch: int
    temperature: float
    width: int = WIDTH
    """The model's hidden size, by which attention weighs more or less."""
    whole_groups: bool = False

    def with_logprobs(
        self, minibatches: Sequence[Minibatch], columns: Sequence[LogprobsColumn], read: Collection[str], weight_version: int
    ) -> list[Minibatch]:
        """See TrainerGroup. Each rank gets the data of all updates at once and keeps its log-probabilities, so that a token
        passes the driver once a step."""
        batch = with_columns(minibatches[0].batch, {*read, spi.GENERATION_LOGPROBS, spi.ROUTED_EXPERTS})
        dispatches = [self._dispatch(batch, one.sequences, self._groups(batch, one.sequences)) for one in minibatches]
        updates, whole = offsets_of([dispatch.num_microbatches for dispatch in dispatches]), Dispatch.joined(dispatches)
        held = [
            CachedColumn(
                name=column.name,
                request=self._logprobs_request(column.model, weight_version),
                passes=whole.passes(batch.lengths, self.max_tokens_per_microbatch, int(updates[column.first])),
            )
            for column in columns
        ]
        parts = self._parts(batch, whole)
        self.calls.together("hold_step", [(self.model, held, updates, *parts[rank]) for rank in sorted(parts)])
        return [
            evolve(minibatch, held=CachedMinibatch(number=number, dispatch=dispatch))
            for number, (minibatch, dispatch) in enumerate(zip(minibatches, dispatches, strict=True))
        ]

    def forward_backward_together(
        self, pieces: Mapping[str, tuple[spi.ForwardBackwardRequest, Minibatch]]
    ) -> dict[str, tuple[spi.ForwardBackwardResult, Float32Array | None]]:
        """See TrainerGroup."""
        hook, leaders = "forward_backward_together", [ranks[0] for ranks in self.members]
        requests = {name: request for name, (request, _) in pieces.items()}
        dispatched = {name: self._dispatched(*piece) for name, piece in pieces.items()}
        given = []
        for rank in range(len(self.calls.ranks)):
            own = [parts[rank] for _, parts in dispatched.values()]
            numbers = [number for _, number in own]
            # Objects of Ray's store come as arguments of their own: Ray looks for them no deeper.
            stored = [one for one, _ in own]
            given.append((self.model, requests, rank in leaders, numbers, *stored))
        results: list[dict[str, spi.ForwardBackwardResult]] = self.calls.together(hook, given)
        return {
            name: self._joined(hook, [result[name] for result in results], dispatched[name][0], *piece)
            for name, piece in pieces.items()
        }

    def _dispatched(self, request: GradientsRequest, minibatch: Minibatch) -> tuple[Dispatch, dict[int, tuple[Any, int]]]:
        """Return how a minibatch is divided, and each rank's part of it."""
        batch, sequences, held = read_by(request.loss, minibatch.batch), minibatch.sequences, minibatch.held
        if isinstance(held, CachedMinibatch):
            return held.dispatch, {rank: (None, held.number) for ranks in self.members for rank in ranks}
        dispatch = self._dispatch(batch, sequences, self._groups(batch, sequences))
        return dispatch, self._parts(batch, dispatch)

    def _train(self, request: GradientsRequest, minibatch: Minibatch) -> tuple[Any, Float32Array | None]:
        """The step or piece, each data-parallel rank with its part of the sequences."""
        leaders, (dispatch, parts) = [ranks[0] for ranks in self.members], self._dispatched(request, minibatch)
        given = [(self.model, request, *parts[rank], rank in leaders) for rank in sorted(parts)]
        hook = "train_step" if isinstance(request, spi.TrainStepRequest) else "forward_backward"
        return self._joined(hook, self.calls.together(hook, given), dispatch, request, minibatch)

    def _joined(
        self, hook: str, results: Sequence[Any], dispatch: Dispatch, request: GradientsRequest, minibatch: Minibatch
    ) -> tuple[Any, Float32Array | None]:
        """Return the figures that all ranks agree on, and the log-probabilities where they are asked for."""
        self._require_agreement(hook, [evolve(result, logprobs=None) for result in results])
        leaders = [ranks[0] for ranks in self.members]
        arrays = [array for leader in leaders for array in results[leader].logprobs or ()]
        batch = read_by(request.loss, minibatch.batch)
        return results[leaders[0]], dispatch.join(batch, arrays) if request.logprobs else None

    def optim_step(self, request: spi.OptimStepRequest) -> spi.OptimStepResult:
        """See TrainerGroup."""
        results: list[spi.OptimStepResult] = self.calls.together("optim_step", [(self.model, request)] * len(self.calls.ranks))
        self._require_agreement("optim_step", results)
        return results[0]

    def use_adapter(self, request: spi.UseAdapterRequest) -> spi.UseAdapterResult:
        """See TrainerGroup."""
        results: list[spi.UseAdapterResult] = self.calls.together(
            "use_adapter", [(self.model, request)] * len(self.calls.ranks)
        )
        return results[0]

    def _require_agreement(self, hook: str, results: Sequence[GradientsResult | spi.OptimStepResult]) -> None:
        """ContractError where a rank reports other figures than rank 0."""
        for rank, result in enumerate(results):
            if not _same_figures(result, results[0]):
                self.calls.lose("ranks disagree on the figures of a step")
                raise spi.ContractError(f"{hook}: {self.calls.workers[rank]} returned {result}; expected rank 0's {results[0]}")

    def _evaluate(self, request: TokensRequest, batch: spi.TokenBatch, sequences: Int64Array) -> Float32Array:
        dispatch = self._dispatch(batch, sequences, None)
        parts, leaders = self._parts(batch, dispatch), [ranks[0] for ranks in self.members]
        asked = [(self.model, request, *parts[rank], rank in leaders) for rank in sorted(parts)]
        results = self.calls.together("token_figures", asked)
        return dispatch.join(batch, [results[leader] for leader in leaders])

    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Move what every rank holds; of what is left that of the rank with the most."""
        left = self.calls.together("move_trainer", [(self.model, request)] * len(self.calls.ranks))
        reserved = [each.reserved_bytes for each in left if each.reserved_bytes is not None]
        return spi.SetResidencyResult(
            device_bytes=max(each.device_bytes for each in left), reserved_bytes=max(reserved, default=None)
        )

    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        """Write every rank's part; CheckpointError where the driver does not see it."""
        request = evolve(request, directory=request.directory.absolute())
        written = self.calls.all("save_trainer", self.model, request)
        return spi.SaveStateResult(files=_seen(request.directory, self.calls, range(len(written)), written))

    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore every rank's part."""
        request = evolve(request, directory=request.directory.absolute())
        results: list[spi.LoadStateResult] = self.calls.together(
            "load_trainer", [(self.model, request)] * len(self.calls.ranks)
        )
        if len({result.weight_version for result in results}) > 1:
            raise spi.CheckpointError(f"{request.directory}: ranks loaded different versions: {results}")
        return results[0]

    def _dispatch(self, batch: spi.TokenBatch, sequences: Int64Array, groups: Int64Array | None) -> Dispatch:
        return Dispatch.of(batch, sequences, len(self.members), self.max_tokens_per_microbatch, self.width, groups)

    def _parts(self, batch: spi.TokenBatch, dispatch: Dispatch) -> dict[int, tuple[Any, int]]:
        """Return each rank's object in Ray's store, and its number in it. Ranks of a node share an object, which costs the
        driver as much as a million bytes."""
        import ray

        parts, workers = dispatch.parts(batch), self.calls.workers
        nodes: dict[frozenset[str], list[int]] = {}
        for index, ranks in enumerate(self.members):
            nodes.setdefault(frozenset(workers[rank].node_id for rank in ranks), []).append(index)
        found: dict[int, tuple[Any, int]] = {}
        for indices in nodes.values():
            stored = ray.put([parts[index] for index in indices])
            found |= {rank: (stored, number) for number, index in enumerate(indices) for rank in self.members[index]}
        return found


@frozen(kw_only=True, eq=False)
class PoolGenerator(_PoolGroup):
    """A generator on every rank that hosts one; prompts are dealt out among them."""

    engines: Engines
    beside: Sequence[Calls] = ()
    """Other pools, whose ranks a stream watches over too."""
    watches_others: bool = True
    """False where a stream watches over the ranks of its own engines alone."""
    places: CollectorPlaces | None = None
    """The places of collectors; None within one."""

    @property
    def num_collectors(self) -> int:
        """Return the number of processes that collect; 1 where the driver does."""
        return 1 if self.places is None else len(self.places.parts)

    def start_collectors(self, make: object) -> Sequence[HostedCollector]:
        """Start these processes; `make` builds a collector for a PoolGenerator."""
        assert self.places is not None, "num_collectors says so"
        return start_collectors(self.places, self.engines, self.beside, self.capabilities, make)

    @property
    def hosts(self) -> Sequence[int]:
        """The ranks with a generator."""
        return self.engines.hosts

    @property
    def lacks_weights(self) -> bool:
        """Return whether an engine has failed since the last refit."""
        return not self.engines.are_whole

    def take_restarts(self) -> int:
        """Return how many engines have come back since the last time."""
        return self.engines.take_restarts()

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        """Generate what a feed brings until it ends, each prompt on the host with the least work under way."""
        PoolStream(self.engines, feed, self.beside, watches_others=self.watches_others).run(weight_version)

    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Move what every generator holds. Engines that are out take note of it, and nobody waits for them."""
        found = self.calls.outcomes_apart("move_generator", dict.fromkeys(self.hosts, (request,)))
        left: list[int] = self.calls.values(self.engines.moved(found))
        return spi.SetResidencyResult(device_bytes=max(left, default=0))

    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        """Write every generator's part."""
        request = evolve(request, directory=request.directory.absolute())
        written = self.calls.apart("save_generator", dict.fromkeys(self.hosts, (request,)))
        return spi.SaveStateResult(files=_seen(request.directory, self.calls, self.hosts, written))

    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore every generator's part."""
        request = evolve(request, directory=request.directory.absolute())
        results: list[spi.LoadStateResult] = self.calls.apart("load_generator", dict.fromkeys(self.hosts, (request,)))
        return results[0]


@frozen(kw_only=True, eq=False)
class PoolRoute:
    """Weights go from every trainer rank to the generator beside it."""

    calls: Calls
    engines: Engines
    elastic: ElasticEngines | None = None
    """The engines that join and leave; None where the recipe has none."""

    def sync_weights(self, order: RefitCommand) -> Refitted:
        """Export and refit on all ranks; ContractError unless all exported the same. Engines that fail are left out."""
        were_out = set(self.engines.hosts).difference(self.engines.living)
        not_awaited = frozenset() if order.export.sharded else self.engines.not_awaited
        limit_s = None if self.engines.are_whole or not_awaited else self.calls.cluster.start_timeout_s
        command, publishes = evolve(order, not_awaited=not_awaited), self.elastic is not None
        found = self.calls.outcomes("refit", command, publishes, limit_s=limit_s)
        outcomes = self.engines.survivors(found, is_shared=order.export.sharded)
        refitted: list[RefittedRank] = self.calls.values(outcomes)
        digests = dict(zip(outcomes, (rank.digests for rank in refitted), strict=True))
        first = next(iter(digests.values()))
        for rank, own in digests.items():
            differing = [name for name in own.keys() | first.keys() if own.get(name) != first.get(name)]
            if differing:
                self.calls.lose("ranks export different weights")
                names = ", ".join(sorted(differing)[:3])
                worker = self.calls.workers[rank]
                raise spi.ContractError(
                    f"export_weights: {worker} exports other values than rank {min(digests)}, in "
                    f"{len(differing)} tensors: {names}"
                )
        if order.export.sharded:
            self._compare_shards(refitted)
        # One that has failed since it was refitted, beside the others' refits, holds no weights any more.
        back = [rank for rank, one in zip(outcomes, refitted, strict=True) if rank in were_out and not one.is_starting]
        self.engines.refitted(back, order.export.weight_version)
        drafts = [rank.drafts for rank in refitted if rank.drafts is not None]
        if self.elastic is not None:
            drafts += self.elastic.refit(order, self.calls.apart("published_weights", {0: ()})[0])
        sent = [rank.sent_bytes for rank in refitted if rank.sent_bytes is not None]
        guessed = sum(drafts, spi.DraftCounts()) if drafts else None
        return Refitted(drafts=guessed, sent_bytes=sum(sent) if sent else None, digests=first)

    def _compare_shards(self, refitted: Sequence[RefittedRank]) -> None:
        sent = sum(rank.shards_sent or 0 for rank in refitted) % 2**64
        taken = sum(rank.shards_taken for rank in refitted) % 2**64
        if sent != taken:
            raise spi.RefitError(f"refit: what ranks took has the digest {taken}; expected {sent}, of what ranks sent")


def _same_figures(one: object, other: object) -> bool:
    """Return whether two results of the same class have the same numbers, those of metrics and norms included."""
    found, expected = _figures(one), _figures(other)
    return found.keys() == expected.keys() and all(
        math.isclose(value, expected[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE) for name, value in found.items()
    )


def _figures(result: Any) -> dict[str, float]:
    numbers = {name: value for name, value in asdict(result).items() if isinstance(value, int | float)}
    norms = getattr(result, "gradient_norms", None) or {}
    numbers |= {f"gradient_norms/{name}": value for name, value in norms.items()}
    return numbers | {f"metrics/{name}": value for name, value in result.metrics.items()}


def _seen(directory: Path, calls: Calls, ranks: Sequence[int], written: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the files of all ranks; CheckpointError where the driver does not see one."""
    for rank, files in zip(ranks, written, strict=True):
        missing = [name for name in files if not (directory / name).exists()]
        if missing:
            raise spi.CheckpointError(
                f"{calls.workers[rank]} wrote {missing[0]}, which is not in {directory} on the driver's machine. "
                "run.directory has to be on a file system that all nodes share."
            )
    return tuple(sorted({name for files in written for name in files}))
