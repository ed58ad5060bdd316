"""Writes one step of a session to a bundle: its forward_backward and its optim_step."""

import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
from attrs import define, evolve, fields

from rlcore.files import storage_errors
from rlcore.reading import parse_toml
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts
from rlcore.schema.file_limits import expanded
from rlcore.spi import (
    GROUP_IDS,
    FinishReason,
    ForwardBackwardResult,
    LossSpec,
    OptimStepRequest,
    OptimStepResult,
    Problem,
    SaveStateRequest,
    StorageError,
    TokenBatch,
    capabilities,
)
from rlcore.spi.arrays import Float32Array
from rlcore.spi.execution import Minibatch, TrainerGroup
from rlcore_bundles.bundle import Bundle, OwnStep, StepSettings, Weights
from rlcore_bundles.file_digests import file_digests
from rlcore_bundles.own_step import Piece
from rlcore_bundles.recorded_groups import environment_of
from rlcore_bundles.storage import MODEL, STATE, write_bundle
from rlcore_bundles.weight_digests import weight_digests
from rlcore_session.errors import require_none
from rlcore_session.losses import NAMES
from rlcore_session.plan import LOG
from rlcore_session.training import CALLS

SETTINGS = tuple(one.name for one in fields(StepSettings))


@define(kw_only=True, eq=False)
class StepRecording:
    """The bundle of the next step. Its weights are saved before the step, its figures are noted, and optim_step writes it."""

    directory: Path
    weights: Weights
    plan: RunPlan
    trainer: TrainerGroup
    _saved: tempfile.TemporaryDirectory[str] | None = None
    """The weights at the beginning of the step, beside the bundle's folder."""
    _digests: dict[str, int] | None = None
    _piece: Piece | None = None
    _temperature: float = 1.0

    @classmethod
    def of(cls, directory: str | Path, weights: Any, plan: RunPlan, trainer: TrainerGroup) -> "StepRecording":
        """The recording of a call. CallError with all that is wrong."""
        folder, problems = expanded(Path(directory)).absolute(), list[Problem]()
        if folder.exists():
            problems.append(Problem(path="directory", found=f"{folder}, which is there", expected="a new folder"))
        if weights not in get_args(Weights):
            expected = ", ".join(map(repr, get_args(Weights)))
            problems.append(Problem(path="weights", found=f"{weights!r:.80}", expected=f"one of {expected}"))
        require_none(problems)
        return cls(directory=folder, weights=weights, plan=plan, trainer=trainer)

    def require(self, loss: object, num_pieces: int) -> None:
        """CallError where a call is not one that a bundle holds."""
        problems = []
        if not isinstance(loss, str) or loss not in NAMES:
            name = (
                loss if isinstance(loss, str) else getattr(loss, "path", None) or getattr(loss, "__name__", type(loss).__name__)
            )
            problems.append(
                Problem(
                    path="loss",
                    found=f"{name!r:.80} in a step that session.record writes",
                    expected=f"one of {', '.join(NAMES)}: a replay executes no code of a bundle",
                    remedy="Record a step with one of these, or make this step without session.record.",
                )
            )
        if num_pieces:
            remedy = "Give all data to one call, or call session.drop_gradients() first."
            problems.append(
                Problem(
                    path="forward_backward", found=f"call {num_pieces + 1} of a recorded step", expected=CALLS, remedy=remedy
                )
            )
        require_none(problems)

    def begin(self) -> None:
        """Save the weights that the step begins with. StorageError where that fails."""
        self.discard()
        parent = self.directory.parent
        with storage_errors("the bundle", parent, otherwise="name another folder"):
            parent.mkdir(parents=True, exist_ok=True)
            self._saved = tempfile.TemporaryDirectory(dir=parent, prefix=f".{self.directory.name}-")
        kind: Any = "hf" if self.plan.recipe.lora is None else "peft"
        wanted = {"none": (), "model": (MODEL,), "state": (MODEL, STATE)}[self.weights]
        for name in wanted:
            folder = Path(self._saved.name) / name
            folder.mkdir()
            self.trainer.save_state(SaveStateRequest(directory=folder, kind=kind if name == MODEL else "resume"))
        self._digests = self._weight_digests()

    def note(
        self, minibatch: Minibatch, loss: LossSpec, result: ForwardBackwardResult, logprobs: Float32Array, temperature: float
    ) -> None:
        """Note the call of forward_backward with its log-probabilities, float32 [T]."""
        self._piece = Piece(minibatch=minibatch, loss=loss, result=result, logprobs=logprobs)
        self._temperature = float(temperature)

    def write(self, request: OptimStepRequest, result: OptimStepResult) -> None:
        """Write the bundle behind the update. A warning tells of one that cannot be written; the session goes on."""
        try:
            write_bundle(self._bundle(request, result), self.directory, self._move_weights)
        except StorageError as error:
            LOG.warning(f"the step of weight version {request.weight_version} is in no bundle: {error}")
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the saved weights that no bundle holds."""
        if self._saved is not None:
            self._saved.cleanup()

    def _bundle(self, request: OptimStepRequest, result: OptimStepResult) -> Bundle:
        piece, settings = self._piece, {name: getattr(request, name) for name in SETTINGS}
        assert piece is not None, "the trainer held gradients"
        calls = OwnStep(
            temperature=self._temperature,
            token_columns=piece.loss.token_columns,
            previous_logprobs=piece.loss.previous_logprobs,
            settings=StepSettings(**settings),
        )
        resolved, version = self.plan.resolved, request.weight_version
        return Bundle(
            step=version + 1,
            weight_version=version,
            recipe=resolved,
            environment=environment_of(self.plan) | {"files": file_digests(parse_toml(resolved))},
            sampled=samples_of(piece.batch, version),
            scored={},
            trained=piece.batch,
            updates=(piece.update(result),),
            digests_before=self._digests or {},
            digests_after=self._weight_digests(),
            weights=self.weights,
            own_step=calls,
        )

    def _weight_digests(self) -> dict[str, int]:
        """The digests of the trainer's weights; none where it exports no model."""
        return weight_digests(self.trainer, self.directory.parent) if self.trainer.has(capabilities.SAVE_HF) else {}

    def _move_weights(self, partial: Path) -> None:
        assert self._saved is not None
        for folder in list(Path(self._saved.name).iterdir()):
            folder.rename(partial / folder.name)


def samples_of(batch: TokenBatch, version: int) -> CollectedRollouts:
    """The sequences of a batch as samples of which nobody knows a reward: all numbers are zero."""
    count = batch.num_sequences
    no, zeros = np.zeros(count, np.bool_), np.zeros(count, np.float32)
    bare = evolve(batch, token_columns={}, sequence_columns={GROUP_IDS: np.arange(count, dtype=np.int32)})
    return CollectedRollouts(
        batch=bare,
        rewards=zeros,
        valid=~no,
        finish_reasons=np.full(count, FinishReason.STOP, np.uint8),
        truncated=no,
        success=no,
        responses=[""] * count,
        num_generated=np.zeros(count, np.int64),
        failed=no,
        timed_out=no,
        weight_version=version,
        oldest_version=version,
    )
