"""Elements of the optimizer's shards by the tensors of the files that they belong to, with each tensor's settings."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from attrs import evolve, frozen
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore.spi import OptimizerSpec
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.model import unwrapped
from rlcore_megatron.training.optimizer_shards import parts_of
from rlcore_megatron.weights.element_runs import Run, element_runs
from rlcore_torchkit.optimizer.settings import TensorSettings, tensor_settings


@frozen(kw_only=True, eq=False)
class Elements:
    """Elements `first` to `beyond` - 1 of a shard, all of one tensor of the files."""

    run: Run
    settings: TensorSettings
    first: int
    beyond: int


@frozen(kw_only=True, eq=False)
class ShardElements:
    """All elements of one shard: what this rank's optimizer updates of a parameter."""

    key: Tensor
    """[n], which the optimizer updates and keeps its state by."""
    width: int
    """Elements of a row of this rank's parameter."""
    whole_width: int
    """Elements of a row of the parameter that all tensor ranks share."""
    first: int
    """The number of the shard's first element among the parameter's."""
    elements: Sequence[Elements]
    settings: Sequence[TensorSettings]
    """Settings of every tensor in the parameter, whichever rank has its elements: all ranks keep the same kinds of state."""
    outside_muon: Sequence[str]
    """Matrices in the parameter that a group trains with AdamW in place of Muon."""

    @property
    def num_rows(self) -> int:
        """Return the number of the parameter's rows that the shard has elements of."""
        return self.row(len(self.key) - 1) + 1

    def row(self, element: int) -> int:
        """Return the row of one of the shard's elements, counted from that of its first."""
        return (self.first + element) // self.width - self.first // self.width

    def keeps(self, method: str, *, eight_bit: bool = False) -> bool:
        """Return whether the parameter has a tensor that this method trains, with moments in 8 bits or without."""
        return any((one.method, one.eight_bit) == (method, eight_bit) for one in self.settings)


def elements_of(
    models: Sequence[Any], optimizer: MegatronOptimizer, names: Sequence[Names], layout: ParallelLayout, spec: OptimizerSpec
) -> list[list[ShardElements]]:
    """Return the shards of each of `parts_of(optimizer)`, whose parameters have the tensors that `names` say."""
    sources = _sources(models, names, layout)
    return [list(_of_part(part, sources, layout, spec)) for part in parts_of(optimizer)]


def settings_of(tensor: HfTensor, source: Source, spec: OptimizerSpec) -> TensorSettings:
    """Return the settings of the tensor of the files that `tensor` is, or is in."""
    return tensor_settings(spec, tensor.file_name, tensor.file_shape, in_layers=source.layer is not None)


def _is_outside_muon(tensor: HfTensor, source: Source, spec: OptimizerSpec) -> bool:
    """Return whether Muon would train a tensor if no group said otherwise."""
    methods = [settings_of(tensor, source, each).method for each in (spec, evolve(spec, groups=()))]
    return methods == ["adamw", "muon"]


def _sources(models: Sequence[Any], names: Sequence[Names], layout: ParallelLayout) -> dict[int, Source]:
    """The source of each parameter, by its identity."""
    return {
        id(chunk.get_parameter(name)): source
        for each in reversed(names)  # the first of them counts where several have a parameter
        for chunk in unwrapped(models)
        for name, source in each.of_model_chunk(chunk, layout.expert_rank, layout.expert).items()
    }


def _of_part(part: Any, sources: Mapping[int, Source], layout: ParallelLayout, spec: OptimizerSpec) -> Iterator[ShardElements]:
    for parameter, (group, order) in part.model_param_group_index_map.items():
        own, source = part._get_model_param_range_map(parameter)["param"], sources[id(parameter)]
        settings = {tensor.name: settings_of(tensor, source, spec) for tensor in source.tensors}
        elements = [
            Elements(run=run, settings=settings[run.tensor.name], first=run.first - own.start, beyond=run.beyond - own.start)
            for run in element_runs(source, layout, own.start, own.end)
        ]
        yield ShardElements(
            key=part.optimizer.param_groups[group]["params"][order],
            width=parameter[0].numel(),
            whole_width=prod(source.tensors[0].shape[1:]),
            first=own.start,
            elements=elements,
            settings=list(settings.values()),
            outside_muon=[tensor.file_name for tensor in source.tensors if _is_outside_muon(tensor, source, spec)],
        )
