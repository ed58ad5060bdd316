"""The slowest calls of the environment in a step, which `rlcore top` shows."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from attrs import define, field

from rlcore.files import write_atomically
from rlcore.secrets import masked

FILE = "slowest_calls.json"
MAX_CALLS = 5
LEAST_S = 0.1
"""Seconds of the shortest call that is worth a line: most calls pay for one comparison alone."""


@define(eq=False)
class SlowestCalls:
    """Keeps the slowest calls since the last step. The event loop adds, the thread of the training loop takes."""

    least_s: float = field(default=LEAST_S, init=False)
    """Seconds above which a call is kept."""
    _calls: list[Mapping[str, Any]] = field(factory=list, init=False)
    _changing: threading.Lock = field(factory=threading.Lock, init=False)

    def add(self, seconds: float, function: str, describe: Callable[[], str]) -> None:
        """Keep a call of the environment's function, if it is one of the slowest. `describe` names its episode."""
        self.merge([{"seconds": round(seconds, 3), "function": function, "episode": masked(describe())}])

    def merge(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Keep the slowest of these calls, too."""
        with self._changing:
            self._calls = sorted([*self._calls, *calls], key=itemgetter("seconds"), reverse=True)[:MAX_CALLS]
            if len(self._calls) == MAX_CALLS:
                self.least_s = self._calls[-1]["seconds"]

    def take(self) -> Sequence[Mapping[str, Any]]:
        """Return the calls since the last time."""
        with self._changing:
            found, self._calls, self.least_s = self._calls, [], LEAST_S
        return found

    def write(self, directory: Path, step: int) -> None:
        """Write those since the last call to a run directory. Raises StorageError where they cannot be written."""
        if found := self.take():
            write_atomically(directory / FILE, json.dumps({"step": step, "calls": found}))
