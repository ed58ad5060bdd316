"""Tokens of a packed microbatch that several ranks share: each holds an equal part of them, and for attention they trade heads.

Before attention an all-to-all gives each rank all tokens of its share of the heads, and after it another one gives back all
heads of its share of the tokens (the scheme of arXiv:2309.14509), so attention itself knows nothing of the split.
Shapes: T tokens, C context ranks, S tokens of a rank with C·S >= T, H query heads, K key heads, D head dimension.
"""

from collections.abc import Callable
from math import lcm

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from rlcore.spi.errors import ContractError
from rlcore_torchkit.head.logprobs import EntropyMode, HeadLogprobs
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.layers.attention import PackedSequences


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
    def of(cls, packed: PackedSequences, group: dist.ProcessGroup, multiple: int = 1) -> "ContextPart":
        """The smallest equal parts whose size is a multiple of so many."""
        num_ranks = group.size()
        size = -(-packed.num_tokens // (num_ranks * multiple)) * multiple
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
        if self.num_ranks == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.num_ranks)]
        dist.all_gather(parts, values.detach().contiguous(), group=self.group)
        parts[self.rank] = values
        return torch.cat(parts, -1)

    def own_heads(self, values: Tensor) -> Tensor:
        """[H/C], of the heads whose attention this rank computes, from one value for each head [H]."""
        return values.chunk(self.num_ranks)[dist.get_rank(self.group)] if self.num_ranks > 1 else values

    def to_heads(self, states: Tensor) -> Tensor:
        """[T, ...], all tokens of this rank's heads, from all ranks' heads of this rank's tokens [S, C, ...]."""
        sent = states.transpose(0, 1).contiguous()
        return _exchange(sent, self.group).flatten(0, 1)[: self.packed.num_tokens]

    def to_tokens(self, states: Tensor) -> Tensor:
        """[S, H, D], all heads of this rank's tokens, from all tokens of this rank's heads [T, H/C, D]."""
        sent = F.pad(states, (0, 0, 0, 0, 0, self.num_padding)).contiguous()
        sent = sent.view(self.num_ranks, self.size, *states.shape[1:])
        heads = _exchange(sent, self.group).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return heads.view(self.size, -1, states.shape[-1])


def exchanged_attention(
    query: Tensor, key: Tensor, value: Tensor, part: ContextPart, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """[S, H, V] from query [S, H, D], key [S, K, D] and value [S, K, V], of this rank's tokens.

    `attend` gets query [T, H/C, D], key [T, K'/C, D] and value [T, K'/C, V], and returns [T, H/C, V]. H must be divisible by C
    and by K; keys are repeated until C divides their number K'.
    """
    num_ranks, num_kv_heads = part.num_ranks, key.shape[1]
    if num_ranks == 1 and not part.num_padding:
        return attend(query, key, value)  # cutting and padding would copy, and their gradients once more
    if num_ranks == 1:
        output = attend(*(states[: part.packed.num_tokens] for states in (query, key, value)))
        return F.pad(output, (0, 0, 0, 0, 0, part.num_padding))
    check_heads(query.shape[1], num_kv_heads, num_ranks)
    repeats = lcm(num_kv_heads, num_ranks) // num_kv_heads
    states, widths = [], (query.shape[-1], key.shape[-1], value.shape[-1])
    for heads, times in ((query, 1), (key, repeats), (value, repeats)):
        repeated = heads if times == 1 else heads.repeat_interleave(times, 1)
        states.append(repeated.reshape(part.size, num_ranks, -1))
    exchanged = torch.split(part.to_heads(torch.cat(states, 2)), [state.shape[2] for state in states], 1)
    queries, keys, values = (rows.reshape(len(rows), -1, width) for rows, width in zip(exchanged, widths, strict=True))
    return part.to_tokens(attend(queries, keys, values))


def part_logprobs(
    hidden: Tensor,
    tokens: Tensor,
    part: ContextPart,
    compute: HeadLogprobs,
    *,
    temperature: float,
    entropy: EntropyMode,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `packed_logprobs`, of the whole microbatch on every rank, from the hidden states [S or more, hidden] of its tokens.

    `tokens`, int32 or int64 [T], and `kept`, of T rows, are the whole microbatch's. The gradients are those of this rank's
    tokens, to be summed over the ranks.
    """
    predicting = part.predicting()
    targets = tokens.index_select(0, predicting + 1).long()
    within = predicting - part.start
    chosen = None if kept is None else kept.select(predicting + 1)
    states = hidden.index_select(0, within)
    logprobs, entropies = compute(states, targets=targets, temperature=temperature, entropy=entropy, kept=chosen)
    found = [logprobs] if entropies is None else [logprobs, entropies]
    placed = [values.new_zeros(part.size).index_copy(0, within, values) for values in found]
    # A token's figures come from the hidden state before it. Padding copies: FSDP wants no views.
    whole = [F.pad(values, (1, -1 - part.num_padding)) for values in part.gather(torch.stack(placed))]
    return whole[0], None if entropies is None else whole[1]


def part_values(values: Tensor, part: ContextPart) -> Tensor:
    """[T]: the values of the whole microbatch on every rank, from those of this rank's tokens [S]; gradients as of
    `part_logprobs`."""
    return F.pad(part.gather(values), (0, -part.num_padding))


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """ContractError unless the ranks can share the query heads equally."""
    if num_heads % num_ranks or num_heads % num_kv_heads:
        expected = f"a multiple of the {num_kv_heads} key heads and of the {num_ranks} context ranks"
        raise ContractError(f"context attention: found {num_heads} query heads; expected {expected}")


def _exchange(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[C, ...]: what each rank has sent to this one, where row c of `states`, contiguous, goes to rank c."""
    return all_to_all_single_autograd(states, None, None, group)
