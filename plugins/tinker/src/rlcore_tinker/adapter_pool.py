"""The adapters of several models under training, which one trainer has by turns.

A model's adapter has the model's id as its name in the trainer. The one named "" is never trained: it is the base model. One
more holds the checkpoint that a sampler asked for last.

A generator that holds several adapters has them by the names of their weights, so that samplers of several weights go on beside
each other. What it had to give up comes again from the trainer or from files when a sampler asks for it.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from attrs import field, frozen

from rlcore.spi import LossSpec, TokenBatch
from rlcore.spi.arrays import Float32Array
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_tinker.backend import PieceGradients, TrainingSession
from rlcore_tinker.errors import RequestError
from rlcore_tinker.tasks import Tasks
from rlcore_tinker.weights import BASE, NamedWeights, SampledWeights

UNTRAINED, LOADED = "", "checkpoint of a sampler"
"""Names of adapters that are no model's."""
NUM_KEPT = 2


class AdapterPool(SampledWeights):
    """The trainer and the generator of a session with several adapters."""

    def __init__(self, session: TrainingSession, scratch: Path) -> None:
        """`scratch` is a folder for weights that samplers read and no checkpoint has."""
        super().__init__(session)
        self._scratch, self._in_use, self._loaded = scratch, UNTRAINED, ""
        self._models: dict[str, AdapterWeights] = {}
        self._begun: set[str] = {UNTRAINED}
        """Adapters that the trainer has."""
        self._waiting: dict[str, WaitingPiece] = {}
        """Pieces that wait for the trainer, by their adapters in the order in which they came."""
        self._tasks = Tasks()

    def open(self, adapter: str, seed: int, rank: int | None) -> "AdapterWeights":
        """Return the weights of a new model; its adapter begins with `AdapterWeights.begin`."""
        self._models[adapter] = AdapterWeights(self, adapter, seed, rank)
        return self._models[adapter]

    async def forget(self, adapter: str) -> None:
        """Drop the adapter of a model that nobody trains any more."""
        async with self._generator.alone(), self._trainer:
            del self._models[adapter]
            shutil.rmtree(self._folder(adapter), ignore_errors=True)
            await self._use(UNTRAINED)

            def drop() -> None:
                self._session.use_adapter(UNTRAINED, drops=[adapter])
                self._begun.remove(adapter)

            if adapter in self._begun:
                await off_loop(drop)

    def generates(self, wanted: NamedWeights) -> bool:
        """See SampledWeights."""
        session = self._session
        return wanted.name in session.sampler_adapters if session.holds_adapters else super().generates(wanted)

    def adapter_of(self, wanted: NamedWeights | None) -> str | None:
        """See SampledWeights."""
        return None if wanted is None or not self._session.holds_adapters else wanted.name

    async def _bring(self, wanted: NamedWeights) -> None:
        await self._use_weights(wanted)
        await self._sync(wanted.name)

    async def logprobs(self, wanted: NamedWeights, sequences: Sequence[Sequence[int]]) -> Sequence[Float32Array]:
        """Return the log-probabilities of the sequences' tokens by these weights. RequestError where they are gone."""
        async with self._generator.alone(), self._trainer:
            await self._use_weights(wanted)
            return await off_loop(self._session.logprobs, sequences, model="policy")

    @asynccontextmanager
    async def in_use(self, adapter: str) -> AsyncIterator[TrainingSession]:
        """Hold the trainer, with this adapter in use."""
        async with self._trainer:
            await self._use(adapter)
            yield self._session

    async def forward_backward(self, adapter: str, data: TokenBatch, loss: LossSpec) -> PieceGradients:
        """Add the gradients of a piece of an adapter. Those that wait when the trainer is free share its passes."""
        piece = WaitingPiece(data, loss)
        self._waiting[adapter] = piece
        self._tasks.start(self._answer_waiting())
        try:
            return await piece.gradients
        finally:
            if self._waiting.get(adapter) is piece:  # it is cancelled before its turn
                del self._waiting[adapter]

    async def _answer_waiting(self) -> None:
        async with self._trainer:
            pieces, self._waiting = self._waiting, {}
            if len(pieces) > 1 and self._session.computes_together:
                given = {adapter: {"data": piece.data, "loss": piece.loss} for adapter, piece in pieces.items()}
                with suppress(Exception):  # by turns each gets its own error, or none
                    found = await off_loop(self._session.forward_backward_together, given)
                    for adapter, piece in pieces.items():
                        piece.answer(found[adapter])
                    return
            for adapter, piece in pieces.items():
                try:
                    await self._use(adapter)
                    piece.answer(await off_loop(self._session.forward_backward, piece.data, piece.loss))
                except Exception as error:
                    piece.answer(error)

    async def begin(self, adapter: str, seed: int, rank: int | None, files: Path | None, name: str, *, optimizer: bool) -> None:
        """Begin an adapter anew at a rank, or with the state of these files."""
        async with self._generator.alone(), self._trainer:
            await self._begin(adapter, seed, rank, files, name, optimizer=optimizer)

    async def publish(self, adapter: str, name: str, *, keeps: bool) -> NamedWeights:
        """Bring an adapter, whose weights have this name, to the generator. `keeps` writes them to a file too, since other
        adapters go there; a model's newest two stay."""
        async with self._generator.alone(), self._trainer:
            await self._use(adapter)
            await self._sync(name)
            if not keeps:
                return NamedWeights(name=name)
            folder = self._folder(adapter)
            files = folder / name.rpartition("@")[2]
            if not files.is_dir():
                await off_loop(self._session.save, files)
            for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-NUM_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
            return NamedWeights(name=name, files=files)

    def _folder(self, adapter: str) -> Path:
        return self._scratch / adapter.replace(":", "-")

    async def _use_weights(self, wanted: NamedWeights) -> None:
        """Use the adapter that has these weights. Both locks are held."""
        for adapter, model in self._models.items():
            if model.training_name == wanted.name and adapter in self._begun:
                return await self._use(adapter)
        if wanted.name == BASE:
            return await self._use(UNTRAINED)
        if wanted.name != self._loaded:
            if not wanted.are_saved:
                raise RequestError(
                    f"found a sampler whose weights are gone: the server keeps a model's newest {NUM_KEPT} unsaved ones. "
                    "Expected a newer sampler of its model, or one of save_weights_for_sampler(name)",
                    status=410,
                )
            self._loaded = ""
            await self._begin(LOADED, 0, None, wanted.files, wanted.name, optimizer=False)
            self._loaded = wanted.name
        return await self._use(LOADED)

    async def _begin(
        self, adapter: str, seed: int, rank: int | None, files: Path | None, name: str, *, optimizer: bool
    ) -> None:
        # An adapter that the trainer has is not begun anew: a load that fails leaves its weights.
        is_begun = files is not None and adapter in self._begun

        def begin() -> None:
            self._session.use_adapter(adapter, seed=None if is_begun else seed, rank=None if is_begun else rank)
            self._begun.add(adapter)
            self._in_use = adapter
            if files is not None:
                self._session.load(files, optimizer=optimizer, name=name)  # which brings them to the generator, too
                self._in_generator = name

        await off_loop(begin)

    async def _use(self, adapter: str) -> None:
        def use() -> None:
            self._session.use_adapter(adapter)
            self._in_use = adapter

        if self._in_use != adapter:
            await off_loop(use)


