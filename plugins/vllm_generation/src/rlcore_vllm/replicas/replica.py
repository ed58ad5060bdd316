"""One engine, in this process or in another, as transfer and backend use it."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from rlcore.spi import DraftCounts, RlcoreError, WorkerError
from rlcore_vllm.engines.engine import Engine
from rlcore_vllm.engines.explain import explain
from rlcore_vllm.engines.sampling import OnTokens, Samples
from rlcore_vllm.engines.unfinished import Deliver
from rlcore_vllm.setup.settings import EngineSettings


class Replica(ABC):
    """An engine. Futures end in WorkerError where it died or took too long; all is as after a start once `restart` returns."""

    name: str
    devices: tuple[int, ...]
    """CUDA devices of its ranks, counted among those that the driver sees; on CPU, empty."""
    is_local: ClassVar[bool]
    """True where it lives in this process."""

    @abstractmethod
    def start(self) -> None:
        """Start the engine; WorkerError where that fails or takes too long."""

    @abstractmethod
    def generate(self, samples: Samples, deliver: Deliver, on_tokens: OnTokens | None = None) -> Future[None]:
        """Sample; `deliver` gets the samples that ended, and `on_tokens` new tokens of those that are read, from any thread.
        Both must be quick. Cancelling drops the rest."""

    @abstractmethod
    def cut(self, calls: Sequence[Future[None]], number: int | None = None) -> None:
        """End calls of `generate`: their samples, or the one of this number, are delivered as ABORTED with the tokens that they
        have."""

    def begin_update(self) -> Future[None]:
        """Pause: no token is sampled until end_update."""
        return self._submit("begin_update")

    def call_workers(self, method: str, kwargs: Mapping[str, Any]) -> Future[list[Any]]:
        """Call a method of vLLM's worker (or of its extension class) on every rank: one result each."""
        return self._submit("call_workers", method, dict(kwargs))

    def end_update(self, versions: Mapping[int, int]) -> Future[DraftCounts | None]:
        """Drop what was computed under the old weights and go on; later tokens carry the version of their adapter, by its
        number. What was guessed since the update before, None where no tokens are guessed."""
        return self._submit("end_update", dict(versions))

    def set_residency(self, *, weights: bool, cache: bool, discard_weights: bool) -> Future[int]:
        """Put weights and KV cache on the device or take them off it; returns the bytes that are there then."""
        return self._submit("set_residency", weights=weights, cache=cache, discard_weights=discard_weights)

    @abstractmethod
    def restart(self) -> None:
        """End the engine, whatever state it is in, and start another, which holds no weights that count."""

    @abstractmethod
    def give_up(self) -> None:
        """End a start that is under way in another thread: only `close` comes after it."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. May be called again."""

    @abstractmethod
    def _submit(self, method: str, *arguments: Any, **options: Any) -> Future[Any]:
        """Call a method of the engine, behind the calls before it."""


class LocalReplica(Replica):
    """An engine in this process."""

    is_local = True

    def __init__(self, name: str, settings: EngineSettings, devices: tuple[int, ...]) -> None:
        self.name = name
        self.devices = devices
        self._settings = settings
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise WorkerError(f"{self.name}: there is no engine: it could not be started")
        return self._engine

    def start(self) -> None:
        try:
            self._engine = Engine(self._settings)
        except RlcoreError:
            raise
        except Exception as error:
            explanation = explain("".join(traceback.format_exception(error))) or f"{type(error).__name__}: {error}"
            raise WorkerError(f"{self.name} did not start: {explanation}") from error

    def generate(self, samples: Samples, deliver: Deliver, on_tokens: OnTokens | None = None) -> Future[None]:
        return self.engine.generate(samples, deliver, on_tokens)

    def cut(self, calls: Sequence[Future[None]], number: int | None = None) -> None:
        self.engine.cut(calls, number)

    def restart(self) -> None:
        self.close()
        self.start()

    def give_up(self) -> None:
        """None is under way in another thread than that of the calls."""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _submit(self, method: str, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = getattr(self.engine, method)(*arguments, **options)
        return done
