"""What benchmarks/headline.py installs beside the plugins: generators that force each sample's length, and an environment that
reports the work of attention."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from attrs import evolve, frozen
from letters_environment import LettersConfig, LettersEnvironment
from response_lengths import lengths_of

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, Provider, ResetResult, Row, StepResult, Turn

MEAN_TOKENS = 795
"""Of the published figures that the headline is compared with."""
LIMIT = 3946
"""Most tokens of a response there; with another limit, all lengths shrink or grow with it."""


def with_lengths(generate: Callable[[GenerateRequest], GenerateResult], request: GenerateRequest) -> GenerateResult:
    """Generate with lengths of a long tail in place of one limit for all: each sample's follows from its seed. Each counts as a
    finished answer."""
    limit = int(request.max_tokens.max())
    lengths = lengths_of(request.seeds, mean=MEAN_TOKENS * limit / LIMIT, limit=limit)
    result = generate(evolve(request, max_tokens=lengths.astype(np.int32)))
    return evolve(result, finish_reasons=np.full_like(result.finish_reasons, FinishReason.STOP))


@frozen(kw_only=True)
class HeadlineConfig(LettersConfig):
    """`[environment.headline]`"""


class HeadlineEnvironment(LettersEnvironment):
    """Environment `headline`: random prompts and rewards."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        result = await super().reset(row, seed)
        return evolve(result, state=len(row["prompt"]))

    async def step(self, state: Any, turn: Turn) -> StepResult:
        result = await super().step(state, turn)
        return evolve(result, metrics={"squared_length": float((state + len(turn.tokens)) ** 2)})


def _generator(name: str) -> Provider:
    """The installed generator, but for the lengths."""
    (installed,) = entry_points(group="rlcore.generators", name=name)
    return evolve(installed.load(), name=f"headline_{name}", backend=f"headline_{name}:Headline")


def __getattr__(name: str) -> Provider:
    # One of the two may not be installed.
    if name in ("VLLM", "TRANSFORMERS"):
        return _generator(name.lower())
    raise AttributeError(name)


ENVIRONMENT = Provider(name="headline", spi=(2, 0), config=HeadlineConfig, backend="headline_plugins:HeadlineEnvironment")
