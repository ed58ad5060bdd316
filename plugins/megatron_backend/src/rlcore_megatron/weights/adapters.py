"""Low-rank adapters beside Megatron's frozen linear layers, in every layout.

Each model chunk has a module `adapters` with the factors of its layers, and forward hooks of these add what the factors make. A
layer of queries, keys and values, or of gates and columns, has an adapter for each of the Hugging Face tensors in it. Only
products with A, as wide as the rank, travel between tensor ranks. Shapes: T tokens of a rank, R the rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from attrs import evolve
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.spi import ConfigError, LoraSpec, TrainerContext
from rlcore_megatron.families.models import architecture_of, dims_of
from rlcore_megatron.families.weight_mapping import ADAPTERS, Names
from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.model import PolicyModel, unwrapped
from rlcore_megatron.weights.parameter_rows import row_ranges
from rlcore_torchkit.adapters.lora import Dropout, initial_adapters, merged
from rlcore_torchkit.adapters.lora_targets import LORA_A, LORA_B, adapted_layers, adapter_shapes, linear_layers, target_problems


class Adapters(nn.Module):
    """The factors of a model chunk's adapters, float32, by Hugging Face's names with a slash for each dot."""

    def __init__(self, spec: LoraSpec, group: Any, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.spec, self.rank, self.on = spec, spec.rank, True
        self.dropout: Dropout | None = None
        self._group, self._sequence_parallel = group, sequence_parallel
        self.rows: dict[str, slice] = {}
        """This rank's rows of a weight, by its name, where B is whole since tensor ranks share query groups."""

    def add(self, tensor: HfTensor, value: Tensor) -> None:
        """A factor with this rank's part of its values. The gradient of one that is whole is a sum over tensor ranks where each
        has its own tokens."""
        parameter = nn.Parameter(value.contiguous())
        if tensor.tp_dim is not None:
            set_tensor_model_parallel_attributes(parameter, True, tensor.tp_dim, 1)
        elif self._sequence_parallel:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        self.register_parameter(tensor.name.replace(".", "/"), parameter)

    def factors(self, weight: str) -> tuple[Tensor, Tensor] | None:
        """This rank's parts of A and B of a weight, by its name; None where it has no adapter."""
        name = weight.removesuffix("weight").replace(".", "/")
        a, b = (self._parameters.get(f"{name}{key.replace('.', '/')}") for key in (LORA_A, LORA_B))
        if a is None or b is None:
            return None
        if weight in self.rows:  # the gradient of each rank is of its rows alone
            b = b if self._sequence_parallel else copy_to_tensor_model_parallel_region(b, group=self._group)
            b = b[self.rows[weight]]
        return a, b

    @property
    def scale(self) -> float:
        """Return the factor of the adapters' product: alpha / rank. Rows of A and columns of B behind the rank are zero."""
        return self.spec.alpha / self.rank

    def merged(self, weight: str, share: Tensor) -> Tensor:
        """This rank's share [..., in] of a weight with its adapter's product added; as it is where it has none. B alone comes
        with a factor, so that the scale of `context.lora` is right at a smaller rank too."""
        factors = self.factors(weight)
        if factors is None:
            is_scaled = weight.endswith(LORA_B) and self.rank != self.spec.rank
            return share * (self.spec.rank / self.rank) if is_scaled else share
        a, b = (factor.detach() for factor in factors)
        return merged(share.reshape(-1, share.shape[-1]), a, b, self.scale).view(share.shape)

    def forward_hook(self, source: Source, size: int, layer: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        """The layer's output [T, 1, O] or [T, O] with the adapters' added, and its bias."""
        if not self.on:
            return output
        states, (result, bias) = inputs[0], output
        if hasattr(layer, "layer_norm_weight"):  # TransformerEngine's, which has the norm before it within it
            centre = 1.0 if layer.zero_centered_gamma else 0.0
            states = F.rms_norm(states, states.shape[-1:], layer.layer_norm_weight + centre, layer.eps)
        by_inputs = source.tensors[0].tp_dim == 1
        added = self._by_inputs(source, states) if by_inputs else self._by_outputs(source, size, states)
        return result + self.scale * added, bias

    def _by_inputs(self, source: Source, states: Tensor) -> Tensor:
        factors = self.factors(source.tensors[0].name)
        assert factors is not None
        a, b = (factor.to(states.dtype) for factor in factors)
        weight = source.tensors[0]
        low = F.linear(self._dropped(weight, states, self._group.rank() * states.shape[-1]), a)
        if self._sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        elif self._group.size() > 1:
            low = reduce_from_tensor_model_parallel_region(low, group=self._group)
        return F.linear(low, b)

    def _by_outputs(self, source: Source, size: int, states: Tensor) -> Tensor:
        found = [self.factors(tensor.name) for tensor in source.tensors]
        products = [
            F.linear(self._dropped(tensor, states), factors[0].to(states.dtype))
            for tensor, factors in zip(source.tensors, found, strict=True)
            if factors is not None
        ]
        low = torch.cat(products, -1)
        if source.tensors[0].tp_dim is None:
            pass  # each rank has all outputs, of its own tokens
        elif self._sequence_parallel:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self._group)
        elif self._group.size() > 1:
            low = copy_to_tensor_model_parallel_region(low, group=self._group)
        lows, parts, groups = iter(low.split(self.spec.rank, -1)), [], source.local_groups(size)
        for rows, factors in zip(row_ranges(source, self._group.rank(), size), found, strict=True):
            width = rows.stop - rows.start
            part = low.new_zeros(*low.shape[:-1], width) if factors is None else F.linear(next(lows), factors[1].to(low.dtype))
            parts.append(part.unflatten(-1, (groups, width // groups)))
        return torch.cat(parts, -1).flatten(-2)

    def _dropped(self, weight: HfTensor, states: Tensor, first_column: int | None = None) -> Tensor:
        """The layer's inputs [T, 1, I'] or [T, I'] with those that are dropped set to zero. Where they are not divided by
        columns, from `first_column` on, sequence parallelism divides them by tokens."""
        if self.dropout is None:
            return states
        rows, by_tokens = states.flatten(0, -2), self._sequence_parallel and first_column is None
        kept = self.dropout.kept(
            weight.name.removesuffix(".weight"),
            rows,
            weight.shape[1],
            num_rows=len(rows) * self._group.size() if by_tokens else len(rows),
            first_row=len(rows) * self._group.rank() if by_tokens else 0,
            first_column=first_column or 0,
        )
        return states * kept.view_as(states)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),  # noqa: ARG002 - as Megatron calls it
        metadata: Any = None,  # noqa: ARG002
    ) -> dict[str, ShardedTensor]:
        """The factors, under Hugging Face's names, as Megatron's distributed checkpoints have them."""
        found = {}
        for name, parameter in self.named_parameters():
            key = name.replace("/", ".")
            if getattr(parameter, "tensor_model_parallel", False):
                found[f"{prefix}{name}"] = make_tp_sharded_tensor_for_checkpoint(parameter, key, parameter.partition_dim)
            else:
                found[f"{prefix}{name}"] = make_sharded_tensor_for_checkpoint(parameter, key)
        return found


def attach(
    model_chunks: Sequence[PolicyModel], hf: Any, context: TrainerContext, layout: ParallelLayout
) -> tuple[Names, dict[str, Tensor] | None]:
    """Freeze model chunks, which have their weights, and give them adapters; returns the adapters' names and, where a run
    begins with some, these whole and on the host. ConfigError where the model has no layer that is a target."""
    assert context.lora is not None
    family, dims, names = architecture_of(hf), dims_of(hf), Names.of(hf)
    problems = [*family.adapter_problems(), *target_problems(linear_layers(family, dims), context.lora)]
    if problems:
        raise ConfigError(problems)
    layers = adapted_layers(family, dims, context.lora)
    values = initial_adapters(layers, context.lora, context.model.path, context.seed)
    tensors = _tensors(names, adapter_shapes(layers, context.lora.rank), layout.tensor)
    for model_chunk in model_chunks:
        model_chunk.requires_grad_(False)
        _attach(model_chunk, names, context.lora, tensors, values, layout)
    sources = {f"{ADAPTERS}{name.replace('.', '/')}": tensor for name, tensor in tensors.items()}
    named = evolve(
        names,
        sources={parameter: Source(parameter=parameter, tensors=(tensor,)) for parameter, tensor in sources.items()},
        order=tuple(tensors.values()),
        prefix=ADAPTERS,
    )
    return named, None if context.lora.init_from is None else values


def _tensors(names: Names, shapes: Mapping[str, tuple[int, ...]], size: int) -> dict[str, HfTensor]:
    """The factors by name: B is divided where its weight is divided by outputs, A where it is divided by inputs. Both are whole
    where some of `size` tensor ranks share a query group, of which they have unequal parts."""
    divided = {
        tensor.name.removesuffix("weight"): None if source.splits_groups(size) else tensor.tp_dim
        for source in names.sources.values()
        for tensor in source.tensors
    }
    tensors = {}
    for name, shape in shapes.items():
        key, dim = (LORA_A, 1) if name.endswith(LORA_A) else (LORA_B, 0)
        tensors[name] = HfTensor(name=name, shape=shape, tp_dim=dim if divided[name.removesuffix(key)] == dim else None)
    return tensors


def _attach(
    model_chunk: PolicyModel,
    names: Names,
    spec: LoraSpec,
    tensors: Mapping[str, HfTensor],
    values: Mapping[str, Tensor],
    layout: ParallelLayout,
) -> None:
    device = next(model_chunk.parameters()).device
    group = model_chunk.pg_collection.tp
    adapters = Adapters(spec, group, sequence_parallel=model_chunk.config.sequence_parallel)
    for name, source in names.of_model_chunk(model_chunk, layout.expert_rank, layout.expert).items():
        stems = [tensor.name.removesuffix("weight") for tensor in source.tensors]
        mine = [tensors[f"{stem}{key}"] for stem in stems for key in (LORA_A, LORA_B) if f"{stem}{key}" in tensors]
        for tensor in mine:
            value = values[tensor.name]
            if tensor.tp_dim is not None:
                value = value.chunk(layout.tensor, tensor.tp_dim)[layout.tensor_rank]
            adapters.add(tensor, value.to(device, copy=True))
        if source.splits_groups(layout.tensor):
            ranges = row_ranges(source, layout.tensor_rank, layout.tensor)
            adapters.rows |= {tensor.name: rows for tensor, rows in zip(source.tensors, ranges, strict=True)}
        if mine:
            layer = model_chunk.get_submodule(name.removesuffix(".weight"))
            layer.register_forward_hook(partial(adapters.forward_hook, source, layout.tensor))
    model_chunk.adapters = adapters
    if model_chunk.pre_process:  # what recomputes layers does so only behind something that has a gradient
        model_chunk.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


@contextmanager
def as_begun(models: Sequence[Any], begun: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model chunks as they were before training: with the adapters `begun`, whole and by name, or without any."""
    with ExitStack() as stack:
        for model_chunk in unwrapped(models):
            if begun is None:
                model_chunk.adapters.on = False
                stack.callback(setattr, model_chunk.adapters, "on", True)
                continue
            for parameter in model_chunk.adapters.parameters():
                stack.callback(parameter.data.copy_, parameter.detach().clone())
            _fill(model_chunk, begun)
        yield


def initialise(
    models: Sequence[Any], hf: Any, context: TrainerContext, seed: int, rank: int | None
) -> dict[str, Tensor] | None:
    """Give the adapters of model chunks their first values anew, at a rank, and return them as `attach` does."""
    assert context.lora is not None
    layers = adapted_layers(architecture_of(hf), dims_of(hf), context.lora)
    values = initial_adapters(layers, context.lora, context.model.path, seed, rank)
    set_rank(models, rank)
    for model_chunk in unwrapped(models):
        _fill(model_chunk, values)
    return None if context.lora.init_from is None else values


def rank_of(models: Sequence[Any]) -> int | None:
    """Return the rank of the adapters in use; None where model chunks have none."""
    return next((chunk.adapters.rank for chunk in unwrapped(models) if hasattr(chunk, "adapters")), None)


def set_rank(models: Sequence[Any], rank: int | None) -> None:
    """Note the rank of the adapters in use; None is that of their spec."""
    for model_chunk in unwrapped(models):
        if hasattr(model_chunk, "adapters"):
            model_chunk.adapters.rank = rank or model_chunk.adapters.spec.rank


def _fill(model_chunk: Any, values: Mapping[str, Tensor]) -> None:
    """Set the adapters of a model chunk to whole values by name."""
    for name, parameter in model_chunk.adapters.named_parameters():
        parameter.data.copy_(_part(values[name.replace("/", ".")], parameter, model_chunk.pg_collection.tp))


def _part(whole: Tensor, parameter: Tensor, group: Any) -> Tensor:
    """This tensor rank's part of a factor."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return whole.chunk(group.size(), parameter.partition_dim)[group.rank()]  # type: ignore[attr-defined]
