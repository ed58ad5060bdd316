"""Checkpoints and exports of a session, in the forms of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from attrs import define, evolve, field

from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopPosition
from rlcore.run.storage.checkpoint import LOOP_STATE, newest_checkpoint, read_loop_state, require_intact
from rlcore.run.storage.resuming import check_trainer, model_changes
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import RunSaver
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckpointError, Problem, Tokenizer, capabilities
from rlcore.spi.execution import Backends
from rlcore_session.errors import CallError
from rlcore_session.plan import LOG


@define(kw_only=True, eq=False)
class Storage:
    """Saves and loads the trainer of a session."""

    plan: RunPlan
    backends: Backends
    tokenizer: Tokenizer
    last_saved: Path | None = None
    """The checkpoint that was saved or loaded last."""
    owners: dict[Path, str] = field(factory=dict)
    """The adapter of each checkpoint that was saved."""

    @property
    def last_saved_text(self) -> str:
        """Return the sentence on what is left, for messages."""
        return "Nothing was saved." if self.last_saved is None else f"{self.last_saved} is the newest checkpoint."

    def save(self, directory: Path, version: int, adapter: str) -> Path:
        """Write checkpoints/step-N below a directory, N being the version, and return its path."""
        run = RunDirectory(path=expanded(directory))
        if run.metrics_file.exists():
            found, remedy = f"{run.path}, which holds a run", "Name another directory."
            raise CallError([Problem(path="directory", found=found, expected="one of sessions alone", remedy=remedy)])
        checkpoint = run.checkpoints / f"step-{version:06d}"
        if (owner := self.owners.get(checkpoint, adapter)) != adapter:
            found, expected = f"{checkpoint}, which is of the adapter {owner!r}", f"a directory of {adapter!r} alone"
            raise CallError([Problem(path="directory", found=found, expected=expected, remedy="Name another directory.")])
        saver = self._saver(run)
        saver.save(LoopPosition(step=version, weight_version=version), None, prune=False)
        saver.completed(wait=True)
        self.last_saved, self.owners[checkpoint] = checkpoint, adapter
        return checkpoint

    def load(self, directory: Path, *, optimizer: bool, generator: bool) -> int:
        """Load a checkpoint, or the newest below a directory, and return its version. `generator`: that of the generator too,
        which then holds no weights that count."""
        path = expanded(directory)
        checkpoint: Path | None = path
        if not (path / LOOP_STATE).is_file():
            roots = (RunDirectory(path=path).checkpoints, path)
            found = (newest_checkpoint(root, LOG.warning) for root in roots)
            checkpoint = next((one for one in found if one is not None), None)
        if checkpoint is None:
            raise CheckpointError(
                f"{path} holds no checkpoint; expected the directory of Session.save or of a run, or one of it"
            )
        state = read_loop_state(require_intact(checkpoint))
        check_trainer(self.plan, checkpoint, state)
        if changes := [change for change in model_changes(self.plan, state) if change.key == "model.path"]:
            raise CheckpointError(f"{checkpoint} belongs to another model: {changes[0]}. Open a session of that model")
        saver = self._saver(RunDirectory(path=path))
        if not generator:
            saver = evolve(saver, backends=evolve(self.backends, generator=None))
        saver.load(checkpoint, state, optimizer=optimizer)
        self.last_saved = checkpoint
        return state.weight_version

    def export(self, directory: Path, kind: Literal["hf", "peft"], to_save: Callable[[], int]) -> Path:
        """Write the model, or its adapters, as a new directory."""
        final, problems = expanded(directory), list[Problem]()
        if kind not in ("hf", "peft"):
            problems.append(Problem(path="kind", found=repr(kind), expected='"hf" or "peft"'))
        if kind == "peft" and self.plan.recipe.lora is None:
            expected = '"hf": there are no adapters'
            problems.append(
                Problem(path="kind", found='"peft", without a [lora]', expected=expected, remedy="Or write [lora].")
            )
        if kind == "hf" and not self.backends.trainer.has(capabilities.SAVE_HF):
            name = self.plan.chosen["trainer"].name
            expected = "a trainer with the capability `save_hf`"
            problems.append(Problem(path="kind", found=f'"hf", with trainer {name!r}', expected=expected))
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            remedy = "Name another directory, or remove it."
            problems.append(Problem(path="directory", found=f"{final}, which is there", expected="a new one", remedy=remedy))
        if problems:
            raise CallError(problems)
        to_save()
        return self._saver(RunDirectory(path=final.parent)).export_to(final, kind)

    def _saver(self, directory: RunDirectory) -> RunSaver:
        return RunSaver(plan=self.plan, backends=self.backends, tokenizer=self.tokenizer, directory=directory)
