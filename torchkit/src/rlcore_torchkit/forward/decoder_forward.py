"""Log-probabilities by transformers' own classes, for decoders that no family describes.

Shapes: T tokens of N sequences, L tokens of the longest, R rows of hidden states, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlcore.spi.errors import ContractError
from rlcore_torchkit.architectures.decoders import has_states, head_scale, logit_cap
from rlcore_torchkit.head.logprobs import Decode, EntropyMode, HeadLogprobs, own_head, patch_head
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.head.softmax_chunks import chunk_rows, masks_of, wide_dtype
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION, Attention


def patch_decoder(model: Any, decode: Decode | None = None) -> None:
    """Make a transformers causal language model return `packed_logprobs` from its forward. `decode` takes the place of what
    computes hidden states: `own_forward`, unless the model was loaded with PACKED_ATTENTION."""
    patch_head(model, decoder_head(model), decode or _decode_of(model))


def decoder_head(model: Any) -> HeadLogprobs:
    """Return what computes log-probabilities with a model's own head: its scale, cap and bias."""
    head, scale, cap = model.get_output_embeddings(), head_scale(model.config), logit_cap(model.config)
    if getattr(head, "bias", None) is not None:
        return partial(_stored_logits, model, scale, cap)
    compute = own_head(model, cap)
    return compute if scale == 1.0 else partial(_scaled, compute, scale)


def _decode_of(model: Any) -> Decode:
    if has_own_attention(model):
        return own_forward
    return padded_forward if has_states(model) else general_forward


def has_own_attention(model: Any) -> bool:
    """Return whether a transformers model computes attention by its class's own code, which knows of no packed sequences."""
    return bool(model.config._attn_implementation != PACKED_ATTENTION)


def use_own_attention(model: Any) -> None:
    """Make a transformers model compute by its class's own attention and masks."""
    model.set_attn_implementation("eager")
    model.config.update({"_attn_implementation": "eager"})  # of a class that ignores the call


def use_own_logits(model: Any) -> None:
    """Make a transformers model compute logits by its class's own code, all of them in memory."""
    patch_head(model, partial(_stored_logits, None, 1.0, None), _own_logits)


def decoder_of(model: Any) -> Any:
    """Return the part of a transformers causal language model that computes hidden states."""
    if model.base_model is not model:
        return model.base_model
    embedding = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embedding for module in child.modules()))


def vocabulary_size(model: Any) -> int:
    """Return how many tokens a transformers causal language model both reads and predicts: its embedding may be padded, its
    head not."""
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    return min(int(table.weight.shape[0]) for table in tables if table is not None)


def general_forward(model: Any, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, H] after the final norm; `tokens`, int32 or int64 [T], are one row whose sequences see themselves."""
    hidden = decode_rows(model, tokens[None], packed.position_ids, packed)
    return hidden.squeeze(0)


def padded_forward(model: Any, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, H] by a row of L tokens for each sequence, padded on the right.

    What layers hand from token to token then begins anew with each row, and no token sees the padding behind it.
    """
    return _by_rows(lambda rows: decode_rows(model, rows, *bounds_of_rows(rows)), tokens, packed)


def bounds_of_rows(rows: Tensor) -> tuple[Tensor, PackedSequences]:
    """Positions [N, L], and the bounds of N sequences of L tokens."""
    count, length = rows.shape
    offsets = np.arange(count + 1, dtype=np.int64) * length
    return torch.arange(length, device=rows.device).expand(count, length), PackedSequences.from_offsets(offsets, rows.device)


def own_forward(model: Any, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, H] by a row of L tokens for each sequence, as `padded_forward`, with the class's own attention, masks
    and positions."""
    return _by_rows(lambda rows: decoder_of(model).forward(input_ids=rows, use_cache=False).last_hidden_state, tokens, packed)


def _own_logits(model: Any, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Logits [T, V], as `own_forward`, `padded_forward` or `general_forward` compute hidden states."""

    def compute(rows: Tensor, *bounds: Any) -> Tensor:
        named = dict(zip(("position_ids", "packed"), bounds, strict=False))
        logits: Tensor = type(model).forward(model, input_ids=rows, use_cache=False, **named).logits
        return logits

    if has_own_attention(model):
        return _by_rows(compute, tokens, packed)
    if has_states(model):
        return _by_rows(lambda rows: compute(rows, *bounds_of_rows(rows)), tokens, packed)
    return compute(tokens[None], packed.position_ids, packed).squeeze(0)


def _by_rows(compute: Callable[[Tensor], Tensor], tokens: Tensor, packed: PackedSequences) -> Tensor:
    """[T, H or V]: what `compute` makes of rows of tokens, one for each sequence, its last token repeated as padding.

    Sequences of similar length are computed together, so that padding is a small share of the rows. Ranks compute all at once:
    they gather weights together, and so have to call layers equally often.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        gather, real = padded_rows(packed)
        rows = tokens[gather]
        return _checked(compute(rows), rows).flatten(0, 1).index_select(0, real)
    if packed.plan is None:
        rows = tokens.view(packed.num_sequences, packed.max_length)
        return _checked(compute(rows), rows).flatten(0, 1)
    groups = [tokens.index_select(0, bucket.gather).view(-1, bucket.length) for bucket in packed.plan.buckets]
    return torch.cat([_checked(compute(rows), rows).flatten(0, 1) for rows in groups]).index_select(0, packed.plan.restore)


def padded_rows(packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """int64 [N, L]: the packed token at each place of a row for each sequence, its last token repeated as padding; and int64
    [T]: the place of each packed token in the rows one after another. Both on the device."""
    lengths, within = np.diff(packed.offsets), np.arange(packed.max_length)
    gather = packed.offsets[:-1, None] + np.minimum(within, lengths[:, None] - 1)
    real = np.flatnonzero(within < lengths[:, None])
    return torch.from_numpy(gather).to(packed.device), torch.from_numpy(real).to(packed.device)


def decode_rows(model: Any, rows: Tensor, positions: Tensor, packed: PackedSequences | Attention, **inputs: Any) -> Tensor:
    """Hidden states [rows, length, H] of rows of tokens after the final norm; `inputs` are what the model's class takes
    besides."""
    # Not the module's call, which vLLM replaces in classes of transformers that its engines in this process compute with.
    output = decoder_of(model).forward(input_ids=rows, position_ids=positions, use_cache=False, packed=packed, **inputs)
    return _checked(output.last_hidden_state, rows)


def _checked(hidden: Tensor, rows: Tensor) -> Tensor:
    if hidden.shape[:2] != rows.shape:
        raise ContractError(f"decoder: found hidden states {list(hidden.shape)}; expected {list(rows.shape)} of them")
    return hidden


def _scaled(compute: HeadLogprobs, scale: float, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return compute(hidden * scale, **options)


def _stored_logits(
    model: Any | None,
    scale: float,
    cap: float | None,
    hidden: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    entropy: EntropyMode,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """HeadLogprobs [R] of a head with a bias: some rows of logits at a time, computed again for the backward. Without a model
    `hidden` are logits."""
    head: Any = nn.Identity() if model is None else model.get_output_embeddings()
    chunk = chunk_rows(hidden.device.type, hidden.shape[1] if model is None else head.weight.shape[0])
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
