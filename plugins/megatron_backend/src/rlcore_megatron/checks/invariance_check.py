"""Checks that the trainer can compute by batch-invariant kernels; imports no torch."""

from collections.abc import Iterator

from attrs import evolve

from rlcore.spi import CheckContext, Problem
from rlcore_megatron.layouts.layout_check import SECTION, invariant_size_problems, option_problem
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.huggingface.batch_invariance import invariance_problems

OPTION = f"{SECTION}.batch_invariant"
OTHERWISE = {"transformer_engine": (None, False), "fp8": (False,), "mtp": (False,), "transformer": ({},)}
"""The values that other options may have: with others, other kernels compute."""


def batch_invariance_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Return all problems, of the policy and of the model in [reference]; none where the option is off."""
    parts = config.batch_invariant_parts
    if not config.batch_invariant:
        if parts > 1:
            yield option_problem("batch_invariant_parts", f"{parts}, without batch_invariant", "1", f"Or set {OPTION} to true")
        return
    remedy = f"Or set {OPTION} to false"
    for option, allowed in OTHERWISE.items():
        found = getattr(config, option)
        if found not in allowed:
            said = f"{found}".lower() if isinstance(found, bool) else ", ".join(found)
            yield option_problem(option, f"{said}, with batch_invariant", f"{allowed[-1] or 'nothing'}".lower(), remedy)
    yield from invariant_size_problems(config, context.world_size)
    if context.lora is not None:
        yield option_problem("batch_invariant", "true, with [lora]", "false", "Adapters compute beside layers by other kernels")
    problems = list(invariance_problems(OPTION, context, parts))
    yield from problems
    if context.reference is not None:
        others = invariance_problems(OPTION, evolve(context, model=context.reference, reference=None), parts)
        yield from (problem for problem in others if problem not in problems)
