"""The norm of each exported tensor's gradient, over all ranks, from the parts that ranks have reduced."""

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.training.optimizer_shards import parts_of
from rlcore_megatron.weights.element_runs import element_runs
from rlcore_megatron.weights.export import Exporter
from rlcore_megatron.weights.parameter_rows import tensor_rank_and_size
from rlcore_torchkit.optimizer.gradient_norms import squared_sum


@torch.no_grad()
def gradient_norms(
    exporter: Exporter, optimizer: MegatronOptimizer, layout: ParallelLayout, device: torch.device
) -> dict[str, float]:
    """The L2 norm of the gradient of each of the exporter's tensors that trains, the same on each rank. A collective.

    A rank adds up the squares of the elements that its optimizer updates: of these alone its buffers hold the sum over ranks,
    and no other rank with the same part of the model has them. A tensor that tensor ranks hold whole counts on the first of
    them, and one that several stages hold on the first stage.
    """
    places = {spec.name: place for place, spec in enumerate(exporter.specs("float32"))}
    squares, num_elements = torch.zeros(2, len(places), dtype=torch.float64, device=device).unbind()
    sources = exporter.sources_by_parameter()
    for part in parts_of(optimizer):
        for parameter in part.model_param_group_index_map:
            source = sources.get(id(parameter))
            if source is None:  # another stage's, or the multi-token head's
                continue
            own, (rank, _) = part._get_model_param_range_map(parameter)["param"], tensor_rank_and_size(source, layout)
            gradient = parameter.main_grad.view(-1)
            for run in element_runs(source, layout, own.start, own.end):
                if rank == 0 or run.tensor.tp_dim is not None:
                    squares[places[run.tensor.file_name]] += squared_sum(gradient[run.first : run.beyond])
                    num_elements[places[run.tensor.file_name]] += run.beyond - run.first
    figures = torch.stack([squares, num_elements])
    if layout.world_size > 1:
        dist.all_reduce(figures)
    roots, trained = figures[0].sqrt().tolist(), figures[1].tolist()
    return {name: roots[place] for name, place in places.items() if trained[place]}
