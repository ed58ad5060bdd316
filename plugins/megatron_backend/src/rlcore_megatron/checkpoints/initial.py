"""The initial weights of a run."""

from collections.abc import Sequence
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.spi import Head, ModelSpec
from rlcore_megatron.checkpoints import conversion, distributed_weights
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.weights.load import load_hf, load_multi_token_head


def load_initial(
    model_chunks: Sequence[Any],
    hf: Any,
    spec: ModelSpec,
    config: MegatronConfig,
    layout: ParallelLayout,
    head: Head = "tokens",
    *,
    mtp: bool = False,
) -> None:
    """Fill the model chunks, together with all other ranks.

    They come from the Megatron checkpoint that the recipe names, or else from the model at `spec`, by way of what is kept
    of it in Megatron's format if the recipe says so; those of the multi-token head, where `mtp` says that there is one, from
    the model.
    """
    if config.pretrained_checkpoint is not None:
        distributed_weights.read(expanded(config.pretrained_checkpoint), model_chunks)
    elif config.conversion_cache:
        conversion.load(model_chunks, hf, spec, layout)
    else:
        load_hf(model_chunks, hf, spec, layout, head)
    if mtp:
        load_multi_token_head(model_chunks, hf, spec, layout)
