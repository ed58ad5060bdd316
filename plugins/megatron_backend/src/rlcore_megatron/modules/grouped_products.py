"""TransformerEngine's products by the experts of a layer."""

import os

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

VARIABLE = "NVTE_USE_CUTLASS_GROUPED_GEMM"


def multiply_by_all_experts_at_once(capability: tuple[int, int]) -> None:
    """On Hopper let one kernel multiply by all experts of a layer, forward and for the gradients of their inputs.

    TransformerEngine launches one for each of them otherwise, and the host is too slow for that. A variable that is set is
    left as it is.
    """
    if capability == (9, 0):
        os.environ.setdefault(VARIABLE, "1")


class GroupedExperts(TEGroupedMLP):  # type: ignore[misc]
    """Megatron's experts in one grouped product, which also runs on a rank without tokens.

    The kernel of `multiply_by_all_experts_at_once` reads the first of its products, and crashes where there is none.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs, [T, H], and their bias; states are [T, H], counts int64 [E], probabilities [T]."""
        if len(permuted_local_hidden_states):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[no-any-return]
        # One token of zeros adds zeros to every gradient. Its output is dropped.
        states = torch.cat((permuted_local_hidden_states, permuted_local_hidden_states.new_zeros(1, self.input_size)))
        counts = tokens_per_expert.clone()
        counts[0] = 1
        output, bias = super().forward(states, counts, torch.cat((permuted_probs, permuted_probs.new_zeros(1))))
        return output[:0], bias
