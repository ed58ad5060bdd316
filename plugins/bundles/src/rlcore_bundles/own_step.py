"""The step of a program's own loop, computed again by the calls that a session makes: forward_backward and optim_step."""

from typing import Any, Final

import attrs
import numpy as np
from attrs import evolve, frozen

from rlcore.schema.structure import structure
from rlcore.spi import (
    CheckpointError,
    ForwardBackwardResult,
    GlobalCounts,
    LossSpec,
    OptimStepRequest,
    OptimStepResult,
    TokenBatch,
    capabilities,
)
from rlcore.spi.arrays import Float32Array
from rlcore.spi.execution import Minibatch, TrainerGroup
from rlcore_bundles.bundle import Bundle, Update
from rlcore_torchkit.rl.loss_config import LossConfig
from rlcore_torchkit.rl.loss_spec import policy_gradient_spec

CROSS_ENTROPY: Final = "rlcore_session.loss_functions:cross_entropy"
POLICY_GRADIENT: Final = "rlcore_torchkit.rl.policy_gradient:policy_gradient_loss"
LOSSES: Final = (CROSS_ENTROPY, POLICY_GRADIENT)
"""The losses that a bundle of an own loop may name: a replay imports no other code."""


@frozen
class _NoOptions:
    """A loss that takes no options."""


@frozen(kw_only=True, eq=False)
class Piece:
    """A call of forward_backward with its result."""

    minibatch: Minibatch
    loss: LossSpec
    result: ForwardBackwardResult
    logprobs: Float32Array
    """float32 [T]: log-probabilities before the update."""

    @property
    def batch(self) -> TokenBatch:
        """The data of the call."""
        return self.minibatch.batch

    def update(self, step: OptimStepResult) -> Update:
        """Return the record of the call and of the optim_step behind it."""
        config: Any = self.loss.config
        return Update(
            sequences=np.asarray(self.minibatch.sequences, np.int64),
            num_loss_tokens=self.minibatch.counts.num_loss_tokens,
            num_loss_sequences=self.minibatch.counts.num_loss_sequences,
            schedule_step=self.minibatch.schedule_step,
            loss=self.loss.path,
            loss_config={name: value for name, value in attrs.asdict(config).items() if value is not None},
            logprobs=self.logprobs,
            loss_value=self.result.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            metrics={**self.result.metrics, **step.metrics},
            gradient_norms=step.gradient_norms,
        )


def repeated(bundle: Bundle, trainer: TrainerGroup, version: int) -> Update:
    """Compute the step of an own loop again. CheckpointError where the bundle names another loss than rlcore's."""
    calls, (recorded, *_) = bundle.own_step, bundle.updates
    assert calls is not None, "a bundle of an own loop"
    loss, group = loss_of(bundle), trainer.at_temperature(calls.temperature)
    counts = GlobalCounts(num_loss_tokens=recorded.num_loss_tokens, num_loss_sequences=recorded.num_loss_sequences)
    minibatch = Minibatch(
        batch=bundle.trained, sequences=recorded.sequences, counts=counts, schedule_step=recorded.schedule_step
    )
    returns = trainer.has(capabilities.STEP_LOGPROBS)
    own = None if returns else group.logprobs(bundle.trained, recorded.sequences, "policy", version)
    result, found = group.forward_backward(minibatch, loss, version, piece=0, logprobs=returns)
    logprobs = own if found is None else found
    assert logprobs is not None, "the trainer returned them, or was asked before"
    settings: dict[str, Any] = attrs.asdict(calls.settings)
    if trainer.has(capabilities.SCHEDULE_STEP):
        settings["schedule_step"] = recorded.schedule_step
    norms = trainer.has(capabilities.GRADIENT_NORMS)
    step = trainer.optim_step(OptimStepRequest(pieces=1, weight_version=version, gradient_norms=norms, **settings))
    return Piece(minibatch=minibatch, loss=loss, result=result, logprobs=logprobs).update(step)


def loss_of(bundle: Bundle) -> LossSpec:
    """The loss that an own loop's step names, of rlcore's own. CheckpointError where it is another one."""
    calls, (update, *_) = bundle.own_step, bundle.updates
    assert calls is not None, "a bundle of an own loop"
    if update.loss not in LOSSES:
        raise CheckpointError(f"the bundle names the loss {update.loss!r:.80}; expected {' or '.join(LOSSES)}")
    spec = LossSpec(path=CROSS_ENTROPY, config=_NoOptions())
    if update.loss == POLICY_GRADIENT:
        config, problems = structure(dict(update.loss_config), LossConfig, "updates[0].loss_config")
        if problems:
            raise CheckpointError("\n".join(["the bundle is damaged:", *(f"  - {problem}" for problem in problems)]))
        spec = policy_gradient_spec(config)
    return evolve(spec, token_columns=calls.token_columns, previous_logprobs=calls.previous_logprobs)
