"""Draws steps of a run that goes on, and has sequences of them computed again in a process beside it."""

import asyncio
import json
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from rlcore.files import write_atomically
from rlcore.registry.plugin_errors import first_line
from rlcore.run.observers import ObservedRun
from rlcore.run.protocols import LoopObserver, TrainedStep
from rlcore.run.report.metrics_file import append_metrics
from rlcore.run.storage.run_directory import step_of
from rlcore.spi import GENERATION_LOGPROBS, WEIGHT_VERSIONS, BoundError, RlcoreError, SaveStateRequest, TokenBatch
from rlcore.spi.arrays import Int64Array
from rlcore.spi.execution import Backends, TrainerGroup
from rlcore_bundles.receipts.compute import prepare, receipt
from rlcore_bundles.receipts.config import ReceiptsConfig
from rlcore_bundles.receipts.job import MODEL, TRAINER_LOGPROBS, Job, folder_of, write_job
from rlcore_bundles.receipts.record import REFITS, STEPS, append, described_refit, described_step, rewind
from rlcore_bundles.receipts.rules import SECTION
from rlcore_bundles.recorded_groups import RecordedRoute
from rlcore_workers.pool import WorkerPool, end_calls
from rlcore_workers.process import Ended, Limits, Task, ending

PURPOSE = 0x7265
"""The second element of the key of random draws, which no purpose of the core has."""
BOUNDS = {"float32": 1e-4}
OTHER_BOUND = 0.05
TASK = Task(
    name="rlcore-receipt",
    handle=f"{receipt.__module__}:{receipt.__name__}",
    prepare=f"{prepare.__module__}:{prepare.__name__}",
    limits=Limits(max_requests=1),  # the memory of the model goes with the child
    leaves_signals=True,
)


def is_drawn(seed: int, step: int, every: int) -> bool:
    """Return whether a step is computed again: with a probability of 1/every, by the run's seed and the step alone."""
    return every > 0 and np.random.default_rng([seed, PURPOSE, step]).random() < 1 / every


def drawn_sequences(seed: int, step: int, batch: TokenBatch, most: int) -> Int64Array:
    """int64 [M], ascending: the sequences of a drawn step, of those that have loss tokens and no images."""
    able = np.flatnonzero(batch.loss_lengths > 0)
    if batch.images is not None:
        able = np.array([one for one in able.tolist() if not batch.images[one]], np.int64)
    random = np.random.default_rng([seed, PURPOSE, step, 1])
    return np.sort(random.choice(able, min(most, len(able)), replace=False)).astype(np.int64)


