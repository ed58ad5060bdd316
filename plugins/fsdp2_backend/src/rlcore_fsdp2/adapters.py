"""Low-rank adapters beside the frozen linear layers of a transformers model, in every layout.

Each adapted layer has two modules more, `lora_A` and `lora_B`, whose product a forward hook adds to its output; what the layer
itself is, and how it computes, stays as it was. Shapes: T tokens, I inputs and O outputs of a layer, R the rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.spi import ConfigError, LoraSpec, TrainerContext
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.sharding import fill, local
from rlcore_torchkit.adapters.lora import Dropout, initial_adapters, linear_layers_of
from rlcore_torchkit.adapters.lora_targets import LORA_A, LORA_B, Shape, target_problems, targeted
from rlcore_torchkit.architectures.decoders import is_described
from rlcore_torchkit.forward.decoder_forward import decoder_of
from rlcore_torchkit.trainer.float64 import master_dtype

A, B = "lora_A", "lora_B"


@define(eq=False)
class Adapters:
    """The adapters of one model: whether they count, and which of their inputs are dropped."""

    spec: LoraSpec
    model: str
    seed: int
    layers: Mapping[str, Shape]
    """Name to (O, I) of the layers that have one."""
    layout: ParallelLayout | None
    dtype: torch.dtype
    """The dtype that the layers compute in."""
    master_dtype: torch.dtype
    """The dtype of A and B."""
    pads_between: bool
    """True where layers may see padding between a microbatch's tokens, as where each sequence has a row of its own."""
    begun: Mapping[str, Tensor] | None = field(default=None, init=False)
    """Whole A and B on the host as the run began with them, by name; None where it began with the model alone."""
    rank: int = field(init=False)
    """Rows of A and columns of B that count: those behind it are zero."""
    _on: bool = True
    _dropout: Dropout | None = field(default=None, init=False)
    """None where no inputs are dropped."""
    _parts: "Sequence[AdaptedPart]" = field(default=(), init=False)
    """The parts of a pass of several adapters; none where the model's own parameters are those of all tokens."""
    _rows: Sequence[int] = field(default=(), init=False)
    """The rows that layers see of each part."""
    _ends: Tensor = field(init=False)
    """int32 [parts]: the row behind each part, on the layers' device."""
    _stacks: Mapping[str, Tensor] = field(factory=dict, init=False)
    """A [parts, R, I] and B [parts, O, R] of a pass by name, in `dtype`, of layers that have grouped products."""

    @rank.default
    def _rank(self) -> int:
        return self.spec.rank

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' product: alpha / rank."""
        return self.spec.alpha / self.rank

    @classmethod
    def attach(cls, model: Any, context: TrainerContext, layout: ParallelLayout | None) -> "Adapters":
        """Freeze a whole model and give it adapters without values. ConfigError where it has no layer that is a target."""
        assert context.lora is not None
        found = linear_layers_of(model)
        problems = list(target_problems(found, context.lora))
        if problems:
            raise ConfigError(problems)
        layers = targeted(found, context.lora)
        pads_between = not is_described(model)
        dtypes = getattr(torch, context.model.dtype), master_dtype(context.model)
        adapters = cls(context.lora, context.model.path, context.seed, layers, layout, *dtypes, pads_between)
        model.requires_grad_(False)
        for name, shape in layers.items():
            adapters._attach(model.get_submodule(name), name, shape)
        decoder_of(model).register_forward_pre_hook(adapters._count_rows, with_kwargs=True)
        return adapters

    def _attach(self, layer: nn.Module, name: str, shape: Shape) -> None:
        (rows, columns), rank = shape, self.spec.rank
        device = next(layer.parameters()).device
        for key, (outputs, inputs) in {A: (rank, columns), B: (rows, rank)}.items():
            layer.add_module(
                key, nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=self.master_dtype, device=device)
            )
        layer.register_forward_hook(partial(self._forward, name, columns))

    def initialise(self, model: nn.Module) -> None:
        """Give this rank's parts their first values."""
        values = initial_adapters(self.layers, self.spec, self.model, self.seed, self.rank, self.master_dtype)
        self._fill(model, values)
        self.begun = values if self.spec.init_from is not None else None

    def _fill(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        for name, whole in values.items():
            fill(model.get_parameter(name), whole)

    def train_on(self, num_tokens: int, *key: object) -> None:
        """From now on, until `train_off`, drop inputs of a microbatch of so many tokens, as the key decides: also where a layer
        is computed again in the backward pass."""
        self._dropout = self.dropout(self.seed, num_tokens, *key)

    def dropout(self, seed: int, num_tokens: int, *key: object) -> Dropout | None:
        """Return what an adapter of this seed drops of such a microbatch, None where it drops nothing."""
        if not self.spec.dropout:
            return None
        return Dropout(share=self.spec.dropout, key=(seed, *key), num_tokens=num_tokens)

    def train_off(self) -> None:
        """Drop no inputs, and use the model's own parameters for all tokens."""
        self._dropout, self._parts, self._stacks = None, (), {}

    def train_together(self, parts: "Sequence[AdaptedPart]") -> None:
        """From now on, until `train_off`, use these adapters for the owners of a packed microbatch, one each."""
        self._parts = parts

    def _count_rows(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:  # noqa: ARG002
        """Before the decoder's pass: layers see a row for each token, or for each beginning of tokens."""
        if not self._parts:
            return
        device = next(module.parameters()).device
        self._rows = options["packed"].rows_of_owners
        self._ends = torch.tensor(np.cumsum(self._rows), dtype=torch.int32).to(device, non_blocking=True)
        self._stacks = {}
        for shape in {*self.layers.values()}:
            if has_grouped_products(device, self.dtype, (*shape, self.spec.rank)):
                layers = [name for name, other in self.layers.items() if other == shape]
                for key in (LORA_A, LORA_B):
                    names = [f"{name}.{key}" for name in layers]
                    every = torch.stack([part.weights[name] for name in names for part in self._parts]).to(self.dtype)
                    self._stacks |= zip(names, every.unflatten(0, (len(names), -1)).unbind(), strict=True)

    @contextmanager
    def as_begun(self, model: nn.Module) -> Iterator[None]:
        """The model as it was before training: with the adapters that the run began with, or without any."""
        now = {name: local(parameter).detach().clone() for name, parameter in trained(model).items()} if self.begun else {}
        self._on = self.begun is not None
        try:
            if self.begun is not None:
                self._fill(model, self.begun)
            yield
        finally:
            self._on = True
            with torch.no_grad():
                for name, values in now.items():
                    local(model.get_parameter(name)).copy_(values)

    def _forward(self, name: str, num_inputs: int, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The layer's output [..., T, O] with alpha / rank · B A dropout(x) added, in its dtype."""
        if not self._on:
            return output
        if self._parts:
            return self._add_products(name, num_inputs, inputs[0], output)
        states = self._dropped(name, num_inputs, inputs[0], self._dropout)
        product = low_rank(states, layer.lora_A.weight, layer.lora_B.weight)
        return torch.add(output, product, alpha=self.spec.alpha / self.rank)

    def _add_products(self, name: str, num_inputs: int, states: Tensor, output: Tensor) -> Tensor:
        """Add the products of all parts: grouped where the device has such a product, else one after another."""
        pieces = states.split(self._rows, -2)
        if any(part.dropout is not None for part in self._parts):
            pieces = tuple(
                self._dropped(name, num_inputs, rows, part.dropout) for part, rows in zip(self._parts, pieces, strict=True)
            )
            states = torch.cat(pieces, -2)
        stacks = [self._stacks.get(f"{name}.{key}") for key in (LORA_A, LORA_B)]
        product = grouped_low_rank(states, *stacks, self._ends)
        if product is None:
            weights = ([part.weights[f"{name}.{key}"] for key in (LORA_A, LORA_B)] for part in self._parts)
            product = torch.cat([low_rank(rows, *own) for rows, own in zip(pieces, weights, strict=True)], -2)
        scales = [self.spec.alpha / part.rank for part in self._parts]
        if len({*scales}) == 1:
            return torch.add(output, product, alpha=scales[0])
        return output + product * product.new_tensor(np.repeat(scales, self._rows)).unsqueeze(-1)

    def _dropped(self, name: str, num_inputs: int, states: Tensor, dropout: Dropout | None) -> Tensor:
        return states if dropout is None else states * self._kept(dropout, name, num_inputs, states)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # random numbers of its own, which no compiler traces
    def _kept(self, dropout: Dropout, name: str, num_inputs: int, states: Tensor) -> Tensor:
        rows = states.flatten(0, -2)
        num_rows, num_columns = rows.shape
        if self.pads_between:
            dropout = evolve(dropout, num_tokens=num_rows)
        rank = 0 if self.layout is None or num_columns == num_inputs else self.layout.tensor_rank
        kept = dropout.kept(name, rows, num_inputs, num_rows=num_rows, first_row=0, first_column=rank * num_columns)
        return kept.view(states.shape)


@frozen(kw_only=True, eq=False)
class AdaptedPart:
    """Consecutive tokens of a pass that one adapter changes."""

    weights: Mapping[str, Tensor]
    """Whole A and B by name, in `master_dtype`."""
    dropout: Dropout | None
    rank: int


def low_rank(states: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """B A x of the rows x of states [..., T, I], in their dtype."""
    return F.linear(F.linear(states, a.to(states.dtype)), b.to(states.dtype))


def has_grouped_products(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Return whether `grouped_mm` of torch takes weights of these sizes: rows of n times 16 bytes; on CUDA by a kernel
    for Hopper, without which it would wait for the device."""
    aligned = all(size * dtype.itemsize % 16 == 0 for size in sizes)
    if device.type == "cuda":
        return aligned and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
    return aligned and dtype in (torch.bfloat16, torch.float32)


def grouped_low_rank(states: Tensor, a: Tensor | None, b: Tensor | None, ends: Tensor) -> Tensor | None:
    """B A x of the rows x of states [..., T, I], each group of rows by its own A and B; None where these are not stacked in the
    states' dtype."""
    if a is None or b is None or a.dtype != states.dtype:
        return None
    rows = states.reshape(-1, states.shape[-1])
    for weights in (a, b):
        rows = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return rows.view(*states.shape[:-1], -1)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name: adapters alone where there are any."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
