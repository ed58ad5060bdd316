"""A sink that writes to an experiment tracker in a thread, so that no step waits. A resumed run writes no step twice."""

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlcore.files import write_atomically
from rlcore.reading import read_json
from rlcore.spi import LoggedSample, StorageError
from rlcore_workers.metric_names import NamesAs, renamed

MAX_WAITING = 1000
"""Calls that may wait for the tracker."""
CLOSE_TIMEOUT_S = 60.0
"""Most seconds that the end of a run waits for its tracker."""


class Tracker(Protocol):
    """One run of a tracker, open. All is called in one thread."""

    id: str
    """The key by which the tracker finds this run when it is resumed."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the figures of a step."""

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write figures of a step after those of later ones; a tracker without this method gets them by `log`."""

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Write a table of samples."""

    def end(self, summary: Mapping[str, object] | None) -> None:
        """End the run as finished, or as failed where there is no summary."""


class BackgroundSink:
    """A SampleSink that hands everything to a tracker, which is opened in the thread too.

    Which run of the tracker it is, and the last step that it has, are in `file`: a resumed run goes on with that, and steps
    that the tracker has are not written again. What the tracker raises is raised by the next call, or by `close`.
    """

    def __init__(self, file: Path, open_tracker: Callable[[str | None], Tracker], names_as: NamesAs | None = None) -> None:
        """`open_tracker` gets the id of the tracker's run that is to go on, or None. `names_as` names the figures of steps."""
        self._file, self._open, self._names_as = file, open_tracker, names_as
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._tracker: Tracker | None = None
        self._state: dict[str, Any] = {"id": None, "log": -1, "log_evaluation": -1, "log_samples": -1}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {file.stem}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the figures of a step."""
        self._put(partial(self._write, "log", step, renamed(metrics, self._names_as)))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the figures of a checkpoint's evaluation."""
        self._put(partial(self._write, "log_evaluation", step, dict(metrics)))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Hand on samples of a step."""
        self._put(partial(self._write, "log_samples", step, tuple(samples)))

    def close(self, summary: Mapping[str, object] | None) -> None:
        """Wait for what is under way, and end the tracker's run."""
        self._put(lambda: self._opened().end(summary))
        self._put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise StorageError(f"the tracker has not taken everything within {CLOSE_TIMEOUT_S:g} s; the rest is lost to it")
        self._raise()

    def _put(self, call: Callable[[], None] | None) -> None:
        self._raise()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise StorageError(f"the tracker is {MAX_WAITING} calls behind the run") from None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:  # of a package of others, which may call sys.exit
            self._error = error

    def _opened(self) -> Tracker:
        if self._tracker is None:
            if self._file.is_file():
                self._state = _read_state(self._file, self._state)
            self._tracker = self._open(self._state["id"])
            self._state["id"] = self._tracker.id
            self._save()
        return self._tracker

    def _write(self, kind: str, step: int, what: Any) -> None:
        tracker = self._opened()
        if step > self._state[kind]:
            write = getattr(tracker, kind, None) or tracker.log  # one that takes any step needs no other method
            write(step, what)
            self._state[kind] = step
            self._save()

    def _save(self) -> None:
        write_atomically(self._file, json.dumps(self._state))


def _read_state(file: Path, initial: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `_save` wrote. StorageError where it is damaged: a new state would write all steps twice."""
    state = {**initial, **read_json(file, StorageError)}
    steps = [value for name, value in state.items() if name != "id"]
    if state.keys() != initial.keys() or not isinstance(state["id"], str | None) or any(type(one) is not int for one in steps):
        raise StorageError(f"{file} is damaged: found {json.dumps(state)}; expected an id, and the last step of each kind")
    return state
