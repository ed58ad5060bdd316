"""Multi-latent attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556; GLM-5).

The indexer has no gradient, as in transformers: its weights stay as they are. Each rank scores the queries of its own tokens,
and all ranks get what all have chosen. Shapes: S tokens of a rank, T of the microbatch, L of a sequence, K keys chosen for each
query, I heads of the indexer, of width D.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.spi import ContractError
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.modules.attention import PackedAttention
from rlcore_megatron.modules.latent_attention import LatentRotary
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_torchkit.architectures.dims import IndexerDims, LatentDims

NORM_EPSILON = 1e-6
"""The ε of the norm of an indexer's keys, as transformers takes it."""


@frozen(kw_only=True)
class Inputs:
    """What an indexer reads of a layer, without a gradient; of this tensor rank's tokens where these are divided."""

    hidden: Tensor
    """[S, 1, H] behind the layer's first norm."""
    batch: PackedBatch


class Indexer(nn.Module):
    """Chooses the keys of each query of a layer, in sequences with more tokens than that."""

    def __init__(
        self, config: TransformerConfig, latent: LatentDims, dims: IndexerDims, rotary: LatentRotary, *, interleaved: bool
    ) -> None:
        super().__init__()
        assert latent.query_rank is not None
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.wq_b = nn.Linear(latent.query_rank, dims.num_heads * dims.width, bias=False, **place)
        self.wk = nn.Linear(config.hidden_size, dims.width, bias=False, **place)
        self.k_norm = nn.LayerNorm(dims.width, eps=NORM_EPSILON, **place)
        self.weights_proj = nn.Linear(config.hidden_size, dims.num_heads, bias=False, **place)
        self.requires_grad_(False)
        self._dims, self._rotated, self._is_interleaved = dims, latent.rotary_width, interleaved
        self._rotary = [rotary]  # the model's: in a list, so that it is no module of this one
        self._inputs: Inputs | None = None

    def watch(self, attention: Any, layer_number: int) -> None:
        """Choose in each forward pass of a layer's attention, once its narrow queries are there."""

        def take(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            hidden = arguments[0] if arguments else options["hidden_states"]
            self._inputs = Inputs(hidden=hidden.detach(), batch=options["packed_seq_params"])

        def choose(projection: Any, arguments: tuple[Any, ...]) -> None:
            assert self._inputs is not None
            batch, queries = self._inputs.batch, arguments[0].detach()
            if hasattr(projection, "layer_norm_weight"):  # TransformerEngine's, which has the norm before it within it
                queries = F.rms_norm(queries, queries.shape[-1:], projection.layer_norm_weight, projection.eps)
            batch.selected[layer_number] = self._chosen(queries, self._inputs.hidden, batch, attention)
            self._inputs = None

        attention.register_forward_pre_hook(take, with_kwargs=True)
        attention.linear_q_up_proj.register_forward_pre_hook(choose)

    @torch.no_grad()
    def _chosen(self, queries: Tensor, hidden: Tensor, batch: PackedBatch, attention: Any) -> Tensor | None:
        """int32 [T, K], counted from the first token of the query's sequence; None where all sequences are as short as that."""
        part = batch.part
        assert part is not None
        if part.packed.max_length <= self._dims.num_chosen:
            return None
        queries, hidden = queries.flatten(0, -2), hidden.flatten(0, -2)
        groups = [part.group] if part.num_ranks > 1 else []
        first = part.start
        angles, scale = self._rotary[0](batch)
        if attention.config.sequence_parallel:
            tensor = attention.pg_collection.tp
            groups.insert(0, tensor)
            first += tensor.rank() * len(queries)
            angles = angles.chunk(tensor.size())[tensor.rank()]
        cosines, sines = angles.cos() * scale, angles.sin() * scale
        of_queries = self._turned(self.wq_b(queries).unflatten(-1, (-1, self._dims.width)), cosines, sines)
        of_keys = self._turned(self.k_norm(self.wk(hidden))[:, None], cosines, sines)[:, 0]
        weights = self.weights_proj(hidden).float() * self._dims.num_heads**-0.5
        keys, found = _gathered(of_keys, groups), []
        for begin, end in pairwise(part.packed.offsets.tolist()):
            rows = slice(max(begin - first, 0), max(min(end - first, len(queries)), 0))
            if rows.start < rows.stop:
                places = torch.arange(rows.start, rows.stop, device=keys.device) + first - begin
                found.append(self._best(of_queries[rows], keys[begin:end], weights[rows], places))
        chosen = torch.cat(found) if found else keys.new_zeros(0, self._dims.num_chosen, dtype=torch.int32)
        return _gathered(F.pad(chosen, (0, 0, 0, len(queries) - len(chosen))), groups)[: part.packed.num_tokens]

    def _best(self, queries: Tensor, keys: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """int32 [rows, K] of queries [rows, I, D] of a sequence, at these places, with keys [L, D] and weights [rows, I]."""
        if len(keys) <= self._dims.num_chosen:
            return keys.new_zeros(len(queries), self._dims.num_chosen, dtype=torch.int32)  # unread: all keys are chosen
        scores = F.relu(torch.einsum("thd,sd->ths", queries.float(), keys.float()) * self._dims.width**-0.5)
        weighed = torch.einsum("th,ths->ts", weights, scores)
        later = torch.arange(len(keys), device=keys.device) > places[:, None]
        return weighed.masked_fill(later, -torch.inf).topk(self._dims.num_chosen, -1).indices.int()

    def _turned(self, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """States [S, heads, D] with their first elements rotated, half by half or neighbours with each other."""
        rotated, plain = states.split([self._rotated, states.shape[-1] - self._rotated], -1)
        half = self._rotated // 2
        cosines, sines = cosines[..., :half].type_as(states), sines[..., :half].type_as(states)
        if self._is_interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated.split(half, -1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines, plain], -1)


def _gathered(values: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """[ranks · S, ...] from each rank's [S, ...], of one group after the other."""
    for group in groups:
        everyones = values.new_empty(group.size() * len(values), *values.shape[1:])
        dist.all_gather_into_tensor(everyones, values.contiguous(), group=group)
        values = everyones
    return values


class SparseAttention(PackedAttention):
    """Attention to the keys that the layer's indexer has chosen, or the last layer before it that has one."""

    def __init__(self, config: TransformerConfig, *arguments: Any, family: MegatronFamily, **options: Any) -> None:
        super().__init__(config, *arguments, family=family, **options)
        own = family.indexed[: self._layer_number]
        self._source = max(number for number, has_indexer in enumerate(own, 1) if has_indexer)

    def _attend(self, batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._source not in batch.selected:
            raise ContractError(f"layer {self._layer_number}: found no keys of layer {self._source}; expected it on this stage")
        chosen = batch.selected[self._source]
        if chosen is None:
            return super()._attend(batch, query, key, value)
        assert batch.part is not None
        found = []
        for begin, end in pairwise(batch.part.packed.offsets.tolist()):
            heads = [states[begin:end].transpose(0, 1)[None] for states in (query, key, value)]
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=query.device).tril()
            if end - begin > chosen.shape[1]:
                mask &= torch.zeros_like(mask).scatter_(1, chosen[begin:end].long(), True)
            found.append(F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=self._scale)[0].transpose(0, 1))
        return torch.cat(found)
