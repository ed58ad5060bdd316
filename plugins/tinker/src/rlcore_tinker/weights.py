"""Which weights trainer and generator hold, and the way from one to another.

A name stands for weights that differ from those of every other name: BASE is the recipe's model. Trainer and generator hold
one set of weights each. Where log-probabilities or samples are asked of others, the trainer saves the training state to a
scratch folder and loads the others. Before it trains on, it loads the training state again.

A request can be cancelled at each `await`, while its call of the session runs to the end in its thread. So the thread itself
notes what the call has changed.
"""

import asyncio
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from attrs import frozen

from rlcore.spi import LossSpec, TokenBatch
from rlcore.spi.arrays import Float32Array
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_tinker.backend import PieceGradients, TrainingSession
from rlcore_tinker.checkpoints import holds
from rlcore_tinker.errors import RequestError

BASE = f"base-{uuid.uuid4().hex}"
"""The name of the recipe's own weights: another one in each server, whose recipe may be another."""


@frozen(kw_only=True)
class NamedWeights:
    """Weights that a sampler is of."""

    name: str
    files: Path | None = None
    """The trainer's state that holds them; None where none was saved."""

    @property
    def are_saved(self) -> bool:
        """Return whether the files still hold these weights: a checkpoint may have been deleted or overwritten since."""
        return self.files is not None and holds(self.files, self.name)


class SharedLock:
    """A lock that many hold together, or one alone. Who waits to hold it alone comes before later ones that share it."""

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._num_sharing = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold it together with others."""
        async with self._order:
            self._num_sharing += 1
            self._is_free.clear()
        try:
            yield
        finally:
            self._num_sharing -= 1
            if not self._num_sharing:
                self._is_free.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold it alone."""
        async with self._order:
            await self._is_free.wait()
            yield


class SampledWeights(ABC):
    """The weights that the generator of a session holds, and the locks of generator and trainer."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._generator = SharedLock()
        """Shared while samples are drawn, held alone while the generator's weights change. It is taken before `_trainer`."""
        self._trainer = asyncio.Lock()
        self._in_generator = BASE

    @asynccontextmanager
    async def sampling(self, wanted: NamedWeights | None) -> AsyncIterator[TrainingSession]:
        """Share the generator, with these weights in it; None are those that it holds. RequestError where they are gone."""
        while True:
            async with self._generator.shared():
                if wanted is None or self.generates(wanted):
                    yield self._session
                    return
            async with self._generator.alone(), self._trainer:
                await self._bring(wanted)

    def generates(self, wanted: NamedWeights) -> bool:
        """Return whether the generator holds these weights."""
        return wanted.name == self._in_generator

    async def _sync(self, name: str) -> None:
        """Bring the trainer's weights, which have this name, to the generator. Both locks are held."""

        def sync() -> None:
            self._session.sync(name)
            self._in_generator = name

        if self._session.holds_adapters or self._in_generator != name:
            await off_loop(sync)

    def adapter_of(self, wanted: NamedWeights | None) -> str | None:  # noqa: ARG002 - a pool's has names
        """Return the name of weights among several that the generator holds; None where it holds these alone."""
        return None

    @abstractmethod
    async def _bring(self, wanted: NamedWeights) -> None:
        """Bring weights to the generator. RequestError where they are gone. Both locks are held."""


