"""The table `[exports]`: models of a run beside its checkpoints, for transformers, PEFT and vLLM."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from rlcore.run.observers import ObservedRun
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopObserver
from rlcore.run.storage.run_directory import step_of
from rlcore.spi import Problem
from rlcore_hub.config import ExportsConfig

FOLDERS = {"hf": "model", "peft": "adapter"}
"""The folder of each form below weights/step-N, with the name that it has at the end of a run."""


class Exports(LoopObserver):
    """Writes the model of every n-th saved checkpoint to weights/step-N of the run directory."""

    def __init__(self, run: ObservedRun) -> None:
        self._recipe, self._folder = run.recipe, run.directory.path / "weights"
        self._options = _options(run.plan)

    def on_start(self, step: int) -> None:
        """Remove the models of steps that a resumed run forgets."""
        for known, folder in self._exported():
            if known > step:
                shutil.rmtree(folder)

    def on_checkpoint_saved(self, step: int, export: Callable[..., Path]) -> None:
        """Write the model of a step that is due, and remove the oldest ones beyond `keep`."""
        if not self._is_due(step):
            return
        for form in self._options.forms:
            final = self._folder / f"step-{step:06d}" / FOLDERS[form]
            if not final.is_dir():
                export(final, form)
        if self._options.keep is not None:
            for _, folder in self._exported()[: -self._options.keep]:
                shutil.rmtree(folder)

    def _is_due(self, step: int) -> bool:
        checkpoint = self._recipe.checkpoint
        every = checkpoint.every_n_steps * self._options.every_n_saves
        is_last = checkpoint.at_end and step == self._recipe.run.num_steps
        return step > 0 and (is_last or (every > 0 and step % every == 0))

    def _exported(self) -> list[tuple[int, Path]]:
        """Return the steps that have models, and their folders, the oldest first."""
        return sorted((step, path) for path in self._folder.glob("step-*") if (step := step_of(path)) is not None)


def export_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield what is wrong with the table."""
    checkpoint = plan.recipe.checkpoint
    if checkpoint.every_n_steps == 0 and not checkpoint.at_end:
        remedy = "Set checkpoint.every_n_steps, or leave [exports] out."
        yield Problem(path="exports", found="a run that saves no checkpoint", expected="checkpoints to export", remedy=remedy)
    if "peft" in _options(plan).forms and plan.recipe.lora is None:
        found, expected = '"peft", without a [lora]', '"hf" alone: there are no adapters'
        yield Problem(path="exports.forms", found=found, expected=expected, remedy="Write [lora], or take it out.")


def _options(plan: RunPlan) -> ExportsConfig:
    return cast("ExportsConfig", plan.recipe.tables["exports"])
