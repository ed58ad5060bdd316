"""A Qwen3 in Megatron whose layers compute by the kernels of a batch-invariant engine.

Modules keep their names, parameters and places. Tensor ranks add their products in the order of ranks, and each computes the
softmax over the whole vocabulary, so that log-probabilities are the same bits on one rank and on several.

Shapes: S tokens, K and N sides of a matrix, V rows of the head, W of them on this rank.
"""

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from rlcore.spi import ContractError
from rlcore_megatron.modules.attention import PackedAttention
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_megatron.modules.rms_norm import PlainRMSNorm
from rlcore_torchkit.head.float32_logits import scaled_logits
from rlcore_torchkit.head.logprobs import HeadLogprobs, token_logprobs
from rlcore_torchkit.layers.invariant_layers import RotaryTable, linear, rms_norm, rotated_attention, silu_and_multiply


def use_invariant_kernels(decoder: Any, hf: Any, parts: int) -> None:
    """Let the layers and the last norm of a Qwen3 compute by `invariant_kernels`, as engines of `parts` ranks do. `hf` is the
    transformers config. ContractError where Megatron's layers have other parts."""
    table = RotaryTable(hf)
    kinds = {
        ColumnParallelLinear: InvariantColumns,
        RowParallelLinear: InvariantRows,
        PlainRMSNorm: InvariantNorm,
        MLP: InvariantMlp,
        PackedAttention: InvariantAttention,
    }
    for module in decoder.modules():
        module.__class__ = kinds.get(type(module), type(module))
        if isinstance(module, InvariantAttention):
            module.table = table
        if isinstance(module, InvariantRows):
            module.parts = parts // module.tp_group.size()
    for layer in decoder.layers:
        found = {type(module) for module in layer.modules()}
        if missing := [kind.__name__ for kind, own in kinds.items() if own not in found]:
            raise ContractError(
                f"batch_invariant: found a layer without {', '.join(missing)}; expected Megatron's local layers"
            )


def invariant_head(weight: Tensor, group: dist.ProcessGroup) -> HeadLogprobs:
    """Log-probabilities of the whole vocabulary on every rank, of which each has rows [W, H] of the head."""
    if group.size() > 1:
        apply: Any = _WholeRows.apply
        weight = apply(weight, group)
    return partial(token_logprobs, weight=weight, scaled=scaled_logits)


class NoRotary(nn.Module):
    """The rotary embedding of layers whose attention turns queries and keys itself."""

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> None:
        """Return an argument of `forward`, which reads none."""

    def forward(self, *_: Any, **__: Any) -> None:
        """Return no angles, for which Megatron turns nothing."""


class InvariantColumns(ColumnParallelLinear):
    """[S, 1, N] from states [S, 1, K], N of all ranks' columns."""

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:  # noqa: ARG002
        """Return the product and no bias."""
        return linear(copy_to_tensor_model_parallel_region(input_, group=self.tp_group), self.weight), None


class InvariantRows(RowParallelLinear):
    """[S, 1, N] from states [S, 1, K], K of all ranks' rows, added in the order of ranks."""

    parts: int
    """The products that each rank adds."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Return the sum and no bias."""
        apply: Any = _SumOfRanks.apply
        return apply(linear(input_, self.weight, self.parts), self.tp_group), None


class InvariantNorm(PlainRMSNorm):
    """weight · x / √(mean x² + ε) over the last dimension."""

    def forward(self, states: Tensor) -> Tensor:
        """The norm of states [..., H], in their dtype."""
        assert self.eps is not None
        return rms_norm(states, self.weight, self.eps)


class InvariantMlp(MLP):
    """fc2(silu(gate) · up), with gate and up beside each other from fc1."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return the output [S, 1, H] and no bias."""
        output: tuple[Tensor, None] = self.linear_fc2(silu_and_multiply(self.linear_fc1(hidden_states)[0]))
        return output


class InvariantAttention(PackedAttention):
    """Attention of packed sequences, which turns queries and keys."""

    table: RotaryTable

    def _attend(self, batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert batch.part is not None
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        return rotated_attention(query, key, value, batch.part.packed, self.table, scale)


class _SumOfRanks(torch.autograd.Function):
    """The ranks' products, added in the order of ranks and rounded at each sum; every rank has the gradient of the sum."""

    @staticmethod
    def forward(_: Any, product: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce(add, gathered(product, group))

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _WholeRows(torch.autograd.Function):
    """[V, H] from this rank's [W, H]; each rank computes the gradient of all rows, and takes its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.first, ctx.number = group.rank() * len(weight), len(weight)
        return torch.cat(list(gathered(weight, group)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.first : ctx.first + ctx.number].contiguous(), None


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The tensors of all ranks, in their order."""
    if group.size() == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found