class Weights(SampledWeights):
    """The weights that trainer and generator of a session hold."""

    def __init__(self, session: TrainingSession, scratch: Path, *, has_reference: bool) -> None:
        """`scratch` is a folder for states that are set aside. `has_reference`: the session holds the base model too."""
        super().__init__(session)
        self._beginning, self._aside = scratch / "beginning", scratch / "training"
        self._has_reference = has_reference
        self._has_beginning = False
        self._in_trainer = self._training = BASE
        self._has_gradients = False

    @property
    def training_name(self) -> str:
        """The name of the training state."""
        return self._training

    @asynccontextmanager
    async def training(self) -> AsyncIterator[TrainingSession]:
        """Hold the trainer, with the training state in it."""
        while True:
            async with self._trainer:
                if self._in_trainer == self._training:
                    yield self._session
                    return
            async with self._generator.alone(), self._trainer:
                await self._fetch_back()

    async def forward_backward(self, data: TokenBatch, loss: LossSpec) -> PieceGradients:
        """Add the gradients of a piece to those of the step."""
        async with self.training() as session:
            gradients = await off_loop(session.forward_backward, data, loss)
            self._has_gradients = True
        return gradients

    def has_changed(self, name: str) -> None:
        """Note the new name of the training state, which the trainer holds. Gradients are gone."""
        self._training = self._in_trainer = name
        self._has_gradients = False

    def has_gradients(self, *, found: bool) -> None:
        """Note whether the trainer holds gradients of a step that is not made."""
        self._has_gradients = found

    async def begin(self, files: Path | None, name: str, *, optimizer: bool) -> None:
        """Make another state the training state: that of these files, or the recipe's where there are none. Gradients are
        dropped, and without `optimizer` the optimizer's moments too."""
        async with self._generator.alone(), self._trainer:
            await self._save_beginning()
            # The recipe's state is not loaded before files: a load of these that fails leaves the weights.
            if files is None:
                await self._load(self._beginning, BASE, optimizer=True)
            else:
                await self._load(files, name, optimizer=optimizer)
            self.has_changed(name)

    async def publish(self, *, keeps: bool = False) -> NamedWeights:  # noqa: ARG002 - they stay in the generator
        """Bring the training state to the generator, and return its weights, which last until it gets others."""
        async with self._generator.alone(), self._trainer:
            await self._fetch_back()
            await self._sync(self._training)
            return NamedWeights(name=self._training)

    async def _bring(self, wanted: NamedWeights) -> None:
        if wanted.name != self._in_generator:
            await self._to_trainer(wanted)
        await self._sync(wanted.name)

    async def logprobs(self, wanted: NamedWeights, sequences: Sequence[Sequence[int]]) -> Sequence[Float32Array]:
        """Return the log-probabilities of the sequences' tokens by these weights. RequestError where they are gone."""
        while True:
            async with self._trainer:
                is_reference = wanted.name == BASE and self._has_reference
                if is_reference or wanted.name == self._in_trainer:
                    is_policy = wanted.name == self._in_trainer
                    return await off_loop(self._session.logprobs, sequences, model="policy" if is_policy else "reference")
            async with self._generator.alone(), self._trainer:
                await self._to_trainer(wanted)

    async def _save_beginning(self) -> None:
        """Save the recipe's own state, before anything changes it."""

        def save() -> None:
            self._session.save(self._beginning)
            self._has_beginning = True

        if not self._has_beginning:
            await off_loop(save)

    async def _load(self, files: Path, name: str, *, optimizer: bool) -> None:
        """Load a state, which also brings it to the generator. Both locks are held."""

        def load() -> None:
            self._session.load(files, optimizer=optimizer)
            self._in_trainer = self._in_generator = name
            self._has_gradients = False

        await off_loop(load)

    async def _fetch_back(self) -> None:
        """Bring the training state back to the trainer. Both locks are held."""
        if self._in_trainer != self._training:
            await self._load(self._aside, self._training, optimizer=True)

    async def _to_trainer(self, wanted: NamedWeights) -> None:
        """Bring weights to the trainer, and set the training state aside. Both locks are held."""
        if wanted.name == self._training:
            await self._fetch_back()
        elif wanted.name != self._in_trainer:
            await self._set_aside_for(wanted)

    async def _set_aside_for(self, wanted: NamedWeights) -> None:
        """Save the training state, and load other weights. Both locks are held."""
        files = self._beginning if wanted.name == BASE else wanted.files
        if files is None or not (wanted.name == BASE or wanted.are_saved):
            raise RequestError(
                "found a sampler whose weights are gone: this server keeps one unsaved set, the newest. Expected the newest "
                "sampler, or one of save_weights_for_sampler(name)",
                status=410,
            )
        if self._has_gradients:
            raise RequestError(
                "found a request to a sampler of other weights while the trainer holds the gradients of a step; expected it "
                "after optim_step: this server holds one set of weights at a time",
                status=409,
            )
        if self._in_trainer == self._training:
            shutil.rmtree(self._aside, ignore_errors=True)
            await off_loop(self._session.save, self._aside)
        await self._load(files, wanted.name, optimizer=False)
