"""Logits in float32, as trainer and generator compute them where both are to get the same bits."""

from torch import Tensor


def float32_logits(states: Tensor, head: Tensor) -> Tensor:
    """float32 [C, V] from states [C, H] and head [V, H]; on CUDA each row is the same whatever rows are beside it."""
    if states.is_cuda:
        from rlcore_torchkit.head.head_kernels import product

        return product(states, head)
    return states.float() @ head.float().T
