"""The trainer of a session: gradients, updates and log-probabilities. The session calls it from one thread."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from attrs import define, evolve

from rlcore.config.recipe import Recipe
from rlcore.run.execution.weight_sync import GeneratorSync
from rlcore.run.train_step.scorers import Reference
from rlcore.spi import GlobalCounts, LossSpec, OptimStepRequest, Problem, TokenBatch, capabilities
from rlcore.spi.arrays import AnyArray, Float32Array
from rlcore.spi.execution import Backends, Minibatch, TrainerGroup
from rlcore_session.batches import split
from rlcore_session.errors import CallError, require_none
from rlcore_session.loss_functions import DERIVATIVES
from rlcore_session.losses import LINEAR, Derivatives, Losses
from rlcore_session.records import Gradients, Update


@define(kw_only=True, eq=False)
class Training:
    """Counts versions and the calls whose gradients the trainer holds."""

    backends: Backends
    weights: GeneratorSync
    recipe: Recipe
    version: int = 0
    """Version of the trainer's weights."""
    pieces: int = 0
    """Calls of forward_backward whose gradients the trainer holds."""
    dropped: str = ""
    """The cause, where gradients were dropped since the last update."""

    @property
    def is_usable(self) -> bool:
        """Return whether the trainer is in a known state."""
        return self.backends.trainer.is_usable

    @property
    def gradients_text(self) -> str:
        """Return the words on the gradients held, for messages; "" where there are none."""
        return f" and the gradients of {self.pieces} call(s)" if self.pieces else ""

    def require_no_gradients(self, call: str) -> None:
        """CallError where the memory of a shared device is to move, and gradients with it."""
        if self.pieces and self.weights.residency.moves:
            found = f"the gradients of {self.pieces} call(s), which leave the device that trainer and generator share"
            remedy = "Call optim_step first, or give the generator devices of its own."
            raise CallError([Problem(path=call, found=found, expected="no gradients", remedy=remedy)])

    def logprobs(self, batch: TokenBatch, model: Literal["policy", "reference"], temperature: float) -> list[Float32Array]:
        """float32 [T] of each sequence, 0.0 at first tokens."""
        trainer = self._trainer(temperature)
        if model == "policy":
            return split(trainer.logprobs(batch, _every(batch), "policy", self.version), batch)
        reference = Reference.of(self.backends)
        group = trainer if not reference.is_apart else reference.group.at_temperature(temperature)
        return split(evolve(reference, group=group).of_batch(batch, self.version), batch)

    def forward_backward(
        self,
        batch: TokenBatch,
        loss: str | LossSpec | Derivatives,
        config: Any,
        counts: GlobalCounts | None,
        temperature: float,
    ) -> Gradients:
        """Add the gradients of a loss."""
        trainer = self._trainer(temperature)
        if isinstance(loss, str | LossSpec) or not callable(loss):
            spec = Losses(recipe=self.recipe, trainer=trainer).spec(loss, config, batch)
        else:
            if config is not None:
                raise CallError([Problem(path="config", found=f"{config!r:.80}", expected="None: the loss is a function")])
            given = loss(split(trainer.logprobs(batch, _every(batch), "policy", self.version), batch))
            spec, batch = LINEAR, batch.with_token_column(DERIVATIVES, derivatives_of(given, batch))
        minibatch = Minibatch(batch=batch, sequences=_every(batch), counts=counts or batch.counts(), schedule_step=self.version)
        returns, pieces, self.pieces = trainer.has(capabilities.STEP_LOGPROBS), self.pieces, 0
        own = None if returns else trainer.logprobs(batch, _every(batch), "policy", self.version)
        try:
            result, logprobs = trainer.forward_backward(minibatch, spec, self.version, piece=pieces, logprobs=returns)
        except BaseException as error:
            self._drop(pieces, error)
            raise
        self.pieces = pieces + 1
        found = own if logprobs is None else logprobs
        assert found is not None, "the trainer returned them, or was asked before"
        return Gradients(loss=result.loss, metrics=dict(result.metrics), logprobs=split(found, batch))

    def optim_step(self, settings: Mapping[str, Any]) -> Update:
        """Apply the gradients held."""
        problems = list(_setting_problems(settings))
        if not self.pieces:
            found = f"no gradients{self.dropped}"
            problems.append(Problem(path="optim_step", found=found, expected="those of forward_backward calls before it"))
        require_none(problems)
        betas = settings["betas"]
        request = OptimStepRequest(
            pieces=self.pieces,
            weight_version=self.version,
            **{**settings, "betas": None if betas is None else (float(betas[0]), float(betas[1]))},
        )
        pieces, self.pieces = self.pieces, 0
        try:
            result = self.backends.trainer.optim_step(request)
        except BaseException as error:
            self._drop(pieces, error)
            raise
        self.version, self.dropped = result.weight_version, ""
        return Update(
            weight_version=result.weight_version,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            metrics=dict(result.metrics),
        )

    def drop_gradients(self) -> None:
        """Forget the gradients held: the trainer drops them as the next piece begins a step."""
        self.pieces = 0

    def to_save(self) -> int:
        """Move the trainer to where it can be saved, and return its version."""
        self.weights.make_room_to_save()
        return self.version

    def begin_load(self) -> None:
        """Move the trainer to where a state can be loaded, and drop gradients."""
        self.weights.to_training()
        if self.pieces:
            self.dropped = f", since load dropped those of {self.pieces} call(s)"
        self.pieces = 0

    def _trainer(self, temperature: float) -> TrainerGroup:
        """The trainer on its device, at a temperature."""
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < np.inf:
            raise CallError([Problem(path="temperature", found=repr(temperature), expected="a number above 0")])
        self.weights.to_training()
        return self.backends.trainer.at_temperature(float(temperature))

    def _drop(self, pieces: int, error: BaseException) -> None:
        self.pieces, self.dropped = 0, f", since {type(error).__name__} dropped those of {pieces or 1} call(s)"


