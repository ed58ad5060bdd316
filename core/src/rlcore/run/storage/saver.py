"""Saves the results of a run: metrics, checkpoints, rollouts, the final model."""

import hashlib
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attrs import Factory, define, field

from rlcore.files import storage_errors
from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.run.data.rows_digest import RowDigests
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopPosition
from rlcore.run.storage.checkpoint import LoopState, begin_checkpoint, sync, write_state
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckpointError, LoadStateRequest, SaveStateRequest, Tokenizer
from rlcore.spi.execution import BackendGroup, Backends

ROLLOUTS = "rollouts.state"
"""File of a checkpoint with the state of unfinished rollouts."""
SAMPLES_PER_FILE, SAMPLE_BYTES = 16, 2**16


def read_rollouts(checkpoint: Path) -> bytes | None:
    """Read a checkpoint's state of unfinished rollouts; None where it has none."""
    path = checkpoint / ROLLOUTS
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def model_digest(model_path: str, revision: str | None = None) -> str:
    """SHA-256 of a local model's config.json and of samples of its weights, or name@revision for a model on the Hub.

    Each weight file gives its name, its size and SAMPLES_PER_FILE blocks spread evenly over it, its first and last among them:
    enough to tell models apart, at a cost that does not grow with them.
    """
    config = expanded(model_path) / "config.json"
    if not config.is_file():
        return model_path if revision is None else f"{model_path}@{revision}"
    digest = hashlib.sha256(config.read_bytes())
    for path in sorted(config.parent.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES_PER_FILE):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(named: Any) -> Any:
    """Return `model_digest` of a section, or of a ModelSpec; None where there is none."""
    return None if named is None else model_digest(named.path, named.revision)


@define(kw_only=True, eq=False)
class RunSaver:
    """Saves into one run directory."""

    plan: RunPlan
    backends: Backends
    tokenizer: Tokenizer
    directory: RunDirectory
    digests: RowDigests = RowDigests()
    """Digests of the rows to train on."""
    model: str = field(init=False, default=Factory(lambda saver: _digest(saver.plan.recipe.model), takes_self=True))
    """`model_digest` of the recipe's model."""
    reference: str | None = field(
        init=False, default=Factory(lambda saver: _digest(saver.plan.recipe.reference), takes_self=True)
    )
    """`model_digest` of the model in [reference]; None without that section."""
    critic: str | None = field(init=False, default=Factory(lambda saver: _digest(saver.plan.critic), takes_self=True))
    """`model_digest` of the model that the critic begins with; None where none is trained."""
    thread: ThreadPoolExecutor = field(init=False, factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    _completing: tuple[int, Future[Path]] | None = field(init=False, default=None)
    """The step of a checkpoint that is written and not complete."""

    def save(self, position: LoopPosition, rollouts: bytes | None, *, prune: bool) -> None:
        """See Saver; `prune` drops all but the `checkpoint.keep` newest."""
        state = LoopState(
            step=position.step,
            weight_version=position.weight_version,
            model=self.model,
            reference=self.reference,
            trainer=self.plan.chosen["trainer"].name,
            critic=self.critic,
            data=self.digests.read,
            own_rows=self.digests.own,
            critic_version=position.critic_version,
            unlogged=position.unlogged,
        )
        # What was logged by then is not computed again: no loss of power may take it while the checkpoint stays.
        if self.directory.metrics_file.exists():
            with storage_errors("metrics.jsonl", self.directory.path):
                sync(self.directory.metrics_file)
        write = partial(self._write, position.algorithm_state, rollouts)
        keep = self.plan.recipe.checkpoint.keep if prune else None
        complete = begin_checkpoint(self.directory.checkpoints, state, write, keep=keep)
        self._completing = position.step, self.thread.submit(complete)

    def completed(self, *, wait: bool) -> int | None:
        """See Saver."""
        if self._completing is None or not (wait or self._completing[1].done()):
            return None
        step, future = self._completing
        if future.exception() is None:  # an interrupt ends this wait, and nothing is forgotten
            self.directory.note_saved(step)
        self._completing = None
        future.result()
        return step

    @property
    def can_save(self) -> bool:
        """Return whether trainer, critic and generator are in a known state."""
        others = (self.backends.critic, self.backends.generator)
        return self.backends.trainer.is_usable and all(other is None or other.is_usable for other in others)

    def load(self, checkpoint: Path, state: LoopState, *, optimizer: bool = True) -> None:
        """Bring trainer, critic and generator to a checkpoint of this model and trainer."""
        of_critic = (("critic", self.backends.critic, state.critic_version),)
        for name, group, expected in (("trainer", self.backends.trainer, state.weight_version), *of_critic):
            request = LoadStateRequest(directory=checkpoint / name, optimizer=optimizer)
            found = expected if group is None else group.load_state(request).weight_version
            if found != expected:
                raise CheckpointError(f"{checkpoint / name} holds weights of version {found}; its loop.json says {expected}")
        if self.backends.generator is not None and (checkpoint / "generator").is_dir():
            self.backends.generator.load_state(LoadStateRequest(directory=checkpoint / "generator"))

    def export_model(self, kind: Literal["hf", "peft"]) -> Path:
        """The Hugging Face directory `model` or the PEFT directory `adapter`; an earlier one goes only once it is whole."""
        name = {"hf": "model", "peft": "adapter"}[kind]
        return self._export(self.backends.trainer, self.directory.path / name, kind)

    def export_to(self, final: Path, kind: Literal["hf", "peft"] = "hf") -> Path:
        """The model in the Hugging Face format, or its adapters in PEFT's, as this directory."""
        return self._export(self.backends.trainer, final, kind)

    def export_critic(self) -> Path:
        """The Hugging Face directory `critic`, as of the model."""
        assert self.backends.critic is not None, "checked by the plan"
        return self._export(self.backends.critic, self.directory.path / "critic", "hf")

    def _export(self, group: BackendGroup, final: Path, kind: Literal["hf", "peft"]) -> Path:
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with storage_errors("the exported model", self.directory.path):
                partial.mkdir(parents=True)
                group.save_state(SaveStateRequest(directory=partial, kind=kind))
                model = self.plan.recipe.model
                if kind == "hf" and (model.chat_template is not None or model.chat_template_kwargs):
                    self.tokenizer.save_chat_templates(partial, model.chat_template_kwargs)
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final

    def _write(self, algorithm_state: AlgorithmState | None, rollouts: bytes | None, checkpoint: Path) -> None:
        if rollouts is not None:
            (checkpoint / ROLLOUTS).write_bytes(rollouts)
        groups: dict[str, BackendGroup | None] = {
            "trainer": self.backends.trainer,
            "critic": self.backends.critic,
            "generator": self.backends.generator,
        }
        for name, group in groups.items():
            if group is not None:
                (checkpoint / name).mkdir()
                group.save_state(SaveStateRequest(directory=checkpoint / name, kind="resume"))
        if algorithm_state is not None:
            write_state(checkpoint, self.plan.chosen["algorithm"].name, algorithm_state)
