"""The initial weights of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.spi import ModelSpec
from rlcore_megatron import conversion, distributed_weights
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.layout import ParallelLayout
from rlcore_megatron.load import load_hf


def load_initial(parts: Sequence[Any], hf: Any, spec: ModelSpec, config: MegatronConfig, layout: ParallelLayout) -> None:
    """Fill the parts, together with all other ranks: from the Megatron checkpoint that the recipe names, else from the model at
    `spec`, by way of what is kept of it in Megatron's format if the recipe says so."""
    if config.checkpoint is not None:
        distributed_weights.read(Path(config.checkpoint).expanduser(), parts)
    elif config.conversion_cache:
        conversion.load(parts, hf, spec, layout)
    else:
        load_hf(parts, hf, spec, layout)
