"""An engine in a process of its own, as a replica."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import field, frozen

from rlcore.spi import RlcoreError, WorkerError
from rlcore_vllm.engines.environment import child_environment
from rlcore_vllm.engines.explain import explain, is_passing
from rlcore_vllm.engines.sampling import OnTokens, Samples
from rlcore_vllm.engines.unfinished import Deliver, settle
from rlcore_vllm.replicas.replica import Replica
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import EngineSettings
from rlcore_workers.hosted import HostedProcess
from rlcore_workers.logged_process import new_log_file

logger = logging.getLogger(__name__)
COLLECT_S = 1.0
"""Most seconds that one call waits for samples to end."""
CLOSE_TIMEOUT_S = 30.0
NUM_STARTS = 3
"""Most starts of an engine whose start another process disturbs."""


@frozen(kw_only=True, eq=False)
class _Call:
    """A call of `generate` under way."""

    deliver: Deliver
    on_tokens: OnTokens | None
    done: Future[None] = field(factory=Future)
    began: float = field(factory=time.monotonic)


def hosting(name: str, settings: EngineSettings, devices: tuple[int, ...], log_file: Path) -> HostedProcess:
    """Begin to start the process of an engine on these devices."""
    environment, module = child_environment(settings, devices), "rlcore_vllm.replicas.host"
    return HostedProcess(name, module, settings, log_file, section="generator.vllm", environment=environment, explain=explain)


class ProcessReplica(Replica):
    """An engine in a child process, whose output goes to a log file. Its calls but generate are made one after another."""

    is_local = False

    def __init__(
        self, name: str, settings: EngineSettings, devices: tuple[int, ...], config: VllmConfig, log_directory: Path | None
    ) -> None:
        self.name = name
        self.devices = devices
        self._settings = settings
        self._config = config
        self.log_file = new_log_file(log_directory, name)
        self._numbers = itertools.count()
        self._child: HostedProcess | None = None
        self._starting: HostedProcess | None = None
        """The process whose engine is being started."""
        self._is_given_up = False
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        """Calls of `generate` under way."""
        self._receiver: threading.Thread | None = None
        """Delivers their samples; None where there are none."""
        self._in_order = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def start(self) -> None:
        for _ in range(NUM_STARTS - 1):
            try:
                self._child = self._started()
                return
            except WorkerError as error:
                if not is_passing(str(error)):
                    raise
                logger.warning("%s is started again: %s", self.name, error)
        self._child = self._started()

    def _started(self) -> HostedProcess:
        child = self._starting = hosting(self.name, self._settings, self.devices, self.log_file)
        if self._is_given_up:
            child.give_up()
        try:
            child.await_engine(self._config.start_timeout_s)
        except BaseException:
            child.end()
            raise
        finally:
            self._starting = None
        return child

    def give_up(self) -> None:
        self._is_given_up = True
        if (child := self._starting) is not None:
            child.give_up()

    def generate(self, samples: Samples, deliver: Deliver, on_tokens: OnTokens | None = None) -> Future[None]:
        call = _Call(deliver=deliver, on_tokens=on_tokens)
        number, child = next(self._numbers), self._child
        with self._lock:
            self._calls[number] = call
            if self._receiver is None:
                self._receiver = threading.Thread(
                    target=self._collect, args=(child,), name=f"{self.name}-generate", daemon=True
                )
                self._receiver.start()
        # In order, so that a refit that begins after this call does not overtake it.
        submitted = self._submit("submit", number, samples)
        submitted.add_done_callback(lambda done: self._end_call(number, done.exception()) if done.exception() else None)
        call.done.add_done_callback(lambda done: self._drop(number) if done.cancelled() else None)
        return call.done

    def cut(self, calls: Sequence[Future[None]], number: int | None = None) -> None:
        ends = {id(call) for call in calls}
        with self._lock:
            numbers = [number for number, known in self._calls.items() if id(known.done) in ends]

        def end(done: Future[Any]) -> None:  # nobody waits for the cut itself
            for number in numbers if done.exception() else ():
                self._end_call(number, done.exception())

        self._submit("cut", numbers, number).add_done_callback(end)

    def _collect(self, child: HostedProcess | None) -> None:
        """Deliver what ends until nothing is under way; a process that dies ends all calls, as any other error does."""
        try:
            self._deliver_all(child)
        except BaseException as error:  # which would be lost in this thread
            with self._lock:
                self._receiver = None
                numbers = list(self._calls)
            for number in numbers:
                self._end_call(number, error)

    def _deliver_all(self, child: HostedProcess | None) -> None:
        limit_s = self._config.generate_timeout_s
        while True:
            with self._lock:
                calls = dict(self._calls)
                if not calls:
                    self._receiver = None
                    return
            if child is not None and time.monotonic() - min(call.began for call in calls.values()) > limit_s:
                child.expire("generate", limit_s, "generate_timeout_s")
            # It is answered within COLLECT_S, whether samples have ended or not, unless the process stands still.
            events = self._call(child, lambda host: host.collect(COLLECT_S), "generate", "refit_timeout_s")
            for event in events:
                call = self._calls.get(event.number)
                if call is not None and event.sampled is not None and call.on_tokens is not None:
                    call.on_tokens(event.sampled)
                if call is not None and event.finished:
                    call.deliver(event.finished)
                if event.is_last:
                    error = event.error
                    own = isinstance(error, WorkerError) and child is not None
                    self._end_call(event.number, child.with_output(error) if own else error)

    def _end_call(self, number: int, error: BaseException | None) -> None:
        with self._lock:
            call = self._calls.pop(number, None)
        if call is not None:
            settle(call.done, error)

    def _drop(self, number: int) -> None:
        """Forget a call that was cancelled."""
        with self._lock:
            known = self._calls.pop(number, None)
        if known is not None:
            self._submit("cancel", number)

    def restart(self) -> None:
        """Start the engine anew, in the same process if that still answers, which spares the imports."""
        if self._child is not None and self._child.is_usable:
            self._starting = self._child
            if self._is_given_up:
                self._child.give_up()
            try:
                self._call(self._child, lambda host: host.restart(), "restart", "start_timeout_s")
                return
            except RlcoreError as error:
                logger.warning("%s gets a new process: %s", self.name, error)
            finally:
                self._starting = None
        self._end()
        self.start()

    def close(self) -> None:
        if self._child is not None and self._child.is_usable:
            with contextlib.suppress(RlcoreError):
                self._child.call(lambda host: host.close(), "close", CLOSE_TIMEOUT_S)
        self._end()
        self._in_order.shutdown(wait=False)

    def _submit(self, method: str, *arguments: Any, **options: Any) -> Future[Any]:
        """A call that the host carries out after those before it: buckets of a refit must not overtake each other."""
        child = self._child
        return self._in_order.submit(
            self._call, child, lambda host: getattr(host, method)(*arguments, **options), method, "refit_timeout_s"
        )

    def _call(self, child: HostedProcess | None, function: Callable[[Any], Any], what: str, key: str) -> Any:
        if child is None:
            raise WorkerError(f"{self.name}: there is no engine: it could not be started")
        return child.call(function, what, getattr(self._config, key), key)

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()
        collector = self._receiver
        if collector is not None:
            # Else it might take calls of the next process for those of this one, and end them.
            collector.join()
