"""Checks, before the run, whether its exported model can be uploaded."""

from collections.abc import Iterator

import huggingface_hub

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Problem

KEY = "checkpoint.push_to_hub"


def hub_problems(plan: RunPlan) -> Iterator[Problem]:
    """Yield what is wrong with the token that an upload needs."""
    if huggingface_hub.get_token() is None:
        yield Problem(
            path=KEY,
            found=f'"{plan.recipe.checkpoint.push_to_hub}", without a token of the Hub',
            expected="one that may write there",
            remedy="Set HF_TOKEN, or run: hf auth login",
        )
