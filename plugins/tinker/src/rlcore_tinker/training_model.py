"""The model that a client trains: what each of its requests does."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import define, field, frozen

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_tinker.adapter_pool import AdapterWeights
from rlcore_tinker.backend import StepUpdate
from rlcore_tinker.checkpoints import Checkpoint, Checkpoints, Kind, expiry, now
from rlcore_tinker.errors import RequestError, as_request_error
from rlcore_tinker.loss_table import LOSS_SUM
from rlcore_tinker.ordered_requests import OrderedRequests
from rlcore_tinker.promises import Result
from rlcore_tinker.training_data import Limits, RawPiece, TrainingPiece
from rlcore_tinker.weights import Weights
from rlcore_tinker.wire import CLASSES

OUTPUT_TYPE = "TorchLossReturn"


@frozen(kw_only=True)
class ServedModel:
    """The model that the server has, as clients see it."""

    name: str
    """The model's name for clients."""
    tokenizer_id: str
    """The name that clients load the tokenizer by: the model's directory, or its name on the Hub."""
    limits: Limits
    lora_rank: int | None
    """The recipe's lora.rank, the highest of a model; None where all weights are trained."""
    least_rank: int = 1
    """The lowest of a model: the recipe's too where lora.init_from has it, or where the trainer keeps one adapter."""
    seed: int = 0
    """The recipe's run.seed."""

    def checkpoint_problem(self, found: Checkpoint) -> str | None:
        """Return why this server cannot load a checkpoint; None where it can."""
        if (found.base_model, found.stored_rank) == (self.name, self.lora_rank):
            return None
        return (
            f"found {found.path}, of {found.base_model} and a recipe with lora.rank {found.stored_rank}; expected one of "
            f"{self.name} and {self.lora_rank}, this server's recipe"
        )


@frozen(kw_only=True)
class AdamParams:
    """The settings of one optim_step."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """0.0 clips nothing."""


@frozen(kw_only=True)
class SaveRequest:
    """The request for a checkpoint."""

    kind: Kind
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


@frozen(kw_only=True)
class LoadRequest:
    """The request for the state of a checkpoint, in a model under training or in a new one."""

    path: str
    optimizer: bool
    """True for the optimizer's moments too."""
    session_id: str
    """The session of a new model; "" for a model under training."""
    model_seq_id: int
    """The number of a new model in its session."""
    user_metadata: dict[str, Any]


