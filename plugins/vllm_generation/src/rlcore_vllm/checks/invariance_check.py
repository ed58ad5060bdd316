"""Checks that an engine can compute each token by the same instructions in every batch; imports no torch."""

from collections.abc import Iterator

from rlcore.spi import CheckContext, Problem
from rlcore_torchkit.huggingface.batch_invariance import invariance_problems
from rlcore_vllm.setup.config import VllmConfig

SECTION = "generator.vllm"
OPTION = f"{SECTION}.batch_invariant"
OTHERWISE = {
    "quantization": "none",
    "kv_cache_dtype": "auto",
    "speculative_ngram": 0,
    "speculative_model": None,
}
"""The values that other options need: with others, other kernels compute."""
DECIDED = (
    "attention_backend",
    "attention_config",
    "compilation_config",
    "decode_context_parallel_size",
    "hf_overrides",
    "optimization_level",
)
"""Arguments of the table `engine` that choose kernels, or change the model that they are for."""


def batch_invariance_problems(context: CheckContext, config: VllmConfig) -> Iterator[Problem]:
    """Return all problems of the option; none where it is off."""
    if not config.batch_invariant:
        return
    remedy = f"Or set {OPTION} to false"
    for option, needed in OTHERWISE.items():
        found = getattr(config, option)
        if found != needed:
            expected = "nothing" if needed is None else f"{needed}"
            yield Problem(path=f"{SECTION}.{option}", found=f"{found}, with batch_invariant", expected=expected, remedy=remedy)
    for key in DECIDED:
        if key in config.engine:
            yield Problem(
                path=f"{SECTION}.engine.{key}", found="the key, with batch_invariant", expected="no such key", remedy=remedy
            )
    if context.generator_lora is not None:
        expected = '"merged", with batch_invariant'
        yield Problem(path="refit.adapters", found="unmerged adapters", expected=expected, remedy=remedy)
    yield from invariance_problems(OPTION, context)
