"""Every rank of every replica, as the sending side of a refit sees them."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from rlcore.spi import RefitError, WorkerError
from rlcore_vllm.channels.channel import Place

_POLL_S = 0.05
_GRACE_S = 2.0
"""How much later than a replica that watches itself: its own error holds its last lines."""


class Workers(Protocol):
    """What a refit needs of a replica."""

    name: str
    num_ranks: int

    def call_workers(self, method: str, kwargs: Mapping[str, Any]) -> Future[list[Any]]:
        """Call a method of the worker in every rank; one result a rank."""


class Receivers:
    """Makes each step of a refit on all of them at once."""

    def __init__(self, replicas: Sequence[Workers], timeout_s: float) -> None:
        self._replicas = replicas
        self._timeout_s = timeout_s

    def start(self, step: str, contents: Sequence[Mapping[str, Any]]) -> "Pending":
        """A step with one content a replica, without waiting for it."""
        pairs = zip(self._replicas, contents, strict=True)
        calls = [replica.call_workers("rlcore_refit", {"step": step, "content": content}) for replica, content in pairs]
        return Pending(step, list(self._replicas), calls, self._timeout_s)

    def start_all(self, step: str, content: Mapping[str, Any]) -> "Pending":
        """A step with the same content for all."""
        return self.start(step, [content] * len(self._replicas))

    def places(self) -> list[Place]:
        """Where every rank is."""
        answers = self.start_all("describe", {}).wait()
        return [Place(replica=number, **answer) for number, ranks in enumerate(answers) for answer in ranks]


class Pending:
    """A step that is under way."""

    def __init__(self, step: str, replicas: list[Workers], calls: list[Future[list[Any]]], timeout_s: float) -> None:
        self._step = step
        self._replicas = replicas
        self._calls = calls
        self._timeout_s = timeout_s

    def wait(self, check: Callable[[], None] = lambda: None) -> list[list[dict[str, Any]]]:
        """What every rank of every replica answers; `check` is called now and then and may raise.

        RefitError where a rank refused, WorkerError where a replica died or does not answer in time; of several, the first.
        """
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        waiting = dict(zip(self._calls, self._replicas, strict=True))
        while waiting:
            done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for call in done:
                self._examine(waiting.pop(call), call)
            if waiting:
                check()
                self._check_deadline(deadline, waiting.values())
        return [call.result() for call in self._calls]

    def _examine(self, replica: Workers, call: Future[list[Any]]) -> None:
        try:
            answers = call.result()
        except Exception as error:
            raise WorkerError(f"replica {replica.name} failed in a refit ({self._step}): {error}") from error
        for rank, answer in enumerate(answers):
            if "refused" in answer:
                raise RefitError(f"{answer['refused']} (replica {replica.name}, rank {rank})")
            if "failed" in answer:
                raise RefitError(f"refit: {self._step} failed on replica {replica.name}, rank {rank}:\n{answer['failed']}")

    def _check_deadline(self, deadline: float, replicas: Any) -> None:
        if time.monotonic() > deadline:
            names = ", ".join(replica.name for replica in replicas)
            raise WorkerError(
                f"replica {names} did not answer in a refit ({self._step}) within {self._timeout_s:g} s "
                "(generator.vllm.refit_timeout_s)"
            )
