"""The entry points: describe trainer and generator without importing MLX."""

import sys
from importlib.util import find_spec
from pathlib import Path

from attrs import evolve, frozen

from rlcore.schema.constraints import Positive
from rlcore.spi import Provider

INSTALL = 'pip install mlx on a Mac, pip install "mlx[cpu]" on Linux'


@frozen(kw_only=True)
class MlxTrainerConfig:
    """`[trainer.mlx]`: one device, AdamW on float32 weights."""

    max_chunk_logits: Positive = 2**24
    """Logits that exist at once: log-probabilities are computed in chunks of so many numbers, and again for the gradient."""


@frozen(kw_only=True)
class MlxGeneratorConfig:
    """`[generator.mlx]`: batches of samples, one token of each at a time, with a KV cache."""

    max_batch_size: Positive = 256
    """Samples decoded at the same time; others wait until all of these have ended."""


def unavailable() -> str | None:
    """Name what keeps MLX from being imported here, with the remedy, or None."""
    found = find_spec("mlx")
    if found is None:
        return f"mlx is not installed: {INSTALL}"
    folders = map(Path, found.submodule_search_locations or ())
    if sys.platform == "linux" and not any((folder / "lib" / "libmlx.so").exists() for folder in folders):
        return f"mlx is installed without the library that computes: {INSTALL}"
    return None


TRAINS = {
    *("reference_policy", "reference_model", "entropy", "save_hf", "metric_bounds", "previous_logprobs", "step_logprobs"),
    *("schedule_step", "refit.in_process"),
}
SAMPLES = {"top_k", "top_p", "per_sample_seeds", "exact_logprobs", "streaming", "own_weights", "refit.in_process"}
TRAINER = Provider(
    name="mlx",
    spi=(2, 0),
    priority=10,
    devices={"cpu"},
    dtypes={"float32", "bfloat16"},
    capabilities=TRAINS,
    config=MlxTrainerConfig,
    unavailable=unavailable,
    check="rlcore_mlx.check:check",
    backend="rlcore_mlx.trainer:MlxTrainer",
)
"""The trainer; Macs' GPUs are no device of a recipe, and MLX takes them by itself."""
GENERATOR = evolve(TRAINER, capabilities=SAMPLES, config=MlxGeneratorConfig, backend="rlcore_mlx.generator:MlxGenerator")
"""The generator, of the same models."""