class Receipts(LoopObserver):
    """The receipts of one run, in its driver. A step's data stay in `receipts/.step-N` until its figures are in metrics.jsonl:
    a resumed run computes what one that was killed had left."""

    def __init__(self, run: ObservedRun) -> None:
        options = run.recipe.tables[SECTION]
        assert isinstance(options, ReceiptsConfig)
        self._run, self._options, self._dtype = run, options, run.plan.model.dtype
        self._folder = run.directory.path / "receipts"
        self._trainer: TrainerGroup | None = None
        self._digests: dict[int, Mapping[str, int]] = {}
        self._pool = WorkerPool(TASK, 1)
        for label in run.sinks.without_evaluations:
            run.progress.note(f"{label} takes no figures of receipts; they are in metrics.jsonl")
        self._open()

    def _open(self) -> None:
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=TASK.name)
        self._under_way: dict[int, Future[dict[str, Any]]] = {}

    def on_backends(self, backends: Backends) -> Backends:
        """See LoopObserver."""
        self._trainer = backends.trainer
        if backends.route is None:
            return backends
        return evolve(backends, route=RecordedRoute(backends.route, self._note_refit))

    def _note_refit(self, version: int, digests: Mapping[str, int]) -> None:
        self._digests = {version: digests}
        append(self._folder / REFITS, described_refit(version, digests))

    def on_start(self, step: int) -> None:
        """The run goes on from `step`: receipts behind it are of a training that is forgotten, others are computed."""
        if any(known > step for known in self._under_way):
            self.on_close()
            self._open()
        rewind(self._folder, step, self._version_of(step))
        for path in [*self._folder.glob(".step-*"), *self._folder.glob("step-*.json")]:
            known = step_of(path.with_name(path.name.removeprefix(".").removesuffix(".json"))) or 0
            if known > step:
                _remove(path)
            elif path.is_dir() and known not in self._under_way:
                self._add(known)

    def on_batch(self, step: TrainedStep) -> None:
        """Write the step down and, where it is drawn, copy its weights and some of its sequences."""
        append(self._folder / STEPS, described_step(step))
        recipe, options = self._run.recipe, self._options
        if not is_drawn(recipe.run.seed, step.step, options.every_n_steps):
            return
        num_waiting = sum(not future.done() for future in self._under_way.values()) - 1
        if num_waiting >= options.max_waiting:
            self._run.progress.note(
                f"step {step.step} has no receipt: {num_waiting} others wait. Raise {SECTION}.max_waiting, every_n_steps or "
                "num_threads"
            )
            return
        chosen = drawn_sequences(recipe.run.seed, step.step, step.sampled.batch, options.num_sequences)
        if not len(chosen):
            self._run.progress.note(f"step {step.step} has no receipt: it has no sequence of text alone with loss tokens")
            return
        try:
            self._begin(step, chosen)
        except RlcoreError as error:
            shutil.rmtree(folder_of(self._folder, step.step), ignore_errors=True)
            self._run.progress.note(f"step {step.step} has no receipt: {first_line(error)}")

    def on_idle(self) -> None:
        """Hand on the figures that are there."""
        self._report(waits=False)

    def on_last_step(self) -> None:
        """Hand on all figures."""
        self._report(waits=True)

    def on_close(self) -> None:
        """Kill what is under way; a resumed run computes it."""
        self._closing.set()
        end_calls(self._pool, self._thread, self._under_way.values())

    def _version_of(self, step: int) -> int:
        """The weights that a step ended with; -1 where none is known."""
        lines = [line for line in self._run.directory.read_metrics() if line["step"] == step]
        return int(lines[0].get("weight_version", -1)) if lines else -1

    def _begin(self, step: TrainedStep, chosen: Int64Array) -> None:
        """Copy the weights, ask the trainer for the log-probabilities of these sequences, and begin to compute them."""
        assert self._trainer is not None
        recipe, options, batch, version = self._run.recipe, self._options, step.sampled.batch, step.sampled.weight_version
        folder = folder_of(self._folder, step.step)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / MODEL).mkdir(parents=True)
        logprobs = self._trainer.logprobs(batch, chosen, "policy", version)
        self._trainer.save_state(SaveStateRequest(directory=folder / MODEL, kind="hf"))
        kept = (GENERATION_LOGPROBS, WEIGHT_VERSIONS)
        columns = {name: batch.token_columns[name] for name in kept if name in batch.token_columns}
        part = evolve(batch, token_columns={**columns, TRAINER_LOGPROBS: logprobs}, sequence_columns={}).select(chosen)
        is_whole = not recipe.rollout.truncates or not recipe.rollout.accept_truncation_bias
        job = Job(
            step=step.step,
            weight_version=version,
            batch=evolve(part, images=None),
            numbers=chosen.tolist(),
            compares_generator=len(columns) == len(kept) and is_whole,
            temperature=recipe.rollout.temperature,
            max_tokens=options.max_tokens,
            bound=options.max_mean_difference or BOUNDS.get(self._dtype, OTHER_BOUND),
            num_threads=options.num_threads,
            trust_remote_code=recipe.model.trust_remote_code,
            dtype=self._dtype,
            digests=self._digests.get(version, {}),
        )
        write_job(job, folder)
        self._add(step.step)

    def _add(self, step: int) -> None:
        self._under_way[step] = self._thread.submit(self._compute, step)

    def _compute(self, step: int) -> dict[str, Any]:
        """The receipt of a step, in the thread."""
        try:
            if self._closing.is_set():
                return {"failure": "the run ended", "stopped": True}
            answer = asyncio.run(self._pool.call(folder_of(self._folder, step)))
        except Exception as error:  # such as a process that does not start
            return {"failure": first_line(error), "stopped": self._closing.is_set()}
        if isinstance(answer, Ended):
            return {"failure": f"its process ended with {ending(answer.exit_code)}", "stopped": self._closing.is_set()}
        found: dict[str, Any] = answer
        return found

    def _report(self, *, waits: bool) -> None:
        """Hand on the figures of receipts that are there, or of all; an interrupt may end the waiting."""
        with self._run.guard.deferred():
            self._report_ended()
        while waits and self._under_way:
            with self._run.clock.phase("evaluation"):
                wait(self._under_way.values(), return_when=FIRST_COMPLETED)
            with self._run.guard.deferred():
                self._report_ended()

    def _report_ended(self) -> None:
        for step in [step for step, future in self._under_way.items() if future.done()]:
            found = self._under_way.pop(step).result()
            if found.get("stopped"):
                continue
            self._write(step, found)

    def _write(self, step: int, found: dict[str, Any]) -> None:
        """Keep a receipt, log its figures, and say what it found. BoundError where the recipe ends the run over that."""
        target = self._folder / f"step-{step:06d}.json"
        failure = found.get("failure")
        if failure is None:
            figures = figures_of(found)
            append_metrics(self._run.directory.metrics_file, step, figures)
            self._run.sinks.log_evaluation(step, figures)
        write_atomically(target, json.dumps({"step": step} | found, indent=1))
        _remove(folder_of(self._folder, step))
        if failure is not None:
            self._run.progress.note(f"the receipt of step {step} failed: {failure}")
        elif found["finding"]:
            text = f"the receipt of step {step} disagrees: {found['finding']} ({target})"
            if self._options.on_excess == "error":
                raise BoundError(f"{text}. {SECTION}.on_excess ends the run", figures)
            self._run.progress.note(f"{text}. The run goes on")


def figures_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a receipt."""
    figures: dict[str, float] = {}
    for part in ("trainer", "generation"):
        if (of := found[part]) is not None:
            figures |= {f"{SECTION}/{part}_mean": of["mean"], f"{SECTION}/{part}_max": of["greatest"]}
            figures |= {f"{SECTION}/{part}_temperature": of["temperature"], f"{SECTION}/{part}_tokens": float(of["num_tokens"])}
    if (tensors := found["tensors"]) is not None:
        figures[f"{SECTION}/tensors_differing"] = float(len(tensors["missing"]) + len(tensors["changed"]))
    return figures | {f"{SECTION}/seconds": found["seconds"]}


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
