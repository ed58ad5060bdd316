"""Recorders of an engine of several ranks: they live in the rank whose samples vLLM reads, and the engine calls them there.

vLLM hands calls and batches to the ranks in one order, and the answers come in it too. So what is told before a step holds for
all batches after it, and a fetch sees all that was sampled before it. A slot changes hands in a later batch than the one in
which its sample ended, and by then the rank knows who is expected.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from rlcore.spi import SamplingMask
from rlcore.spi.arrays import Float32Array
from rlcore_vllm.engines.recorder import LogprobRecorder, RecordedRequest, record, split
from rlcore_vllm.engines.sampling_masks import MaskRecorder
from rlcore_vllm.setup.memory import recorder_ended

Order = tuple[str, str, tuple[Any, ...]]
"""An order to a recorder: "logprobs" or "masks", its method, and the arguments."""
METHOD = "rlcore_record"
"""The method of the worker that carries orders out."""


class RankRecorders:
    """The recorders of one rank, in its own process."""

    def __init__(self) -> None:
        self._recorders: dict[str, Any] = {}

    def carry_out(self, orders: Sequence[Order], runner: Any) -> dict[str, Any]:
        """The "answer" to the last order, of recorders beside this model runner.

        What goes wrong is returned, as "failed", and never raised: vLLM would leave the cause in the rank's output.
        """
        try:
            answer = None
            for name, method, arguments in orders:
                answer = self._start(name, runner) if method == "start" else self._do(name, method, arguments)
            return {"answer": answer}
        except Exception:
            return {"failed": traceback.format_exc().strip()}

    def _start(self, name: str, runner: Any) -> bool:
        starts: Mapping[str, Callable[[Any], LogprobRecorder | MaskRecorder | None]] = {
            "logprobs": record,
            "masks": MaskRecorder,
        }
        recorder = starts[name](runner)
        if recorder is not None:
            self._recorders[name] = recorder
        return recorder is not None

    def _do(self, name: str, method: str, arguments: tuple[Any, ...]) -> Any:
        found = getattr(self._recorders[name], method)
        return found(*arguments) if callable(found) else found


class RankCalls:
    """Calls from the engine to the recorders of one rank. Orders without an answer wait for the next step or the next order
    with one."""

    def __init__(self, executor: Any) -> None:
        """`executor` is vLLM's, of several processes."""
        self._executor = executor
        self._rank: int = executor.output_rank
        self._notes: list[Order] = []
        self._told: list[Future[dict[str, Any]]] = []
        """Calls whose answers have not been looked at."""

    def note(self, recorder: str, method: str, *arguments: Any) -> None:
        """An order without an answer."""
        self._notes.append((recorder, method, arguments))

    def tell(self) -> None:
        """Give the rank all notes ahead of the next batch, without a wait; RuntimeError where earlier ones failed."""
        # At most one call a step: vLLM's queues hold few messages, and the answers are read with those to batches.
        if self._notes:
            self._told.append(self._call(wait=False))
        while self._told and self._told[0].done():
            _answer(self._told.pop(0).result())

    def ask(self, recorder: str, method: str, *arguments: Any) -> Any:
        """The answer to an order, once all notes before it and the batches in flight are through."""
        self.note(recorder, method, *arguments)
        answer = self._call(wait=True)
        earlier, self._told = self._told, []
        for told in earlier:  # they were answered before
            _answer(told.result())
        return _answer(answer)

    def _call(self, *, wait: bool) -> Any:
        orders, self._notes = self._notes, []
        return self._executor.collective_rpc(
            METHOD, args=(self._rank, orders), non_block=not wait, unique_reply_rank=self._rank
        )


class _RemoteRecorder:
    """Stands for a recorder in another process."""

    name: ClassVar[str]

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls

    def expect(self, request: str, *arguments: Any) -> None:
        """As the recorder's, from the next `RankCalls.tell` on."""
        self._calls.note(self.name, "expect", request, *arguments)

    def forget(self, requests: Iterable[str]) -> None:
        """As the recorder's, from the next `RankCalls.tell` on."""
        self._calls.note(self.name, "forget", list(requests))


class RemoteLogprobs(_RemoteRecorder):
    """Stands for a LogprobRecorder in another process."""

    name = "logprobs"

    def __init__(self, calls: RankCalls, max_num_seqs: int) -> None:
        super().__init__(calls)
        self._max_num_seqs = max_num_seqs

    @classmethod
    def start(cls, calls: RankCalls, max_num_seqs: int) -> "RemoteLogprobs | None":
        """Start recording in the rank; None where it samples in another way than model runner V2."""
        return cls(calls, max_num_seqs) if calls.ask("logprobs", "start") else None

    @property
    def most_ended(self) -> int:
        """Samples that may have ended before those that have are fetched."""
        return recorder_ended(self._max_num_seqs)

    @property
    def device_bytes(self) -> int:
        """Bytes of the rank's device that the recorder holds now."""
        return int(self._calls.ask("logprobs", "device_bytes"))

    def reserve(self) -> None:
        """Take the table's memory, where it is not taken yet."""
        self._calls.ask("logprobs", "reserve")

    def release(self) -> None:
        """Give all memory back while nothing is in the making; `reserve` takes it again."""
        self._calls.ask("logprobs", "release")

    def fetch(self, requests: Sequence[RecordedRequest]) -> list[Float32Array]:
        """float32 [num_tokens] for each request, which has ended; nothing of it is kept."""
        if not requests:
            return []
        joined: Float32Array = self._calls.ask("logprobs", "fetch_joined", list(requests))
        return split(joined, requests)


class RemoteMasks(_RemoteRecorder):
    """Stands for a MaskRecorder in another process."""

    name = "masks"

    def __init__(self, calls: RankCalls) -> None:
        super().__init__(calls)
        calls.ask("masks", "start")

    def fetch(self, requests: Sequence[RecordedRequest]) -> list[SamplingMask]:
        """Return the notes on each request, which has ended; nothing of it is kept."""
        if not requests:
            return []
        found: list[SamplingMask] = self._calls.ask("masks", "fetch", list(requests))
        return found


Logprobs = LogprobRecorder | RemoteLogprobs
Masks = MaskRecorder | RemoteMasks


def _answer(found: dict[str, Any]) -> Any:
    if "failed" in found:
        raise RuntimeError(f"a rank's recorder failed:\n{found['failed']}")
    return found["answer"]
