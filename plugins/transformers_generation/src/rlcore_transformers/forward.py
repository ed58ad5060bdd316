"""The decoder stack of a family of models over packed rows of tokens, on weights that it does not own.

It computes what transformers' modules compute, in about a third of their operations: small models on CPU spend their time in
the number of operations. The modules are the reference that the tests hold it against.

Shapes: R rows (one token each), H hidden, A attention heads, K key-value heads, D head size, E experts, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from rlcore.spi import ModelError, Problem
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.head.onednn import add_linear, linear
from rlcore_torchkit.huggingface.models import architecture_of, dims_of
from rlcore_torchkit.layers.rms_norm import rms_norm
from rlcore_transformers.attention import Attend

Linear: TypeAlias = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""


@frozen(eq=False)
class Mlp:
    """The weights of a gated feed-forward block."""

    gate: Linear
    up: Linear
    down: Linear


@frozen(eq=False)
class Layer:
    """The weights of one layer."""

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


class FamilyDecoder:
    """`Decoder` of a model whose family is described. `bind` it to weights by their Hugging Face names before use."""

    def __init__(
        self, config: Any, rotary: torch.nn.Module, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        family = architecture_of(config)
        self._modules, self._config = family.modules, family.standard(config.to_dict())
        self.dims = dims_of(config)
        self._activation = ACT2FN[self._config.get("hidden_act", "silu")]
        cos, sin = rotary(torch.zeros((), dtype=torch.float32), torch.arange(num_positions)[None])
        sin = torch.cat((-sin[..., : self.dims.head_dim // 2], sin[..., self.dims.head_dim // 2 :]), -1)
        self._cos = cos[0].to(device, dtype)[:, None]
        self._sin = sin[0].to(device, dtype)[:, None]
        """[positions, 1, D]; the sine carries the sign of the rotated half."""

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors, as they are, from now on; ModelError where the model has some that this forward pass lacks."""
        left, names = dict(weights), self._modules
        self._embedding = left.pop(f"{names.embedding}.weight")
        self._final_norm = left.pop(f"{names.norm}.weight")
        self._head = left.pop(f"{names.head}.weight", self._embedding)
        layers = range(self.dims.num_layers)
        self._layers = [_layer(left, f"{names.layers}.{index}.", names, self.dims.num_experts) for index in layers]
        if left:
            expected = f"only the tensors of a decoder of model_type {self._config['model_type']}"
            remedy = "Use another generator for this model."
            raise ModelError([Problem(path=name, found="a tensor", expected=expected, remedy=remedy) for name in sorted(left)])

    def unbind(self) -> None:
        """Let go of the weights."""
        self._embedding = self._final_norm = self._head = torch.empty(0)
        self._layers = []

    @property
    def needs_equal_lengths(self) -> bool:
        """Attention does not see the padding behind a prompt."""
        return False

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.dims.vocab_size

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Layers, and experts of a token in each of them."""
        return self.dims.num_layers, self.dims.num_experts_per_token

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, routed: Tensor | None = None) -> Tensor:
        """Final hidden states [R, H] of tokens int64 [R] at positions int64 [R].

        `routed` int16 [R, layers, experts of a token], where given, gets the experts of each token in layers that have some.
        """
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            rows = self._norm(hidden, layer.input_norm)
            mixed = attend(index, *self._heads(rows, layer, cos, sin))
            hidden = add_linear(hidden, mixed, *layer.output)
            rows = self._norm(hidden, layer.mlp_norm)
            if layer.router is None:
                hidden = add_linear(hidden, self._gated(rows, layer.mlps[0]), *layer.mlps[0].down)
            else:
                chosen = None if routed is None else routed[:, index]
                hidden = hidden + self._experts(rows, layer.router, layer.mlps, chosen)
        return self._norm(hidden, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] in the weights' dtype, from final hidden states [R, H]."""
        return linear(hidden, self._head)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight, self._config["rms_norm_eps"])

    def _heads(self, rows: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [R, A, D] and key [R, K, D], and value [R, K, D]."""
        num_heads, width = self.dims.num_heads, self.dims.head_dim
        query, key, value = (linear(rows, *part).view(len(rows), -1, width) for part in (layer.query, layer.key, layer.value))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        both = torch.cat((query, key), 1)
        first, second = both.chunk(2, -1)
        rotated = torch.addcmul(both * cos, torch.cat((second, first), -1), sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], value

    def _gated(self, rows: Tensor, mlp: Mlp) -> Tensor:
        return self._activation(linear(rows, *mlp.gate)).mul_(linear(rows, *mlp.up))

    def _experts(self, rows: Tensor, router: Tensor, experts: tuple[Mlp, ...], routed: Tensor | None) -> Tensor:
        """Sum over each row's chosen experts, weighted; rows are sorted by expert, to wait for the device once."""
        scores, chosen = linear(rows, router).softmax(-1, torch.float32).topk(self.dims.num_experts_per_token)
        if routed is not None:
            routed.copy_(chosen)
        if self._config["norm_topk_prob"]:
            scores = scores / scores.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
        sources = order // chosen.shape[1]
        parts = rows[sources].split(counts)
        outputs = [linear(self._gated(part, mlp), *mlp.down) for part, mlp in zip(parts, experts, strict=True) if len(part)]
        weighted = torch.cat(outputs) * scores.to(rows.dtype).flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, sources, weighted)


def _layer(left: dict[str, Tensor], prefix: str, names: ModuleNames, num_experts: int) -> Layer:
    """The tensors whose names begin with `prefix`, taken out of `left`."""

    def linear_of(name: str) -> Linear:
        return left.pop(f"{prefix}{name}.weight"), left.pop(f"{prefix}{name}.bias", None)

    def mlp(name: str) -> Mlp:
        return Mlp(*(linear_of(f"{name}.{part}") for part in (names.gate, names.up, names.down)))

    router = left.pop(f"{prefix}{names.router}.weight", None)
    mlps = [names.mlp] if router is None else [f"{names.experts}.{expert}" for expert in range(num_experts)]
    return Layer(
        input_norm=left.pop(f"{prefix}{names.input_norm}.weight"),
        query=linear_of(names.query),
        key=linear_of(names.key),
        value=linear_of(names.value),
        query_norm=left.pop(f"{prefix}{names.query_norm}.weight", None),
        key_norm=left.pop(f"{prefix}{names.key_norm}.weight", None),
        output=linear_of(names.output),
        mlp_norm=left.pop(f"{prefix}{names.mlp_norm}.weight"),
        router=router,
        mlps=tuple(mlp(name) for name in mlps),
    )
