"""The head that predicts the token after the next (multi-token prediction, arXiv:2412.19437, section 2.2).

From the trunk's hidden state of token t, behind its last norm, and the embedding of token t + 1 it makes a hidden state by
one more layer, from which the model's own output layer tells token t + 2. Trunk, embedding and output layer get no gradient
of it, so that the policy trains as it would without. The order of the two in the projection is that of DeepSeek's files.

Shapes: T tokens of a microbatch, S of them on this context rank, R on this tensor rank too, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import functional as F

from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.parallel import Groups
from rlcore_megatron.modules.latent_attention import WholeLinear
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_megatron.modules.rms_norm import PlainRMSNorm
from rlcore_torchkit.head.logprobs import HeadLogprobs

AHEAD = 2
"""Tokens between the hidden state that a prediction is made from and its target."""


class MultiTokenHead(MegatronModule):  # type: ignore[misc]
    """Two norms, a projection, a layer of the form of the trunk's last, and a norm; on the stage with the output layer."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, vp_stage: int | None) -> None:
        super().__init__(config=config)
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = PlainRMSNorm(config, size, epsilon), PlainRMSNorm(config, size, epsilon)
        self.eh_proj = WholeLinear(config, 2 * size, size)
        number = config.num_layers + 1 - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(layer, config=config, layer_number=number, vp_stage=vp_stage)
        self.transformer_layer.mlp.router.coefficients = {}  # losses that balance experts are of the trunk's layers
        self.final_layernorm = PlainRMSNorm(config, size, epsilon)
        self.embedding: Tensor | None = None
        """[V or this tensor rank's part, H], the trunk's, while a step trains."""

    def forward(self, trunk: Tensor, batch: PackedBatch, rotary: Tensor | None) -> Tensor:
        """Hidden states [R, 1, H] for the output layer, from those of the trunk [R, 1, H]. At the last token of a sequence they
        mean nothing, and no other token sees them."""
        joined = torch.cat([self.enorm(self._embedded(batch)), self.hnorm(trunk.detach())], -1)
        states, _ = self.eh_proj(joined)

        def run(states: Tensor) -> Tensor:
            options = {"rotary_pos_emb": rotary, "packed_seq_params": batch}
            output: Tensor = self.transformer_layer(hidden_states=states, attention_mask=None, **options)[0]
            return output

        output = checkpoint(run, False, states) if self.config.recompute_granularity == "full" else run(states)
        normed: Tensor = self.final_layernorm(output)
        return normed

    @torch.no_grad()
    def _embedded(self, batch: PackedBatch) -> Tensor:
        """[R, 1, H]: the embedding of the token behind each of this rank's."""
        assert batch.batch is not None
        assert batch.part is not None
        assert self.embedding is not None
        following = batch.part.split(F.pad(batch.batch.tokens[1:].long(), (0, 1)))
        group = self.transformer_layer.tp_group
        places = following - group.rank() * len(self.embedding)
        is_here = (places >= 0) & (places < len(self.embedding))
        found = F.embedding(places.where(is_here, 0), self.embedding) * is_here[:, None]
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        if self.config.sequence_parallel:
            found = found.chunk(group.size())[group.rank()]
        return found[:, None]


def logprobs_ahead(hidden: Tensor, batch: PackedBatch, compute: HeadLogprobs) -> Tensor:
    """float32 [T]: the log-probability of each of the microbatch's tokens from the head's hidden state [S, H] of the token two
    before it, 0.0 where its sequence has none; on every context rank, with a gradient of this rank's tokens.

    The softmax is over the whole vocabulary, at the policy's temperature.
    """
    part, microbatch, wanted = batch.part, batch.batch, batch.wanted
    assert part is not None
    assert microbatch is not None
    assert wanted is not None
    tokens, positions = microbatch.tokens, part.packed.position_ids[0]
    origins = part.predicting()
    targets = (origins + AHEAD).clamp(max=len(tokens) - 1)
    # Of the same sequence; chosen on the device, since reading it back would wait for all that is queued there.
    is_target = positions.index_select(0, targets) == positions.index_select(0, origins) + AHEAD
    within = origins - part.start
    states, told = hidden.index_select(0, within), tokens.index_select(0, targets).long()
    logprobs, _ = compute(states, targets=told, temperature=wanted.temperature, entropy="none", kept=None)
    placed = logprobs.new_zeros(part.size).index_copy(0, within, logprobs.where(is_target, 0.0))
    return F.pad(part.gather(placed), (AHEAD, -AHEAD - part.num_padding))


@contextmanager
def lent_embedding(model_chunks: Sequence[Any], layout: ParallelLayout, groups: Groups) -> Iterator[None]:
    """Let the head of a model that has one read the trunk's embedding as it is now, which the first stage sends to the last."""
    first, last = model_chunks[0], model_chunks[-1]
    weight = first.embedding.word_embeddings.weight.detach() if layout.is_first_stage else None
    if layout.pipeline > 1 and weight is not None:
        dist.send(weight, group=groups.pipeline, group_dst=layout.pipeline - 1)
    elif weight is None and layout.is_last_stage:
        weight = torch.empty_like(last.output_layer.weight)
        dist.recv(weight, group=groups.pipeline, group_src=0)
    if not layout.is_last_stage:
        yield
        return
    last.multi_token_head.embedding = weight
    try:
        yield
    finally:
        last.multi_token_head.embedding = None
