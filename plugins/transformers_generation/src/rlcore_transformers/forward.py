"""The decoder stack of Qwen2, Qwen3, Qwen3-MoE and Llama over packed rows of tokens, on weights that it does not own.

It computes what transformers' modules compute, in about a third of their operations: small models on CPU spend their time in
the number of operations. The modules are the reference that the tests hold it against.

Shapes: R rows (one token each), H hidden, A attention heads, K key-value heads, D head size, E experts, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from rlcore.spi import ModelError, Problem

Linear: TypeAlias = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [R, A, D], key [R, K, D], value [R, K, D]) -> [R, A * D]; keeps key and value for later tokens."""


@frozen(eq=False)
class Mlp:
    """A gated feed-forward block."""

    gate: Linear
    up: Linear
    down: Linear


@frozen(eq=False)
class Layer:
    """One layer's weights."""

    input_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    router: Tensor | None
    """[E, H]; None in a dense layer."""
    mlps: tuple[Mlp, ...]
    """One in a dense layer, otherwise E."""


class Decoder:
    """The forward pass of one model. `bind` it to weights by their Hugging Face names before use."""

    def __init__(
        self, config: Any, rotary: torch.nn.Module, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary_size: int = config.vocab_size
        self._config = config
        self._activation = ACT2FN[config.hidden_act]
        cos, sin = rotary(torch.zeros((), dtype=torch.float32), torch.arange(num_positions)[None])
        sin = torch.cat((-sin[..., : self.head_size // 2], sin[..., self.head_size // 2 :]), -1)
        self._cos = cos[0].to(device, dtype)[:, None]
        self._sin = sin[0].to(device, dtype)[:, None]
        """[positions, 1, D]; the sine carries the sign of the rotated half."""

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors, as they are, from now on; ModelError where the model has some that this forward pass lacks."""
        left = dict(weights)
        self._embedding = left.pop("model.embed_tokens.weight")
        self._final_norm = left.pop("model.norm.weight")
        self._head = left.pop("lm_head.weight", self._embedding)
        self._layers = [_layer(left, f"model.layers.{index}.", self._config) for index in range(self.num_layers)]
        if left:
            expected = "only the tensors of a Qwen2, Qwen3, Qwen3-MoE or Llama decoder"
            remedy = "Use another generator for this model."
            raise ModelError([Problem(path=name, found="a tensor", expected=expected, remedy=remedy) for name in sorted(left)])

    def unbind(self) -> None:
        """Let go of the weights."""
        self._embedding = self._final_norm = self._head = torch.empty(0)
        self._layers = []

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Layers, and experts of a token in each of them."""
        return self.num_layers, getattr(self._config, "num_experts_per_tok", 0)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, routed: Tensor | None = None) -> Tensor:
        """Final hidden states [R, H] of tokens int64 [R] at positions int64 [R].

        `routed` int16 [R, layers, experts of a token], where given, gets the experts of each token in layers that have some.
        """
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            rows = self._norm(hidden, layer.input_norm)
            mixed = attend(index, *self._heads(rows, layer, cos, sin))
            hidden = _add_linear(hidden, mixed, layer.output)
            rows = self._norm(hidden, layer.mlp_norm)
            if layer.router is None:
                hidden = _add_linear(hidden, self._gated(rows, layer.mlps[0]), layer.mlps[0].down)
            else:
                chosen = None if routed is None else routed[:, index]
                hidden = hidden + self._experts(rows, layer.router, layer.mlps, chosen)
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in the weights' dtype, from final hidden states [R, H]."""
        return F.linear(hidden, self._head)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows, weight.shape, weight, self._config.rms_norm_eps)

    def _heads(self, rows: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [R, A, D] and key [R, K, D], and value [R, K, D]."""
        query = F.linear(rows, *layer.query).view(len(rows), self.num_heads, self.head_size)
        key = F.linear(rows, *layer.key).view(len(rows), self.num_kv_heads, self.head_size)
        value = F.linear(rows, *layer.value).view(len(rows), self.num_kv_heads, self.head_size)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        both = torch.cat((query, key), 1)
        first, second = both.chunk(2, -1)
        rotated = torch.addcmul(both * cos, torch.cat((second, first), -1), sin)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], value

    def _gated(self, rows: Tensor, mlp: Mlp) -> Tensor:
        return self._activation(F.linear(rows, *mlp.gate)).mul_(F.linear(rows, *mlp.up))

    def _experts(self, rows: Tensor, router: Tensor, experts: tuple[Mlp, ...], routed: Tensor | None) -> Tensor:
        """Sum over each row's chosen experts, weighted; rows are sorted by expert, to wait for the device once."""
        scores, chosen = F.linear(rows, router).softmax(-1, torch.float32).topk(self._config.num_experts_per_tok)
        if routed is not None:
            routed.copy_(chosen)
        if self._config.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
        sources = order // chosen.shape[1]
        parts = rows[sources].split(counts)
        outputs = [F.linear(self._gated(part, mlp), *mlp.down) for part, mlp in zip(parts, experts, strict=True) if len(part)]
        weighted = torch.cat(outputs) * scores.to(rows.dtype).flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, sources, weighted)


def _add_linear(residual: Tensor, rows: Tensor, linear: Linear) -> Tensor:
    weight, bias = linear
    added = torch.addmm(residual, rows, weight.t())
    return added if bias is None else added + bias


def _layer(left: dict[str, Tensor], prefix: str, config: Any) -> Layer:
    """The tensors whose names begin with `prefix`, taken out of `left`."""

    def linear(name: str) -> Linear:
        return left.pop(f"{prefix}{name}.weight"), left.pop(f"{prefix}{name}.bias", None)

    def mlp(name: str) -> Mlp:
        return Mlp(*(linear(f"{name}.{part}_proj") for part in ("gate", "up", "down")))

    router = left.pop(f"{prefix}mlp.gate.weight", None)
    names = ["mlp"] if router is None else [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
    return Layer(
        input_norm=left.pop(f"{prefix}input_layernorm.weight"),
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        query_norm=left.pop(f"{prefix}self_attn.q_norm.weight", None),
        key_norm=left.pop(f"{prefix}self_attn.k_norm.weight", None),
        output=linear("self_attn.o_proj"),
        mlp_norm=left.pop(f"{prefix}post_attention_layernorm.weight"),
        router=router,
        mlps=tuple(mlp(name) for name in names),
    )
