"""Log-probabilities of given tokens, and values after them, without a gradient."""

import numpy as np
import torch
from attrs import evolve
from torch import Tensor, nn

from rlcore.spi import LogprobsRequest, ValuesRequest
from rlcore.spi.arrays import Float32Array
from rlcore_fsdp2.routing_replay import ModelReplay
from rlcore_fsdp2.sharding import reshard
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.head.values import packed_values
from rlcore_torchkit.trainer.microbatch import move


@torch.no_grad()
def compute_logprobs(
    model: nn.Module, request: LogprobsRequest, device: torch.device, replay: ModelReplay
) -> tuple[tuple[Float32Array, ...], tuple[Float32Array, ...] | None]:
    """float32 or float64 [T] for each microbatch, and the entropies or None; read back from the device once all are queued.
    `replay` is the policy's, and of no effect on another model."""
    mode = "metric" if request.entropy else "none"
    logprobs, entropies = [], []
    for batch in request.microbatches:
        microbatch = move(batch, device, ())
        if request.model == "reference":  # which routes itself, and with adapters is the policy's own model
            microbatch = evolve(microbatch, token_columns={})
        replay.use(microbatch)
        values, entropy = packed_logprobs(
            model,
            microbatch.tokens,
            microbatch.packed,
            temperature=request.temperature,
            entropy=mode,
            kept=microbatch.kept,
            images=microbatch.images,
        )
        logprobs.append(values)
        entropies.append(entropy)
    reshard(model)
    lengths = [batch.num_tokens for batch in request.microbatches]
    return _to_host(logprobs, lengths), _to_host(entropies, lengths) if request.entropy else None


@torch.no_grad()
def compute_values(
    model: nn.Module, request: ValuesRequest, device: torch.device, replay: ModelReplay
) -> tuple[Float32Array, ...]:
    """float32 [T] for each microbatch, of a model with a head of values, as `compute_logprobs`."""
    values = []
    for batch in request.microbatches:
        microbatch = move(batch, device, ())
        replay.use(microbatch)
        values.append(packed_values(model, microbatch.tokens, microbatch.packed))
    reshard(model)
    return _to_host(values, [batch.num_tokens for batch in request.microbatches])


def _to_host(values: list[Tensor], lengths: list[int]) -> tuple[Float32Array, ...]:
    if not values:
        return ()
    return tuple(np.split(torch.cat(values).cpu().numpy(), np.cumsum(lengths)[:-1]))
