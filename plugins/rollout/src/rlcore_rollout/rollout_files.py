"""Keeps what a step was trained on: its samples in files and for sinks, its schedule, and how its episodes ended."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from attrs import frozen

from rlcore.files import storage_errors
from rlcore.reading import write_parquet
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts, LoopObserver, TrainedStep
from rlcore.run.report.sinks import Sinks
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import Row, Tokenizer
from rlcore_rollout.failures import FILE, append_entries, evaluation_entries, ledger_name, step_entries
from rlcore_rollout.logged_samples import logged_samples
from rlcore_rollout.rollout_table import advantages_of, prompt_texts, rollout_table
from rlcore_rollout.schedule_file import append_step, begin_schedule, rewind_schedule
from rlcore_rollout.slowest_calls import SlowestCalls
from rlcore_rollout.sources import RolloutSource


@frozen(kw_only=True, eq=False)
class RolloutWriter:
    """Writes samples below `rollouts/` of a run directory."""

    directory: Path
    tokenizer: Tokenizer

    def save_answers(self, step: int, collected: CollectedRollouts) -> None:
        """The answers of the evaluation behind a step, as Parquet."""
        self.write(f"evaluation-{step:06d}", rollout_table(step, collected, prompt_texts(collected, self.tokenizer)))

    def write(self, name: str, table: pa.Table) -> None:
        """NAME.parquet."""
        folder = RunDirectory(path=self.directory).rollouts
        with storage_errors("rollouts", folder):
            folder.mkdir(exist_ok=True)
            write_parquet(table, folder / f"{name}.parquet")


@frozen(kw_only=True, eq=False)
class RolloutFiles(LoopObserver):
    """Writes a step's samples as often as `[logging]` says, its lines of failures.jsonl and schedule.jsonl, and its slowest
    calls."""

    plan: RunPlan
    source: RolloutSource
    writer: RolloutWriter
    sinks: Sinks
    slowest: SlowestCalls

    def on_start(self, step: int) -> None:
        """See LoopObserver: what a resumed run writes again is forgotten."""
        rewind_schedule(self._schedule_file, step)
        begin_schedule(self._schedule_file, self.plan, step)

    def on_step_trained(self, step: TrainedStep) -> Mapping[str, float]:
        """See LoopObserver."""
        sampled, trained, options = step.sampled, step.trained, self.plan.recipe.logging
        assert isinstance(sampled, CollectedRollouts), "a policy's samples"
        tokenizer = self.writer.tokenizer
        if _is_due(step.step, options.rollouts_every_n_steps):
            prompts, advantages = prompt_texts(sampled, tokenizer), advantages_of(sampled, trained)
            self.writer.write(f"step-{step.step:06d}", rollout_table(step.step, sampled, prompts, advantages))
        if _is_due(step.step, options.samples_every_n_steps) and self.sinks.take_samples:
            self.sinks.log_samples(step.step, logged_samples(sampled, trained, options.samples, tokenizer))
        append_entries(self.writer.directory / FILE, step.step, step_entries(sampled, trained, self.source.endings))
        self.slowest.write(self.writer.directory, step.step)
        if (record := self.source.recorded()) is not None:
            append_step(self._schedule_file, record)  # before the step counts, so that no checkpoint of it is without
        return {"generated_tokens_per_second": 0.0} if self.source.is_reused else {}

    @property
    def _schedule_file(self) -> Path:
        return RunDirectory(path=self.writer.directory).schedule_file


@frozen(kw_only=True, eq=False)
class LedgerFiles(LoopObserver):
    """Writes the lines of evaluations in failures.jsonl, and their answers where the recipe keeps them."""

    writer: RolloutWriter
    rows: Sequence[Row] = ()
    """The held-out rows."""
    kept: Sequence[int] = ()
    """[P]: those within the limits, by number."""
    keeps_answers: bool = False

    def on_start(self, step: int) -> None:
        """See LoopObserver: what a resumed run writes again is forgotten, before its first step all."""
        rewind_schedule(self.writer.directory / FILE, step or -1)

    def end_evaluation(self, step: int, answers: CollectedRollouts) -> None:
        """Write the evaluation behind a step."""
        names = [ledger_name(self.rows, number) for number in self.kept]
        append_entries(self.writer.directory / FILE, step, evaluation_entries(answers, names))
        if self.keeps_answers:
            self.writer.save_answers(step, answers)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
