"""Context parallelism: each rank holds an equal share of a packed microbatch's tokens; for attention they trade heads.

Before attention an all-to-all gives each rank all tokens of its share of the heads, and after it another one gives back all
heads of its share of the tokens (the scheme of arXiv:2309.14509), so attention itself knows nothing of the split.
Shapes: T tokens, C context ranks, S tokens of a rank with C·S >= T, H query heads, K key heads, D head dimension.
"""

from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from rlcore.spi import ContractError
from rlcore.torchkit.attention import PackedSequences, packed_attention
from rlcore.torchkit.logprobs import EntropyMode, HeadLogprobs, token_logprobs

CONTEXT_ATTENTION = "rlcore_context"
"""The name under which transformers knows attention over split tokens."""


@frozen(kw_only=True, eq=False)
class ContextPart:
    """This rank's tokens of a packed microbatch: `start` to `start + size`, of which those from T on are padding."""

    packed: PackedSequences
    """The whole microbatch, known on every context rank."""
    group: dist.ProcessGroup
    rank: int
    num_ranks: int
    size: int
    """S, equal on all context ranks."""

    @classmethod
    def of(cls, packed: PackedSequences, group: dist.ProcessGroup) -> "ContextPart":
        """The smallest equal parts."""
        num_ranks = group.size()
        size = -(-packed.num_tokens // num_ranks)
        return cls(packed=packed, group=group, rank=group.rank(), num_ranks=num_ranks, size=size)

    @property
    def start(self) -> int:
        return self.rank * self.size

    @property
    def num_padding(self) -> int:
        """Tokens that all parts together have beyond T."""
        return self.num_ranks * self.size - self.packed.num_tokens

    def split(self, values: Tensor) -> Tensor:
        """[..., S], this rank's part of [..., T], with zeros in place of what is beyond T."""
        return F.pad(values, (0, self.num_padding)).narrow(-1, self.start, self.size)

    def predicting(self) -> Tensor:
        """int64: this rank's tokens, counted from the microbatch's first, whose next token belongs to the same sequence."""
        lasts = self.packed.offsets[1:] - 1
        # Bounds are found on the host: nothing is read back from the device.
        begin, end = (
            min(place, self.packed.num_tokens) - int(lasts.searchsorted(place))
            for place in (self.start, self.start + self.size)
        )
        return self.packed.predicting[begin:end]

    def gather(self, values: Tensor) -> Tensor:
        """[..., C·S] from every rank's part [..., S]; a gradient reaches this rank's part alone.

        Every context rank computes the same loss from the whole, so the gradients of the parts add up to the loss's.
        """
        parts = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(parts, values.detach().contiguous(), group=self.group)
        parts[self.rank] = values
        return torch.cat(parts, -1)

    def to_heads(self, states: Tensor) -> Tensor:
        """[T, H/C, D], all tokens of this rank's heads, from all heads of this rank's tokens [S, C, H/C, D]."""
        sent = states.transpose(0, 1).contiguous()
        return _exchange(sent, self.group).flatten(0, 1)[: self.packed.num_tokens]

    def to_tokens(self, states: Tensor) -> Tensor:
        """[1, S, H, D], all heads of this rank's tokens, from all tokens of this rank's heads [T, H/C, D]."""
        sent = F.pad(states, (0, 0, 0, 0, 0, self.num_padding)).contiguous()
        sent = sent.view(self.num_ranks, self.size, *states.shape[1:])
        heads = _exchange(sent, self.group).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return heads.view(1, self.size, -1, states.shape[-1])


def _exchange(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[C, ...]: what each rank has sent to this one, where row c of `states`, contiguous, goes to rank c."""
    return all_to_all_single_autograd(states, None, None, group)


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
    num_ranks, num_key_heads = context.num_ranks, key.shape[1]
    check_heads(query.shape[1], num_key_heads, num_ranks)
    repeats = lcm(num_key_heads, num_ranks) // num_key_heads
    states = []
    for heads, times in ((query, 1), (key, repeats), (value, repeats)):
        tokens = heads[0].transpose(0, 1).to(value.dtype)
        tokens = tokens if times == 1 else tokens.repeat_interleave(times, 1)
        states.append(tokens.reshape(context.size, num_ranks, -1, tokens.shape[-1]))
    exchanged = context.to_heads(torch.cat(states, 2)).transpose(0, 1)[None]
    queries, keys, values = torch.split(exchanged, [state.shape[2] for state in states], 1)
    output, _ = packed_attention(module, queries, keys, values, attention_mask, **options)
    return context.to_tokens(output[0]), None


def check_heads(num_heads: int, num_key_heads: int, num_ranks: int) -> None:
    """ContractError unless the ranks can share the query heads equally."""
    if num_heads % num_ranks or num_heads % num_key_heads:
        expected = f"a multiple of the {num_key_heads} key heads and of the {num_ranks} context ranks"
        raise ContractError(f"context attention: found {num_heads} query heads; expected {expected}")


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
    return hidden[0]


def patch_context(model: Any, group: dist.ProcessGroup, head: HeadLogprobs | None = None) -> None:
    """Let a model that went through `patch_head` compute a share of the tokens on each rank of `group`.

    Its forward returns the log-probabilities and entropies of the whole microbatch on every rank; the gradients are those of
    this rank's tokens, to be summed over the ranks. `head` takes the place of `token_logprobs` with the head's weight.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
    model.set_attn_implementation(CONTEXT_ATTENTION)
    model.forward = partial(_policy_forward, model, group, head or partial(_own_head, model.get_output_embeddings()))


def _own_head(
    head: Any, hidden: Tensor, targets: Tensor, *, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    return token_logprobs(hidden, head.weight, targets, temperature=temperature, entropy=entropy)


def _policy_forward(
    model: nn.Module,
    group: dist.ProcessGroup,
    compute: HeadLogprobs,
    input_ids: Tensor,
    packed: PackedSequences,
    temperature: float,
    entropy: EntropyMode,
) -> tuple[Tensor, Tensor | None]:
    part = ContextPart.of(packed, group)
    hidden = context_forward(model, input_ids, part)
    predicting = part.predicting()
    targets = input_ids.index_select(0, predicting + 1).long()
    within = predicting - part.start
    logprobs, entropies = compute(hidden.index_select(0, within), targets, temperature=temperature, entropy=entropy)
    found = [logprobs] if entropies is None else [logprobs, entropies]
    placed = [values.new_zeros(part.size).index_copy(0, within, values) for values in found]
    # A token's figures come from the hidden state before it. Padding copies: FSDP wants no views.
    whole = [F.pad(values, (1, -1 - part.num_padding)) for values in part.gather(torch.stack(placed))]
    return whole[0], None if entropies is None else whole[1]
