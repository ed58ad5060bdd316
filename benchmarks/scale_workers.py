"""Workers of a pool that answer at once, in the driver's process, and the time that passes in them; for scale_sim.py."""

import pickle
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from response_lengths import lengths_of

from rlcore.spi import (
    MISMATCH_METRICS,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LogprobsRequest,
    TrainStepRequest,
    TrainStepResult,
)
from rlcore.spi.arrays import Float32Array
from rlcore.spi.execution import Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore_ray.dispatch import RankPart
from rlcore_ray.worker_stream import Collected

RANKS_PER_NODE = 8
LIMIT = 3946
"""Most tokens of an answer."""


class Workers:
    """Time that passes in workers, which the driver does not spend."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.clocks = np.zeros(3)

    @contextmanager
    def work(self, phase: str) -> Iterator[None]:
        start = clocks(of_thread=True)
        yield
        taken = clocks(of_thread=True) - start
        self.clocks += taken
        self.seconds[phase] = self.seconds.get(phase, 0.0) + taken[0]


class LocalCalls:
    """The calls of a pool, answered at once in this process."""

    is_usable = True

    def __init__(self, workers: Workers, num_ranks: int) -> None:
        self.time = workers
        self.ranks = range(num_ranks)
        self.workers = [SimpleNamespace(node_id=str(rank // RANKS_PER_NODE)) for rank in self.ranks]
        self.tokenizer = FakeTokenizer()

    def together(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One answer a rank."""
        with self.time.work({"train_step": "train", "hold_step": "logprobs", "token_figures": "logprobs"}.get(name, name)):
            replies = [pickled(getattr(self, name)(*given)) for given in arguments]
        return [unpickled(*reply) for reply in replies]

    @contextmanager
    def streaming(self, num_ranks: int) -> Iterator[None]:
        self.answers = {rank: Queue() for rank in range(num_ranks)}
        yield

    def beside(self, name: str, arguments: Mapping[int, tuple[Any, ...]], group: str = "") -> list[Any]:
        """A stream's calls: each request is answered at once, all its samples together."""
        if name == "stream_end":
            for rank in arguments:
                self.answers[rank].put(pickled(Collected(parts=[], has_ended=True)))
        if name == "stream_add":
            for rank, given in arguments.items():
                sent = pickled(given)
                with self.time.work("generation"):
                    (requests,) = unpickled(*sent)
                    parts = [(numbers, self.generate(request)) for numbers, request in requests]
                    self.answers[rank].put(pickled(Collected(parts=parts, has_ended=False)))
        return [None] * len(arguments)

    def outcome_beside(self, name: str, rank: int, group: str) -> Collected:
        """What a stream's call for samples brings."""
        collected: Collected = unpickled(*self.answers[rank].get())
        return collected

    def require_progress(self, name: str, rank: int, since: float) -> None:
        """Workers that answer at once are never late."""

    def train_step(self, model: str, request: TrainStepRequest, parts: Any, number: int, returns: bool) -> TrainStepResult:
        if parts is not None:
            received(parts)[number].microbatches()
        metrics = dict.fromkeys(MISMATCH_METRICS, 1.0) if request.loss.generation_mismatch else {}
        version = request.weight_version + 1
        return TrainStepResult(weight_version=version, loss=0.0, grad_norm=1.0, learning_rate=1e-6, metrics=metrics)

    def hold_step(self, model: str, columns: Any, updates: Any, parts: Any, number: int) -> None:
        received(parts)[number].microbatches()

    def token_figures(self, model: str, request: LogprobsRequest, parts: Any, number: int, leads: bool) -> Float32Array:
        return np.full(len(received(parts)[number].tokens), -1.0, np.float32)

    def generate(self, request: GenerateRequest) -> Responses:
        lengths = lengths_of(request.seeds, mean=795, limit=LIMIT)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        num_tokens = int(offsets[-1])
        result = GenerateResult(
            tokens=(1 + np.arange(num_tokens, dtype=np.int32) % 26),
            offsets=offsets,
            logprobs=np.full(num_tokens, -1.0, np.float32),
            weight_versions=np.full(num_tokens, request.weight_version, np.int32),
            finish_reasons=np.full(len(lengths), FinishReason.LENGTH, np.uint8),
        )
        return Responses.of(result, self.tokenizer)


def pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """As Ray sends it: arrays apart, to be read where they lie."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, 5, buffer_callback=buffers.append), buffers


def unpickled(data: bytes, buffers: list[pickle.PickleBuffer]) -> Any:
    return pickle.loads(data, buffers=buffers)


def received(parts: Any) -> list[RankPart]:
    """What a worker gets: from Ray's object store, or as it is."""
    return ray.get(parts) if isinstance(parts, ray.ObjectRef) else parts


def clocks(*, of_thread: bool = False) -> NDArray[np.float64]:
    """CPU seconds of this process or thread, those of them in the kernel, and the time."""
    usage = resource.getrusage(resource.RUSAGE_THREAD if of_thread else resource.RUSAGE_SELF)
    return np.array([time.thread_time() if of_thread else time.process_time(), usage.ru_stime, time.perf_counter()])