@define(kw_only=True, eq=False)
class TrainingModel:
    """A model under training. Its methods run one after another, in the order of the client's requests."""

    model_id: str
    session_id: str
    served: ServedModel
    weights: Weights | AdapterWeights
    checkpoints: Checkpoints
    requests: OrderedRequests
    lora_rank: int | None
    """None where all weights are trained."""
    user_metadata: dict[str, Any] = field(factory=dict)
    created: str = field(factory=now)
    num_updates: int = 0
    """Updates and loads, which tell its weights apart."""
    num_pieces: int = 0
    """Calls of forward_backward since the last step."""
    failure: str | None = None
    """Why a forward_backward since the last step failed, so that the step has no whole gradient."""

    async def forward_backward(self, raw: RawPiece) -> Result:
        """Add the gradients of a piece, or compute its log-probabilities alone."""
        is_forward = raw.message.forward_only
        try:
            piece = await off_loop(raw.read, self.served.limits)
            loss, metrics, logprobs = await (self._forward(piece) if piece.forward_only else self._backward(piece))
        except Exception as error:
            if not is_forward:
                self.failure = str(as_request_error(error))
            raise
        return Result.proto(_output(piece.outputs(logprobs), {**metrics, LOSS_SUM: loss}))

    async def optim_step(self, params: AdamParams) -> Result:
        """Apply the gradients of all pieces. RequestError where there are none, or one of them failed."""
        failure, num_pieces = self.failure, self.num_pieces
        self.failure, self.num_pieces = None, 0
        if failure is not None:
            async with self.weights.training() as session:
                await off_loop(session.drop_gradients)
                self.weights.has_gradients(found=False)
            raise RequestError(
                f"optim_step: found a forward_backward since the last step that failed, so that its gradients are not whole; "
                f"they are dropped and the weights are as they were. Send all data of the step again. The error was: {failure}"
            )
        if num_pieces == 0:
            raise RequestError("optim_step: found no gradients; expected a forward_backward since the last optim_step")
        async with self.weights.training() as session:
            self.weights.has_gradients(found=False)

            def step() -> StepUpdate:
                update = session.optim_step(
                    learning_rate=params.learning_rate,
                    betas=params.betas,
                    eps=params.eps,
                    weight_decay=params.weight_decay,
                    max_grad_norm=params.max_grad_norm,
                )
                self._changed()
                return update

            update = await off_loop(step)
        return Result.json(
            {"metrics": {"grad_norm": update.grad_norm, "learning_rate": update.learning_rate, **update.metrics}}
        )

    async def save(self, request: SaveRequest) -> Checkpoint:
        """Save a checkpoint of the kind that is asked for."""
        self.checkpoints.check_new(self.model_id, request.kind, request.name, overwrite=request.overwrite)
        described = Checkpoint(
            model_id=self.model_id,
            kind=request.kind,
            name=request.name,
            created=now(),
            weights=self.weights.training_name,
            base_model=self.served.name,
            lora_rank=self.lora_rank,
            stored_rank=self.served.lora_rank,
            user_metadata=request.user_metadata,
            expires=expiry(request.ttl_seconds),
        )
        form: Literal["hf", "peft"] = "hf" if self.served.lora_rank is None else "peft"
        async with self.weights.training() as session:
            if request.kind == "external_weights":
                return await off_loop(self.checkpoints.write, described, lambda folder: session.export(folder, kind=form))
            return await off_loop(self.checkpoints.write, described, session.save)

    async def load(self, checkpoint: Checkpoint, *, optimizer: bool) -> None:
        """Load a checkpoint. Gradients are dropped. RequestError where it is of another rank."""
        if checkpoint.lora_rank != self.lora_rank:
            raise RequestError(
                f"path: found {checkpoint.path} of LoRA rank {checkpoint.lora_rank}; expected rank {self.lora_rank}, that of "
                "this model. Make another one with create_training_client_from_state"
            )
        self.num_pieces, self.failure = 0, None
        await self.weights.begin(checkpoint.files, checkpoint.weights, optimizer=optimizer)

    async def _forward(self, piece: TrainingPiece) -> tuple[float, dict[str, float], Sequence[Float32Array]]:
        async with self.weights.training() as session:
            sequences = [sequence.tolist() for sequence in piece.batch.sequences()]
            logprobs = await off_loop(session.logprobs, sequences, model="policy")
        return await off_loop(_loss_of, piece, logprobs), {}, logprobs

    async def _backward(self, piece: TrainingPiece) -> tuple[float, dict[str, float], Sequence[Float32Array]]:
        if self.failure is not None:  # the step has no whole gradient any more
            raise RequestError(
                f"forward_backward: an earlier one of this step failed, and this one adds nothing: {self.failure}"
            )
        gradients = await self.weights.forward_backward(piece.batch, piece.loss.spec(piece.config))
        self.num_pieces += 1
        return gradients.loss, dict(gradients.metrics), gradients.logprobs

    def _changed(self) -> None:
        self.num_updates += 1
        self.weights.has_changed(f"{self.model_id}@{self.num_updates}")


def _loss_of(piece: TrainingPiece, logprobs: Sequence[Float32Array]) -> float:
    """The loss of a piece at these log-probabilities, by the trainer's own function."""
    import torch

    from rlcore_torchkit.trainer.losses import load_loss

    batch, spec = piece.batch, piece.loss.spec(piece.config)
    inputs = spi.LossInputs(
        logprobs=torch.from_numpy(np.concatenate([*logprobs])),
        entropy=None,
        loss_mask=torch.from_numpy(batch.loss_mask),
        offsets=torch.from_numpy(batch.offsets),
        token_columns={name: torch.from_numpy(batch.token_columns[name]) for name in spec.token_columns},
        sequence_columns={},
        counts=batch.counts(),
    )
    return float(load_loss(spec.path)(inputs, spec.config).loss)


def _output(logprobs: Sequence[Float32Array], metrics: dict[str, float]) -> Any:
    """The protocol's message of a piece's figures."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type=OUTPUT_TYPE)
    for name, value in metrics.items():
        message.metrics[name] = value
    record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(logprobs))
    field_ = record.fields["logprobs"]
    field_.data = b"".join(one.astype(np.float32).tobytes() for one in logprobs)
    field_.offsets = np.cumsum([0, *(4 * len(one) for one in logprobs)], dtype=np.int64).tobytes()
    field_.dtype = 1
    return message
