"""How TransformerEngine multiplies by the experts of a layer."""

import os

VARIABLE = "NVTE_USE_CUTLASS_GROUPED_GEMM"


def multiply_by_all_experts_at_once(capability: tuple[int, int]) -> None:
    """On Hopper let one kernel multiply by all experts of a layer, forward and for the gradients of their inputs.

    TransformerEngine launches one for each of them otherwise, and the host is too slow for that. A variable that is set is
    left as it is.
    """
    if capability == (9, 0):
        os.environ.setdefault(VARIABLE, "1")
