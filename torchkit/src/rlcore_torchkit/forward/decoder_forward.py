"""Log-probabilities by transformers' own classes, for decoders that no family describes.

Shapes: T tokens of N sequences, L tokens of the longest, R rows of hidden states, H hidden size, V vocabulary.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlcore.spi.errors import ContractError
from rlcore_torchkit.architectures.decoders import has_states, head_scale
from rlcore_torchkit.head.logprobs import Decode, EntropyMode, HeadLogprobs, own_head, patch_head
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.head.softmax_chunks import chunk_rows, masks_of, wide_dtype
from rlcore_torchkit.layers.attention import PackedSequences


def patch_decoder(model: Any, decode: Decode | None = None) -> None:
    """Make a transformers causal language model, loaded with PACKED_ATTENTION, return `packed_logprobs` from its forward.
    `decode` takes the place of what computes hidden states."""
    config, head, scale = model.config, model.get_output_embeddings(), head_scale(model.config)
    cap = getattr(config, "final_logit_softcapping", None) or None
    compute: HeadLogprobs = own_head(model, cap)
    if scale != 1.0:
        compute = partial(_scaled, compute, scale)
    if getattr(head, "bias", None) is not None:
        compute = partial(_stored_logits, model, scale, cap)
    patch_head(model, compute, decode or (padded_forward if has_states(model) else general_forward))


def general_forward(model: Any, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, H] after the final norm; `tokens`, int32 or int64 [T], are one row whose sequences see themselves."""
    hidden = decode_rows(model, tokens[None], packed.position_ids, packed)
    return hidden.squeeze(0)


def padded_forward(model: Any, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, H] by a row of L tokens for each sequence, padded on the right.

    What layers hand from token to token then begins anew with each row, and no token sees the padding behind it.
    """
    count, length = packed.num_sequences, packed.max_length
    lengths = np.diff(packed.offsets)
    within = np.arange(length)
    gather = packed.offsets[:-1, None] + np.minimum(within, lengths[:, None] - 1)
    real = np.flatnonzero(within < lengths[:, None])
    rows = tokens[torch.from_numpy(gather).to(tokens.device)]
    positions = torch.arange(length, device=tokens.device).expand(count, length)
    padded = PackedSequences.from_offsets(np.arange(count + 1, dtype=np.int64) * length, tokens.device)
    hidden = decode_rows(model, rows, positions, padded)
    return hidden.flatten(0, 1).index_select(0, torch.from_numpy(real).to(tokens.device))


def decode_rows(model: Any, rows: Tensor, positions: Tensor, packed: PackedSequences, **inputs: Any) -> Tensor:
    """Hidden states [rows, length, H] of rows of tokens after the final norm; `inputs` are what the model's class takes
    besides."""
    # Not the module's call, which vLLM replaces in classes of transformers that its engines in this process compute with.
    output = model.base_model.forward(input_ids=rows, position_ids=positions, use_cache=False, packed=packed, **inputs)
    hidden: Tensor = output.last_hidden_state
    if hidden.shape[:2] != rows.shape:
        raise ContractError(f"decoder: found hidden states {list(hidden.shape)}; expected {list(rows.shape)} of them")
    return hidden


def _scaled(compute: HeadLogprobs, scale: float, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return compute(hidden * scale, **options)


def _stored_logits(
    model: Any,
    scale: float,
    cap: float | None,
    hidden: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    entropy: EntropyMode,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """HeadLogprobs [R] of a head with a bias: some rows of logits at a time, computed again for the backward."""
    head = model.get_output_embeddings()
    chunk = chunk_rows(hidden.device.type, head.weight.shape[0])
    parts = [
        checkpoint(_chunk, head, scale, cap, temperature, states, chosen, mask, use_reentrant=False)
        for states, chosen, mask in zip(
            torch.split(hidden, chunk), torch.split(targets, chunk), masks_of(kept, chunk), strict=False
        )
    ]
    logprobs, entropies = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return logprobs, None if entropy == "none" else entropies if entropy == "loss" else entropies.detach()


def _chunk(
    head: nn.Module,
    scale: float,
    cap: float | None,
    temperature: float,
    states: Tensor,
    chosen: Tensor,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of some rows, in float32 or wider; cap · tanh(logits / cap) is of arXiv:2408.00118, 2."""
    logits = head(states)
    logits = logits.to(wide_dtype(logits.dtype)) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if kept is not None:
        logits = kept.mask_(logits)
    log_softmax = (logits / temperature).log_softmax(1)
    return log_softmax.gather(1, chosen[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)
