"""The run directory: what a run leaves behind, and how a resumed run goes on in it.

recipe.toml        the resolved recipe          metrics.jsonl      one line a step
environment.json   versions of everything       summary.json       the run's final figures
rollouts/          step-000010.parquet,         checkpoints/       step-000010/
                   evaluation-000010.parquet
recipe-001.toml    what it was before a resumption changed it
schedule.jsonl     what a replay has to know of each step, where generation runs ahead of training
reference_logprobs.sqlite  what was computed once for each row of a data set
model/             the Hugging Face export      *.png              what sinks drew
logprob_mismatch/      step-000010.parquet, .txt
bundles/           step-000010/ with all data of a step
receipts/          step-000010.json of what was computed again, steps.jsonl, refits.jsonl
logs/              output of backends' own processes
evaluations/       step-000010/ of a program that measured that checkpoint
timeline.jsonl     what the driver and the workers did when
status.json        what happens now, or how the run ended
.lock              who runs here; free once that process has ended
.last-saved        step of the checkpoint that was saved last
.export-lock       held by the server that exports a checkpoint
"""

import fcntl
import json
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO

from attrs import frozen

from rlcore import __version__
from rlcore.config.recipe import RunConfig
from rlcore.files import storage_errors, write_atomically
from rlcore.reading import read_bytes, read_json
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.metrics_file import read_metrics_file
from rlcore.run.report.timing import rewind_timeline
from rlcore.run.storage.recipe_changes import earlier_recipes, recipe_changes
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckpointError

LAST_SAVED = ".last-saved"
ENVIRONMENT, PYTHON = "environment.json", "Python"
LOOKS_S = 5.0
"""Most seconds for those who look at the lock to give it back."""
LOOK_POLL_S = 0.01
VERSIONS_OF = ("torch", "transformers", "numpy", "pyarrow", "pluggy", "cattrs")


def _differ(before: str, after: str) -> bool:
    try:
        return bool(recipe_changes(before, after))
    except ValueError:  # damaged
        return True


def _lock(file: IO[bytes]) -> None:
    """Take the run's lock. BlockingIOError where a run has it: who looks whether one has takes it too, shared with others who
    look, but for a moment alone, as `rlcore status` does."""
    deadline = time.monotonic() + LOOKS_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # refused where a run has it
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(LOOK_POLL_S)
        else:
            return


def step_of(path: Path, kind: str = "step") -> int | None:
    """N of a checkpoint step-N or of rollouts step-N.parquet; None where the name is another."""
    match = re.fullmatch(rf"{kind}-([0-9]{{1,18}})(\.parquet)?", path.name)
    return None if match is None else int(match[1])


