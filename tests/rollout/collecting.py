"""Collectors in threads of this process, whose messages are pickled all the same."""

import pickle
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.execution.groups import InProcessGenerator
from rlcore.spi import WorkerError
from rlcore_rollout import collector_process
from rlcore_rollout.collector_messages import Command, Endpoint, MakeEndpoint, Message


class ThreadHost:
    """See CollectorHost. `kill` ends it as a process that dies."""

    def __init__(self, make: MakeEndpoint, generator: Any, number: int, num_collectors: int) -> None:
        restored: MakeEndpoint = pickle.loads(pickle.dumps(make))
        self.endpoint: Endpoint = restored(generator, number, num_collectors)
        self.num_bytes = 0
        self._commands: SimpleQueue[bytes | None] = SimpleQueue()
        self._is_dead = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, commands: Sequence[Command]) -> None:
        if self._is_dead:
            raise WorkerError("a collector was killed")
        self._commands.put(pickle.dumps(commands))

    def receive(self) -> Sequence[Message]:
        sent = pickle.dumps(self.endpoint.collect())
        if self._is_dead:
            raise WorkerError("a collector was killed")
        self.num_bytes += len(sent)
        messages: Sequence[Message] = pickle.loads(sent)
        return messages

    def kill(self) -> None:
        self._is_dead = True

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()
        self.endpoint.close()

    def _work(self) -> None:
        while (commands := self._commands.get()) is not None:
            self.endpoint.take(pickle.loads(commands))


@pytest.fixture
def collect_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ThreadHost]]:
    """Have the runs of a test collect in so many threads, by a registry's environment; the list of these, as they start."""

    def collect(num_collectors: int, registry: Registry) -> list[ThreadHost]:
        hosts: list[ThreadHost] = []

        def start(generator: InProcessGenerator, make: MakeEndpoint) -> Sequence[ThreadHost]:
            hosts[:] = [ThreadHost(make, generator, number, num_collectors) for number in range(num_collectors)]
            return hosts

        def load(plugin: Any) -> Any:
            return next(entry for entry in registry.of(plugin.role) if entry.name == plugin.name)

        monkeypatch.setattr(InProcessGenerator, "num_collectors", num_collectors, raising=False)
        monkeypatch.setattr(InProcessGenerator, "start_collectors", start, raising=False)
        monkeypatch.setattr(collector_process, "load_chosen", load)
        return hosts

    return collect
