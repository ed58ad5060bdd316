"""The softmax over a vocabulary chunk by chunk: logits, their gradients, and the gradient of the head.

Shapes: T rows, V vocabulary, C rows of a chunk.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from rlcore_torchkit.head.onednn import add_weight_gradient
from rlcore_torchkit.head.sampling_mask import KeptTokens

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 3 * 2**26}
"""Logits of one chunk where the caller does not say: large enough for efficient products, small beside a model."""


class Upstream(NamedTuple):
    """Gradients of a chunk's log-probabilities and entropies, divided by -temperature: [C] each."""

    scaled: Tensor
    """The gradients of the log-probabilities."""
    reached: Tensor | None
    """The gradients of the entropies H; None where they have none."""
    shift: Tensor | None
    """H · reached + scaled."""

    @classmethod
    def scaled_by(
        cls, scale: float, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropies: Tensor | None
    ) -> "Upstream":
        """Scale the gradients [T], of which at least one is there; `entropies` [T] are given where theirs is."""
        given = grad_logprobs if grad_logprobs is not None else grad_entropy
        assert given is not None
        scaled = torch.zeros_like(given) if grad_logprobs is None else grad_logprobs * scale
        if grad_entropy is None or entropies is None:
            return cls(scaled, None, None)
        reached = grad_entropy * scale
        return cls(scaled, reached, entropies * reached + scaled)

    def select(self, rows: Tensor) -> "Upstream":
        """The gradients of these rows, int64 [rows], alone."""
        scaled, reached, shift = self
        return Upstream(scaled[rows], None if reached is None else reached[rows], None if shift is None else shift[rows])


def chunk_rows(device: str, num_columns: int) -> int:
    """Rows of logits that one chunk holds where the caller does not say."""
    return max(1, _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS["cuda"]) // num_columns)


def has_kernels(hidden: Tensor) -> bool:
    """Return whether the CUDA kernels serve this tensor; they come with Triton, as torch's CUDA builds for Linux do."""
    return hidden.is_cuda and hidden.dtype != torch.float64 and hidden.shape[0] > 0 and find_spec("triton") is not None


def logits_gradient(logits: Tensor, normalised: bool, chosen: Tensor, upstream: Upstream, dtype: torch.dtype) -> Tensor:
    """[C, V] in `dtype`, by torch's operations. `logits` are the scaled logits, or where `normalised` their log-softmax."""
    scaled, reached, shift = upstream
    if reached is None or shift is None:
        return _grad_of_logprobs(logits, normalised, chosen, scaled[:, None], dtype)
    return _grad_with_entropy(logits, normalised, chosen, scaled[:, None], reached[:, None], shift[:, None]).to(dtype)


def _grad_of_logprobs(logits: Tensor, normalised: bool, chosen: Tensor, scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, V] in `dtype`: (p - onehot) scaled, with `scaled` [C, 1] the upstream gradient by -temperature.

    `logits` are the scaled logits, or where `normalised` their log-softmax, which is overwritten.
    """
    wide = wide_dtype(dtype)
    softmax = logits.exp_() if normalised else torch.softmax(logits, 1, dtype=wide)
    softmax.scatter_add_(1, chosen, torch.full_like(scaled, -1.0))
    narrow = softmax if dtype == wide else torch.empty_like(softmax, dtype=dtype)
    return torch.mul(softmax, scaled, out=narrow)


def _grad_with_entropy(
    logits: Tensor, normalised: bool, chosen: Tensor, scaled: Tensor, reached: Tensor, shift: Tensor
) -> Tensor:
    """[C, V]: p (log p · reached + shift) - onehot · scaled, all of them upstream gradients [C, 1] by -temperature."""
    log_softmax = logits if normalised else torch.log_softmax(logits, 1, dtype=scaled.dtype)
    softmax = log_softmax.exp()
    torch.addcmul(shift, log_softmax, reached, out=log_softmax)
    return softmax.mul_(log_softmax).scatter_add_(1, chosen, -scaled)


class WeightGradient:
    """Sum of gradᵀ hidden over chunks, accumulated in float32 whatever the factors' dtype."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.total = torch.zeros(weight.shape, dtype=wide_dtype(dtype), device=weight.device)

    def add(self, grad_logits: Tensor, states: Tensor) -> None:
        if grad_logits.dtype == self.total.dtype:
            add_weight_gradient(self.total, grad_logits, states)
        elif grad_logits.is_cuda:
            torch.addmm(self.total, grad_logits.T, states, out_dtype=self.total.dtype, out=self.total)
        else:
            self.total += grad_logits.T @ states


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits [C, V] by the temperature after a cast to float32, as samplers do. At 1.0 return them as they are. Wide
    logits are overwritten."""
    if temperature == 1.0:
        return logits
    # Not a 0-dim tensor: those do not take part in type promotion, so this divides and casts in one pass.
    divisor = torch.full((1, 1), temperature, dtype=wide_dtype(logits.dtype), device=logits.device)
    return logits.div_(divisor) if logits.dtype == divisor.dtype else logits / divisor


def masks_of(kept: KeptTokens | None, chunk_tokens: int) -> Iterable[KeptTokens | None]:
    """Yield the mask of each chunk of rows; None for each where the softmax is over the whole vocabulary."""
    return repeat(None) if kept is None else kept.split(chunk_tokens)


def rows_with_gradient(*gradients: Tensor | None) -> Tensor | None:
    """int64: rows that any of the gradients [T] reaches; None where there is none. Masked tokens cost no backward."""
    reached = [gradient != 0 for gradient in gradients if gradient is not None]
    if not reached:
        return None
    return (reached[0] if len(reached) == 1 else reached[0] | reached[1]).nonzero()[:, 0]