class _Below:
    """The path of a file or folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: "RunDirectory", owner: type) -> Path:
        return directory.path / self._name


@frozen(kw_only=True, eq=False)
class RunDirectory:
    """Paths and files of one run."""

    path: Path
    checkpoints = _Below("checkpoints")
    metrics_file = _Below("metrics.jsonl")
    schedule_file = _Below("schedule.jsonl")
    timeline_file = _Below("timeline.jsonl")
    status_file = _Below("status.json")
    recipe_file = _Below("recipe.toml")
    summary_file = _Below("summary.json")
    rollouts = _Below("rollouts")
    evaluations = _Below("evaluations")
    logs = _Below("logs")

    @classmethod
    def of(cls, run: RunConfig) -> "RunDirectory":
        """The directory of a recipe's `[run]`; a leading ~ is the user's home."""
        return cls(path=expanded(run.directory) / run.name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process from running here; CheckpointError where one does. The system frees the lock of a process
        that ends, however it ends."""
        with storage_errors("the run directory", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+b", buffering=0)
        with file:
            try:
                _lock(file)
            except BlockingIOError as error:
                file.seek(0)
                owner = file.read().decode(errors="replace").strip() or "which does not say more"
                raise CheckpointError(
                    f"{self.path} is in use by a run of another process ({owner}). Wait for it or end it, or choose another "
                    "run.name"
                ) from error
            except OSError:
                pass  # a file system without locks: better a run unguarded than none
            with storage_errors("the run directory", self.path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield

    def begin(self, plan: RunPlan, step: int) -> None:
        """Make the directory and write down what runs in it after `step` steps; a recipe that it ran with before is kept."""
        with storage_errors("the run directory", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        self._write_recipe(plan.resolved, step)
        distributions = [entry.distribution for entry in (*plan.chosen.values(), *plan.sinks)]
        write_atomically(self.path / ENVIRONMENT, json.dumps(describe_environment(distributions), indent=2))

    def _write_recipe(self, recipe_toml: str, step: int) -> None:
        """recipe.toml is the newest; another one that steps were made with becomes recipe-N.toml, and stays."""
        has_run = step > 0 and self.recipe_file.exists()
        before = read_bytes(self.recipe_file).decode(errors="replace") if has_run else None
        if before is None:
            write_atomically(self.recipe_file, recipe_toml)
        elif _differ(before, recipe_toml):
            earlier = earlier_recipes(self.path)
            last = earlier.get(max(earlier, default=0))
            if last is None or last.read_text(encoding="utf-8", errors="replace") != before:  # equal after a crash right here
                write_atomically(self.path / f"recipe-{max(earlier, default=0) + 1:03d}.toml", before)
            write_atomically(self.recipe_file, f"# From step {step + 1} on.\n{recipe_toml}")

    def read_metrics(self) -> list[dict[str, float]]:
        """Return the records of metrics.jsonl, less a last line that a crash cut short. CheckpointError where a line is bad."""
        return read_metrics_file(self.metrics_file)

    def note_saved(self, step: int) -> None:
        """Remember that a checkpoint of `step` was saved: once all are gone, a resumed run must not begin anew."""
        write_atomically(self.path / LAST_SAVED, f"{step}\n")

    @property
    def last_saved(self) -> str | None:
        """The step that was saved last, whether or not its checkpoint is still there; None where none was."""
        file = self.path / LAST_SAVED
        return read_bytes(file).decode(errors="replace").strip() if os.path.lexists(file) else None

    def rewind(self, step: int, *, last_rollouts: int) -> None:
        """Forget what a resumed run will write again: metrics after `step`, rollouts after `last_rollouts`."""
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        write_atomically(self.metrics_file, "".join(json.dumps(record) + "\n" for record in kept))
        rewind_timeline(self.timeline_file, step)
        for file in self.rollouts.glob("step-*.parquet"):
            if (step_of(file) or 0) > last_rollouts:
                file.unlink()
        for file in self.rollouts.glob("evaluation-*.parquet"):
            if (step_of(file, "evaluation") or 0) > step:
                file.unlink()
        for folder in self.evaluations.glob("step-*"):  # of a model that is forgotten, whether this run measures any or not
            if (step_of(folder) or 0) > step:
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Python and packages in environment.json, by name; empty where there is no such file."""
        file = self.path / ENVIRONMENT
        if not os.path.lexists(file):
            return {}
        found = read_json(file)
        packages = found.get("distributions")
        python = {PYTHON: found["python"]} if "python" in found else {}
        versions = {**python, **packages} if isinstance(packages, dict) else {}
        if not versions or not all(isinstance(version, str) for version in versions.values()):
            raise CheckpointError(f"{file} is damaged: found no versions; expected those of `distributions` by name")
        return {str(name): str(version) for name, version in versions.items()}

    def write_summary(self, summary: Mapping[str, object]) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")


def describe_environment(distributions: Sequence[str]) -> dict[str, object]:
    """Versions of Python, rlcore, the plugins in use and the libraries that decide on numerics; the machine's size."""
    versions = {"rlcore": __version__}
    for name in (*distributions, *VERSIONS_OF):
        try:
            versions[name] = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):  # also one whose METADATA cannot be read
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "distributions": versions,
    }
