"""Checks that the trainer can compute by batch-invariant kernels; imports no torch."""

from collections.abc import Iterator

from attrs import evolve

from rlcore.spi import CheckContext, Problem
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.layout_check import SECTION, option_problem
from rlcore_torchkit.huggingface.batch_invariance import invariance_problems

OPTION = f"{SECTION}.batch_invariant"
OTHERWISE = {"tensor_parallel": 1, "context_parallel": 1, "fp8": False, "compile_layers": False}
"""The values that other options need: each of them computes layers or attention in another way."""


def batch_invariance_problems(context: CheckContext, config: Fsdp2Config) -> Iterator[Problem]:
    """Return all problems, of the policy and of the model in [reference]; none where the option is off."""
    if not config.batch_invariant:
        if config.batch_invariant_parts > 1:
            found = f"{config.batch_invariant_parts}, without batch_invariant"
            yield option_problem("batch_invariant_parts", found, "1", f"Or set {OPTION} to true")
        return
    for option, needed in OTHERWISE.items():
        found = getattr(config, option)
        if found != needed:
            yield option_problem(
                option, f"{found}, with batch_invariant".lower(), f"{needed}".lower(), f"Or set {OPTION} to false"
            )
    if context.lora is not None:
        yield option_problem("batch_invariant", "true, with [lora]", "false", "Adapters compute beside layers by other kernels")
    problems = list(invariance_problems(OPTION, context, config.batch_invariant_parts))
    yield from problems
    if context.reference is not None:
        other = evolve(context, model=context.reference, reference=None)
        others = invariance_problems(OPTION, other, config.batch_invariant_parts)
        yield from (problem for problem in others if problem not in problems)
