"""Context parallelism for transformers' models: each rank holds an equal share of a packed microbatch's tokens.

Shapes: T tokens, C context ranks, S tokens of a rank with C·S >= T, H query heads, K key heads, D head dimension.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.spi import ContractError
from rlcore_torchkit.forward.context_parallel import ContextPart, exchanged_attention, part_logprobs, part_values
from rlcore_torchkit.head.logprobs import EntropyMode, HeadLogprobs, own_head
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.head.values import shared_by, token_values
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import packed_attention

CONTEXT_ATTENTION = "rlcore_context"
"""The name under which transformers knows attention over split tokens."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler sees nothing to gain in collectives and a fused kernel
def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: ContextPart | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` over tokens that are split over ranks, in the form that transformers' models call.

    query [1, H, S, D], key and value [1, K, S, D]; returns [1, S, H, D]. H must be divisible by C and by K; keys are repeated
    until C divides them.
    """
    if context is None:
        raise ContractError("context attention: found no `context` argument; expected a call through context_forward")

    def attend(*states: Tensor) -> Tensor:
        output, _ = packed_attention(module, *(heads.transpose(0, 1)[None] for heads in states), attention_mask, **options)
        return output[0]

    tokens = [heads.squeeze(0).transpose(0, 1).to(value.dtype) for heads in (query, key, value)]
    return exchanged_attention(*tokens, context, attend)[None], None


def context_forward(model: nn.Module, tokens: Tensor, part: ContextPart) -> Tensor:
    """Hidden states after the final norm: [S, hidden], of this rank's part of `tokens`, int32 or int64 [T].

    What a decoder returns beyond S, as tensor parallelism pads, is left there.
    """
    packed = part.packed
    if tokens.shape != (packed.num_tokens,):
        raise ContractError(f"tokens: found shape {list(tokens.shape)}; expected [{packed.num_tokens}], as the offsets say")
    decoder: Any = model.base_model
    inputs = {"input_ids": part.split(tokens[None]), "position_ids": part.split(packed.position_ids)}
    output = decoder(**inputs, use_cache=False, packed=packed, context=part)
    hidden: Tensor = output.last_hidden_state
    return hidden.squeeze(0)


def patch_context(model: Any, group: dist.ProcessGroup, head: HeadLogprobs | None = None) -> None:
    """Let a model that went through `patch_head` compute a share of the tokens on each rank of `group`.

    Its forward returns the log-probabilities and entropies of the whole microbatch on every rank; the gradients are those of
    this rank's tokens, to be summed over the ranks. `head` takes the place of `token_logprobs` with the head's weight.
    """
    _attend(model)
    model.forward = partial(_policy_forward, model, group, head or own_head(model))


def patch_context_values(model: Any, group: dist.ProcessGroup, num_ranks: int) -> None:
    """As `patch_context`, of a model that went through `patch_value_head` with so many tensor ranks."""
    _attend(model)
    model.forward = partial(_value_forward, model, group, num_ranks)


def _attend(model: Any) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
    model.set_attn_implementation(CONTEXT_ATTENTION)


def _policy_forward(
    model: nn.Module,
    group: dist.ProcessGroup,
    compute: HeadLogprobs,
    input_ids: Tensor,
    packed: PackedSequences,
    temperature: float,
    entropy: EntropyMode,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    part = ContextPart.of(packed, group)
    hidden = context_forward(model, input_ids, part)
    return part_logprobs(hidden, input_ids, part, compute, temperature=temperature, entropy=entropy, kept=kept)


def _value_forward(model: Any, group: dist.ProcessGroup, num_ranks: int, input_ids: Tensor, packed: PackedSequences) -> Tensor:
    part = ContextPart.of(packed, group)
    hidden = shared_by(context_forward(model, input_ids, part)[: part.size], num_ranks)
    return part_values(token_values(hidden, model.score.weight), part)
