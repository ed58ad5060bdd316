"""Checks of the generator's options and model before anything is allocated. Importing this file imports neither torch,
transformers nor SGLang."""

from collections.abc import Iterator, Sequence

from rlcore.spi import CheckContext, Note, Problem
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.settings import OWN_ARGUMENTS
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.huggingface.class_trial import class_problems
from rlcore_torchkit.huggingface.model_check import config_file, model_config, position_problems
from rlcore_torchkit.huggingface.models import architecture_problems

SECTION = "generator.sglang"
UNTRIED = "SGLang was held against references on CPUs alone; on GPUs its log-probabilities have not been"


def check(context: CheckContext, config: SglangConfig) -> Sequence[Problem | Note]:
    """The section's own arguments and what a local model's config.json says; a model on the Hub is checked once loaded."""
    problems = [*argument_problems(config), *architecture_problems(context.model.path)]
    model = model_config(context)
    if model is not None:
        problems += position_problems(model, config_file(context), context.max_sequence_length)
        dims = ModelDims.of(model)
        problems += [] if dims is None else model_problems(dims, config)
        problems = problems or class_problems(context.model, context.head)
    return problems or ([Note(path=SECTION, text=UNTRIED)] if context.device == "cuda" else [])


def argument_problems(config: SglangConfig) -> Iterator[Problem]:
    """Arguments of SGLang's that the table must not name."""
    for name in sorted(config.engine.keys() & OWN_ARGUMENTS):
        yield Problem(
            path=f"{SECTION}.engine.{name}",
            found=repr(config.engine[name]),
            expected="no such key: the generator sets it itself",
            remedy="Remove it; the other keys of the section and the recipe decide it",
        )


def model_problems(dims: ModelDims, config: SglangConfig) -> list[Problem]:
    """Heads that the devices cannot share, and models that were not tried."""
    problems = []
    size = config.tensor_parallel
    if dims.num_heads % size or max(dims.num_kv_heads, size) % min(dims.num_kv_heads, size):
        problems.append(
            Problem(
                path=f"{SECTION}.tensor_parallel",
                found=f"{size}, for {dims.num_heads} heads and {dims.num_kv_heads} of keys and values",
                expected="a number that divides the heads, and that divides those of keys and values or is a multiple of them",
            )
        )
    return problems
