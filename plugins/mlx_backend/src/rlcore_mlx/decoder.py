"""The forward pass of a dense decoder of the Llama form.

Shapes: `...` any shape of tokens, D hidden size, H heads, K heads of keys and values, E numbers of a head.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import mlx.core as mx
from attrs import frozen
from mlx import nn

from rlcore.model_files import read_object
from rlcore.spi import ModelError, ModelSpec, Problem
from rlcore_mlx.check import layer_problems
from rlcore_mlx.rotary import rope_frequencies
from rlcore_torchkit.architectures.architecture import Architecture, tensor_shapes
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registry import find_architecture
from rlcore_torchkit.huggingface.safetensors_files import model_file

Weights: TypeAlias = Mapping[str, mx.array]
"""By Hugging Face name."""
Attend: TypeAlias = Callable[[int, mx.array, mx.array, mx.array], mx.array]
"""A layer's number, queries [..., H, E], keys and values [..., K, E] to what is attended to, [..., H, E]."""


@frozen(kw_only=True, eq=False)
class Decoder:
    """A model without its weights."""

    family: Architecture
    dims: ModelDims
    eps: float
    frequencies: mx.array
    """float32 [E / 2]"""

    @classmethod
    def of(cls, spec: ModelSpec) -> "Decoder":
        """The model that config.json describes; ModelError where it is none that is computed here."""
        file = model_file(spec, "config.json")
        config = read_object(file) if file else Problem(path=spec.path, found="no config.json", expected="a model")
        family = config if isinstance(config, Problem) else find_architecture(config, spec.path)
        if isinstance(config, Problem) or isinstance(family, Problem):
            raise ModelError([found for found in (family, config) if isinstance(found, Problem)][:1])
        model = family.standard(config)
        if problems := [*family.problems(config, spec.path), *layer_problems(model, spec.path)]:
            raise ModelError(problems)
        dims = ModelDims.of(model)
        if dims is None:
            raise ModelError([Problem(path=str(file), found="no sizes of the model", expected="those of a language model")])
        frequencies = mx.array(rope_frequencies(model, dims.head_dim))
        return cls(family=family, dims=dims, eps=model.get("rms_norm_eps", 1e-6), frequencies=frequencies)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by its name."""
        return tensor_shapes(self.family, self.dims)

    def head(self, weights: Weights) -> mx.array:
        """[V, D]: what hidden states are multiplied with for logits."""
        names = self.family.modules
        return weights[f"{names.embedding if self.dims.tied else names.head}.weight"]

    def hidden(self, weights: Weights, tokens: mx.array, positions: mx.array, attend: Attend) -> mx.array:
        """[..., D] after the last norm, of tokens [...] at positions [...] of their sequences."""
        names = self.family.modules
        states = weights[f"{names.embedding}.weight"][tokens]
        angles = positions[..., None, None].astype(mx.float32) * self.frequencies
        turns = mx.cos(angles).astype(states.dtype), mx.sin(angles).astype(states.dtype)
        for number in range(self.dims.num_layers):
            layer = _Layer(weights=weights, prefix=f"{names.layers}.{number}.", decoder=self)
            states = states + layer.attention(layer.norm(states, names.input_norm), turns, number, attend)
            states = states + layer.mlp(layer.norm(states, names.mlp_norm))
        return mx.fast.rms_norm(states, weights[f"{names.norm}.weight"], self.eps)


@frozen(kw_only=True, eq=False)
class _Layer:
    weights: Weights
    prefix: str
    decoder: Decoder

    def norm(self, states: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(states, self.weights[f"{self.prefix}{name}.weight"], self.decoder.eps)

    def linear(self, states: mx.array, name: str) -> mx.array:
        product = states @ self.weights[f"{self.prefix}{name}.weight"].T
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        return product if bias is None else product + bias

    def attention(self, states: mx.array, turns: tuple[mx.array, mx.array], number: int, attend: Attend) -> mx.array:
        names, dims = self.decoder.family.modules, self.decoder.dims
        queries, keys, values = (
            self.linear(states, name).reshape(*states.shape[:-1], -1, dims.head_dim)
            for name in (names.query, names.key, names.value)
        )
        if self.decoder.family.has_qk_norms:
            queries, keys = self.norm(queries, names.query_norm), self.norm(keys, names.key_norm)
        attended = attend(number, _turn(queries, *turns), _turn(keys, *turns), values)
        return self.linear(attended.reshape(*states.shape[:-1], -1), names.output)

    def mlp(self, states: mx.array) -> mx.array:
        names = self.decoder.family.modules
        gate, up = (self.linear(states, f"{names.mlp}.{name}") for name in (names.gate, names.up))
        return self.linear(nn.silu(gate) * up, f"{names.mlp}.{names.down}")


def _turn(heads: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    first, second = mx.split(heads, 2, axis=-1)
    return mx.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def cast(weights: Weights, dtype: str) -> dict[str, mx.array]:
    """The weights in the dtype of this name; themselves where they have it."""
    wanted: Any = getattr(mx, dtype)
    return {name: weight.astype(wanted) for name, weight in weights.items()}