@frozen(eq=False)
class WaitingPiece:
    """A piece that waits for the trainer."""

    data: TokenBatch
    loss: LossSpec
    gradients: "asyncio.Future[PieceGradients]" = field(init=False)

    @gradients.default
    def _future(self) -> "asyncio.Future[PieceGradients]":
        return asyncio.get_running_loop().create_future()

    def answer(self, found: PieceGradients | Exception) -> None:
        """End the wait, unless it was cancelled."""
        if self.gradients.done():
            return
        if isinstance(found, Exception):
            self.gradients.set_exception(found)
        else:
            self.gradients.set_result(found)


class AdapterWeights:
    """The weights of one model under training: an adapter of the pool."""

    def __init__(self, pool: AdapterPool, adapter: str, seed: int, rank: int | None) -> None:
        self._pool, self._adapter, self._seed, self._rank = pool, adapter, seed, rank
        self._name = f"{adapter}@0"

    @property
    def training_name(self) -> str:
        """The name of the model's present weights."""
        return self._name

    @asynccontextmanager
    async def training(self) -> AsyncIterator[TrainingSession]:
        """Hold the trainer, with the model's adapter in use."""
        async with self._pool.in_use(self._adapter) as session:
            yield session

    def has_changed(self, name: str) -> None:
        """Note the new name of the model's weights."""
        self._name = name

    async def forward_backward(self, data: TokenBatch, loss: LossSpec) -> PieceGradients:
        """Add the gradients of a piece to those of the step; see AdapterPool."""
        return await self._pool.forward_backward(self._adapter, data, loss)

    def has_gradients(self, *, found: bool) -> None:
        """Do nothing: an adapter keeps its gradients while others are in use."""

    async def begin(self, files: Path | None, name: str, *, optimizer: bool) -> None:
        """Begin with the state of these files, or anew where there are none; gradients are dropped."""
        name = self._name if name == BASE else name
        await self._pool.begin(self._adapter, self._seed, self._rank, files, name, optimizer=optimizer)
        self._name = name

    async def publish(self, *, keeps: bool = False) -> NamedWeights:
        """Bring the model's weights to the generator, and return them; see AdapterPool."""
        return await self._pool.publish(self._adapter, self._name, keeps=keeps)