def derivatives_of(given: Any, batch: TokenBatch) -> Float32Array:
    """float32 [T]: what a caller's loss returned, checked against the batch."""
    lengths = batch.lengths.tolist()
    parts = [np.asarray(_on_host(part), np.float64) for part in given] if isinstance(given, list | tuple) else None
    if parts is None or [part.shape for part in parts] != [(length,) for length in lengths]:
        found = f"a {type(given).__name__}" if parts is None else f"arrays {[list(part.shape) for part in parts]!r:.80}"
        raise CallError([Problem(path="loss", found=f"{found} returned", expected=f"a list of arrays {lengths!r:.80}")])
    flat = np.concatenate(parts)
    problems = []
    if not np.isfinite(flat).all():
        found = f"the derivative {flat[~np.isfinite(flat)][0]} returned"
        problems.append(Problem(path="loss", found=found, expected="finite numbers"))
    elif flat[~batch.loss_mask].any():
        found = "a derivative returned for a token whose loss_mask is False"
        problems.append(Problem(path="loss", found=found, expected="0.0 there, or the token in the loss_mask"))
    require_none(problems)
    return flat.astype(np.float32)


def _on_host(part: Any) -> Any:
    """An array, from a tensor too."""
    return part.detach().cpu().numpy() if hasattr(part, "detach") else part


def _every(batch: TokenBatch) -> AnyArray:
    return np.arange(batch.num_sequences)


def _setting_problems(settings: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name, value in settings.items():
        values: list[Any] = (
            [value] if name != "betas" else list(value) if isinstance(value, list | tuple) and len(value) == 2 else [None]
        )
        high = 1.0 if name == "betas" else np.inf
        if value is not None and not all(_is_number(one) and 0 <= one < high for one in values):
            expected = "two numbers from 0 to below 1" if name == "betas" else "a number of at least 0"
            problems.append(Problem(path=name, found=repr(value), expected=expected))
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
