"""Low-rank adapters beside the frozen linear layers of a transformers model, in every layout.

Each adapted layer has two modules more, `lora_A` and `lora_B`, whose product a forward hook adds to its output; what the layer
itself is, and how it computes, stays as it was. Shapes: T tokens, I inputs and O outputs of a layer, R the rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

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
        adapters = cls(context.lora, context.model.path, context.seed, layers, layout, pads_between)
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
                key, nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, dtype=torch.float32, device=device)
            )
        layer.register_forward_hook(partial(self._forward, name, columns))

    def initialise(self, model: nn.Module) -> None:
        """Give this rank's parts their first values."""
        values = initial_adapters(self.layers, self.spec, self.model, self.seed, self.rank)
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
        self._dropout, self._parts = None, ()

    def train_together(self, parts: "Sequence[AdaptedPart]") -> None:
        """From now on, until `train_off`, use these adapters for the owners of a packed microbatch, one each."""
        self._parts = parts

    def _count_rows(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:  # noqa: ARG002
        """Before the decoder's pass: layers see a row for each token, or for each beginning of tokens."""
        self._rows = options["packed"].rows_of_owners if self._parts else ()

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
        if not self._parts:
            return output + self._product(name, num_inputs, inputs[0], layer.lora_A.weight, layer.lora_B.weight)
        rows = zip(self._parts, inputs[0].split(self._rows, -2), strict=True)
        products = (
            self._product(name, num_inputs, own, part.weights[f"{name}.{LORA_A}"], part.weights[f"{name}.{LORA_B}"], part)
            for part, own in rows
        )
        return output + torch.cat([*products], -2)

    def _product(
        self, name: str, num_inputs: int, states: Tensor, a: Tensor, b: Tensor, part: "AdaptedPart | None" = None
    ) -> Tensor:
        """alpha / rank · B A dropout(x), [..., T, O], of states [..., T, I]; without a `part` by the adapter in use."""
        dropout, rank = (self._dropout, self.rank) if part is None else (part.dropout, part.rank)
        if dropout is not None:
            states = states * self._kept(dropout, name, num_inputs, states)
        return F.linear(F.linear(states, a.to(states.dtype)), b.to(states.dtype)) * (self.spec.alpha / rank)

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
    """Whole float32 A and B by name."""
    dropout: Dropout | None
    rank: int


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name: adapters alone where there are any."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
