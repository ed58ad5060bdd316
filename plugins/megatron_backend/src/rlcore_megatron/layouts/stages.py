"""Division of layers among the parts of a pipeline; imports no torch."""

from rlcore_megatron.setup.config import MegatronConfig


def layers_of_parts(config: MegatronConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of each part, in the order in which tokens pass them: of the first part of each stage, then of the second of each.
    The sizes in `config` are all numbers.

    `config.pipeline_layers`, unless that is of a model with another number of layers, as a reference may be. Else equally many;
    of those left over the parts in between get one each, and then the first: it has the embedding, and the last has the head.
    """
    if config.pipeline_layers != "even" and sum(config.pipeline_layers) == num_layers:
        return tuple(config.pipeline_layers)
    num_parts = int(config.pipeline_parallel) * config.virtual_pipeline_parallel
    each, left = divmod(num_layers, num_parts)
    favoured = [*range(1, num_parts - 1), 0, num_parts - 1][:left]
    return tuple(each + (part in favoured) for part in range(num_parts))


def layer_numbers_of_stages(config: MegatronConfig, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of all parts of each stage, counted from 0."""
    parts, stages = layers_of_parts(config, num_layers), int(config.pipeline_parallel)
    runs = [range(sum(parts[:number]), sum(parts[: number + 1])) for number in range(len(parts))]
    return tuple(tuple(layer for run in runs[stage::stages] for layer in run) for stage in range(stages))


def layers_of_stages(config: MegatronConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of all parts of each stage, as `layers_of_parts` divides them."""
    parts, stages = layers_of_parts(config, num_layers), int(config.pipeline_parallel)
    return tuple(sum(parts[stage::stages]) for stage in range(stages))
