"""Plugins of benchmarks/headline.py: generators that force each sample's length, and an environment that
reports the work of attention."""

import hashlib
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from attrs import evolve, frozen
from letters_environment import LettersConfig, LettersEnvironment
from response_lengths import lengths_of

from rlcore.spi import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Provider,
    ResetResult,
    Row,
    SampleFeed,
    StepResult,
    StreamRequest,
    StreamResult,
    Turn,
    hookimpl,
)
from rlcore.spi.arrays import Int32Array, Int64Array

MEAN_TOKENS = 795
"""Of the published figures that the headline is compared with."""
CUT = Path(tempfile.gettempdir()) / "rlcore-headline-cut"
LIMIT = 3946
"""Most tokens of a response there; with another limit, all lengths shrink or grow with it."""


class FeedWithLengths:
    """A stream's feed, with lengths of a long tail in place of one limit for all: each sample's follows from its seed. Each
    counts as a finished answer, unless the stream's end cuts it: it then has the rest of its length in the next stream, on
    whichever generator of the machine."""

    def __init__(self, feed: SampleFeed) -> None:
        self._feed = feed
        self.end = feed.end
        self._taken: list[tuple[Int32Array, int]] = []
        """The prompt and the length of each sample."""
        CUT.mkdir(exist_ok=True)

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        taken = self._feed.take(wait=wait)
        return None if taken is None else [self._with_lengths(request) for request in taken]

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        is_cut = result.finish_reasons == FinishReason.ABORTED
        for row in np.flatnonzero(is_cut).tolist():
            prompt, length = self._taken[int(samples[row])]
            said = result.tokens[result.offsets[row] : result.offsets[row + 1]]
            _file_of(np.concatenate([prompt, said])).write_text(str(length - len(said)))
        reasons = np.where(is_cut, result.finish_reasons, FinishReason.STOP).astype(np.uint8)
        self._feed.deliver(samples, evolve(result, finish_reasons=reasons))

    def _with_lengths(self, request: GenerateRequest) -> GenerateRequest:
        limit = int(request.max_tokens.max(initial=1))
        lengths = lengths_of(request.seeds, mean=MEAN_TOKENS * limit / LIMIT, limit=limit).astype(np.int32)
        for number in range(request.prompts.num_sequences):
            prompt = request.prompts.sequence(number)
            rest = _file_of(prompt)
            if request.num_samples == 1 and rest.exists():
                lengths[number] = int(rest.read_text())
                rest.unlink()
            samples = slice(number * request.num_samples, (number + 1) * request.num_samples)
            self._taken += [(prompt, length) for length in lengths[samples].tolist()]
        return evolve(request, max_tokens=np.minimum(lengths, request.max_tokens))


def _file_of(tokens: Int32Array) -> Path:
    """The file with the rest of the length of a sample that begins with these tokens."""
    return CUT / hashlib.sha256(tokens.tobytes()).hexdigest()


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


@cache
def __getattr__(name: str) -> Any:
    """An installed generator, or with `_BACKEND` its class, but for the lengths. One of the two may not be installed."""
    generator, is_backend = name.removesuffix("_BACKEND"), name.endswith("_BACKEND")
    if generator not in ("VLLM", "TRANSFORMERS"):
        raise AttributeError(name)
    (entry,) = entry_points(group="rlcore.generators", name=generator.lower())
    installed = entry.load()
    if not is_backend:
        return evolve(installed, name=f"headline_{installed.name}", backend=f"headline_plugins:{generator}_BACKEND")

    class Headline(resolve_name(installed.backend)):  # type: ignore[misc]
        @hookimpl
        def stream(self, request: StreamRequest) -> StreamResult:
            return super().stream(evolve(request, feed=FeedWithLengths(request.feed)))

    return Headline


ENVIRONMENT = Provider(name="headline", spi=(2, 0), config=HeadlineConfig, backend="headline_plugins:HeadlineEnvironment")
