"""Where metrics go: metrics.jsonl always, TensorBoard where the recipe says so, observers that want them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen

from rlcore.files import storage_errors
from rlcore.registry.discovery import ObserverEntry
from rlcore.registry.plugin_errors import attributed
from rlcore.spi import ConfigError, Problem, StepObserver


class MetricLogger(Protocol):
    """Receives each step's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics; they are safe once this returns."""

    def close(self) -> None:
        """Flush and free."""


@frozen
class JsonlLogger:
    """One JSON object a line, on disk when `log` returns."""

    path: Path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with storage_errors(self.path.name, self.path.parent), self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        """Every line is written already."""


class TensorBoardLogger:
    """TensorBoard event files under `directory`."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@frozen
class ObserverLogger:
    """The observers that receive the figures of steps."""

    observers: Sequence[ObserverEntry]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for entry in self.observers:
            if isinstance(entry.observer, StepObserver):
                with attributed("raised in after_step of", entry.label):
                    entry.observer.after_step(step, dict(metrics))

    def close(self) -> None:
        """Observers end with the process."""


def check_tensorboard() -> None:
    """Raise ConfigError where logging.tensorboard asks for a package that is not installed."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        problem = Problem(
            path="logging.tensorboard",
            found="true, without the package tensorboard",
            expected="the package installed",
            remedy="Run: pip install 'rlcore[tensorboard]'",
        )
        raise ConfigError([problem])
