"""Keeps what a step was trained on: its samples in files and for sinks, and its schedule."""

from collections.abc import Mapping

from attrs import frozen

from rlcore.config.recipe import LoggingConfig
from rlcore.run.protocols import CollectedRollouts, LoopObserver, TrainedStep
from rlcore.run.report.sinks import Sinks
from rlcore.run.rollout.sources import RolloutSource
from rlcore.run.storage.saver import RunSaver


@frozen(kw_only=True, eq=False)
class RolloutFiles(LoopObserver):
    """Writes a step's samples as often as `[logging]` says, and its line of schedule.jsonl."""

    source: RolloutSource
    saver: RunSaver
    sinks: Sinks
    options: LoggingConfig

    def trained(self, step: TrainedStep) -> Mapping[str, float]:
        """See LoopObserver."""
        sampled, options = step.sampled, self.options
        assert isinstance(sampled, CollectedRollouts), "a policy's samples"
        if _is_due(step.step, options.rollouts_every_n_steps):
            self.saver.save_rollouts(step.step, sampled, step.trained)
        if _is_due(step.step, options.samples_every_n_steps) and self.sinks.take_samples:
            self.sinks.log_samples(step.step, self.saver.samples(sampled, step.trained, options.samples))
        if (record := self.source.recorded()) is not None:
            self.saver.save_schedule(record)  # before the step counts, so that no checkpoint of it is without
        return {}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
