"""Writes steps of a run that goes on to bundles."""

import math
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, TypeAlias

from attrs import define, evolve, field

from rlcore.reading import parse_toml
from rlcore.run.observers import ObservedRun
from rlcore.run.protocols import CollectedRollouts, LoopObserver, TrainedStep
from rlcore.spi import SaveStateRequest, StorageError
from rlcore.spi.execution import Backends, TrainerGroup
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.file_digests import file_digests
from rlcore_bundles.recorded_groups import Notes, RecordedRoute, RecordedTrainer, environment_of, scored_columns
from rlcore_bundles.storage import MODEL, STATE, bytes_without_weights, write_bundle

FALL = 0.25
"""Share of its greatest value below which reward or entropy has collapsed."""
MIB = 2**20


Kind: TypeAlias = Literal["resume", "hf", "peft"]


class StepRecorded(BaseException):
    """The step that a command waits for is in a bundle: the run ends here, and saves nothing."""


STOP_BEHIND: ContextVar[int | None] = ContextVar("STOP_BEHIND", default=None)
"""The step behind which a run ends that a command has begun; None in other runs."""


@define(kw_only=True, eq=False)
class Alarms:
    """Watches the figures of a run."""

    warn_above: float
    """`training.warn_token_mult_prob_error`."""
    greatest: dict[str, float] = field(factory=dict)
    """The greatest value of each figure that may collapse."""

    def cause(self, metrics: Mapping[str, float]) -> str:
        """The cause for which a step with these figures is kept; "" where there is none."""
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            return f"{wrong[0]} is {metrics[wrong[0]]}"
        found = metrics.get("token_mult_prob_error", 0.0)
        if found > self.warn_above:
            return f"token_mult_prob_error is {found:.4g}, above {self.warn_above:g}"
        for name in ("reward_mean", "entropy"):
            if name not in metrics:
                continue
            value, before = metrics[name], self.greatest.get(name, 0.0)
            self.greatest[name] = max(value, before)
            if value < FALL * before:
                self.greatest[name] = value  # the next fall is another one
                return f"{name} is {value:.4g}, and was {before:.4g}"
        return ""


class BundleObserver(LoopObserver):
    """Writes the steps that `[logging]` names, each to `bundles/step-N` of the run directory."""

    def __init__(self, run: ObservedRun) -> None:
        options = run.recipe.logging
        self._run, self._every, self._weights = run, options.bundles_every_n_steps, options.bundle_weights
        self._alarms = Alarms(warn_above=run.recipe.training.warn_token_mult_prob_error) if options.bundles_on_alarm else None
        self._notes, self._stop_behind = Notes(), STOP_BEHIND.get()
        self._trainer: TrainerGroup | None = None
        self._step: TrainedStep | None = None
        self._version = 0

    def on_backends(self, backends: Backends) -> Backends:
        """See LoopObserver."""
        self._trainer = backends.trainer
        route = None if backends.route is None else RecordedRoute(backends.route, self._notes.note_refit)
        return evolve(backends, trainer=RecordedTrainer(backends.trainer, self._notes), route=route)

    def on_batch(self, step: TrainedStep) -> None:
        """See LoopObserver."""
        wanted = self._is_wanted(step.step)
        self._step, self._version = step, step.sampled.weight_version
        self._notes.begin(wanted=wanted)
        if self._weights != "none" and wanted:
            self._save_weights()

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See LoopObserver."""
        if self._step is None or self._step.step != step:
            return
        alarm = "" if self._alarms is None else self._alarms.cause(metrics)
        if self._is_wanted(step) or alarm:
            self._write(self._step, metrics, alarm)
        self._step = None
        if self._stop_behind == step:
            raise StepRecorded

    def _is_wanted(self, step: int) -> bool:
        if self._stop_behind is not None:
            return step == self._stop_behind
        return self._every > 0 and step % self._every == 0

    def _write(self, step: TrainedStep, metrics: Mapping[str, float], alarm: str) -> None:
        """Write a step. A note tells of a bundle that cannot be written; the run goes on."""
        directory = self._run.directory.path / "bundles" / f"step-{step.step:06d}"
        aside = self._aside(step.step)
        bundle = bundle_of(self._run, step, self._notes, metrics, alarm)
        has_weights = aside.is_dir()
        bundle = evolve(bundle, weights=self._weights if has_weights else "none", weight_version=self._version)
        try:
            size = write_bundle(bundle, directory, (lambda partial: _move(aside, partial)) if has_weights else None)
        except StorageError as error:
            self._run.progress.note(f"step {step.step} is in no bundle: {error}")
            return
        self._run.progress.note(
            f"step {step.step} is in {directory}{': ' + alarm if alarm else ''} ({size / MIB:.1f} MiB, "
            f"{bytes_without_weights(directory) / MIB:.1f} MiB of them without weights)"
        )

    def _aside(self, step: int) -> Path:
        return self._run.directory.path / "bundles" / f".weights-{step:06d}"

    def _save_weights(self) -> None:
        """Save the weights that the step begins with."""
        assert self._trainer is not None
        assert self._step is not None
        aside = self._aside(self._step.step)
        model: Kind = "hf" if self._run.recipe.lora is None else "peft"
        folders: list[tuple[str, Kind]] = [(MODEL, model), (STATE, "resume")]
        for folder, kind in folders:
            if folder == MODEL or self._weights == "state":
                (aside / folder).mkdir(parents=True, exist_ok=True)
                self._trainer.save_state(SaveStateRequest(directory=aside / folder, kind=kind))


def bundle_of(run: ObservedRun, step: TrainedStep, notes: Notes, metrics: Mapping[str, float], alarm: str) -> Bundle:
    """The bundle of a step, without weights."""
    assert isinstance(step.sampled, CollectedRollouts)
    plan = run.plan
    return Bundle(
        step=step.step,
        weight_version=step.sampled.weight_version,
        recipe=plan.resolved,
        environment=environment_of(plan) | {"files": file_digests(parse_toml(plan.resolved))},
        alarm=alarm,
        sampled=step.sampled,
        scored=scored_columns(step),
        trained=step.trained,
        updates=tuple(notes.updates),
        digests_before=notes.digests_before,
        digests_after=notes.digests_after,
        metrics=dict(metrics),
    )


def _move(source: Path, target: Path) -> None:
    for folder in list(source.iterdir()):
        folder.rename(target / folder.name)
    source.rmdir()
