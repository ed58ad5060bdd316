"""The experts that vLLM reports for tokens, as a result has them.

Shapes: T tokens of a sample with its prompt, L layers, K experts of a token.
"""

from collections.abc import Sequence

import numpy as np

from rlcore.spi import ContractError, FinishReason
from rlcore.spi.arrays import AnyArray, Int16Array
from rlcore_torchkit.generation import FinishedSample


def reported_experts(rows: Sequence[AnyArray], num_tokens: int) -> Int16Array:
    """int16 [T, L, K] from what came with a request's outputs, each [some tokens, L, K]; L and K are 0 where nothing came.

    vLLM's buffers hold zeros in layers without experts and for tokens that were not seen: that the same expert comes twice
    tells these apart, as no router chooses so. Versions 0.26 to 0.32 report the prompt with the first output, cached or not,
    and with each later one the token fed for it, so that the last token of a sample is in none.
    """
    reported = np.concatenate(rows) if rows else np.zeros((0, 0, 0), np.int16)
    experts = np.full((num_tokens, *reported.shape[1:]), -1, np.int16)
    seen = min(len(reported), num_tokens)
    experts[:seen] = reported[:seen]
    if experts.shape[2] > 1:
        experts[experts[..., 0] == experts[..., 1]] = -1
    return experts


def require_experts(samples: Sequence[FinishedSample]) -> None:
    """ContractError where vLLM reported no experts of a sample that finished."""
    for sample in samples:
        experts = sample.routed_experts
        if experts is not None and sample.finish_reason != FinishReason.ABORTED and not (experts[:1] >= 0).any():
            raise ContractError(
                f"generate: vLLM reports no experts for sample {sample.number}; expected those of every token. Its kernel for "
                "experts may choose them out of vLLM's sight: name another one in [generator.vllm.engine], such as "
                'moe_backend = "triton", or set rollout.replay_routing to false'
            )
