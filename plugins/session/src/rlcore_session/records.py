"""The records that a session takes and returns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from rlcore.spi import FinishReason
from rlcore.spi.arrays import BoolArray, Float32Array, Int32Array


@frozen(eq=False)
class Completion:
    """One sample of a prompt."""

    tokens: Int32Array
    """int32 [T]: the tokens behind the prompt, the stop token included."""
    logprobs: Float32Array
    """float32 [T]: log-probability of each token under the distribution sampled from; at temperature 0 under the untempered
    one."""
    text: str
    """The tokens as text, without special tokens."""
    finish_reason: FinishReason
    """STOP where a stop token or stop text ended it, LENGTH where a limit did."""
    weight_version: int
    """Version of the weights that sampled it: the session's `sampler_version` then."""
    prompt: Int32Array
    """int32 [P]: the tokens of the prompt."""


@frozen(eq=False)
class Datum:
    """One sequence to train on."""

    tokens: Sequence[int] | Int32Array
    """[T]: the whole sequence, the prompt included."""
    loss_mask: Sequence[bool] | BoolArray | None = None
    """[T]: True where a token takes part in the loss, never at the first; None is every token but the first."""
    columns: Mapping[str, Any] = field(factory=dict)
    """An array [T] by name, such as "advantages" and "generation_logprobs". Floating-point numbers become float32, integers
    int32."""
    sequence_columns: Mapping[str, float] = field(factory=dict)
    """A number by name, of the whole sequence."""

    @classmethod
    def of(cls, completion: Completion, **columns: Any) -> "Datum":
        """A prompt with its completion, whose tokens alone take part in the loss, and their `generation_logprobs`. A further
        column is a number for all tokens of the completion, or an array [T] of one each."""
        before, length = len(completion.prompt), len(completion.tokens)
        values = {"generation_logprobs": completion.logprobs, **columns}
        return cls(
            tokens=np.concatenate([completion.prompt, completion.tokens]),
            loss_mask=np.arange(before + length) >= before,
            columns={
                name: np.concatenate([np.zeros(before), np.broadcast_to(value, (length,))]) for name, value in values.items()
            },
        )


@frozen(eq=False)
class Gradients:
    """The figures of one `forward_backward`. The gradients themselves stay with the trainer."""

    loss: float
    """The loss of this call; of a callable the sum of its derivatives times the log-probabilities."""
    metrics: Mapping[str, float]
    """The loss function's own figures."""
    logprobs: list[Float32Array]
    """float32 [T] of each sequence: log-probabilities by the weights before the update, 0.0 at first tokens."""


@frozen
class Update:
    """The figures of one `optim_step`."""

    weight_version: int
    """The trainer's version after it."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    learning_rate: float
    """The rate that the update used."""
    metrics: Mapping[str, float]
    """The trainer's own figures."""
