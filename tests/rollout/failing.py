"""Steps whose episodes fail, one of each group: a policy that says what a test has written, and what such a step trains on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, frozen

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import (
    ADVANTAGES,
    AlgorithmContext,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Row,
    SamplingParams,
)
from rlcore.spi.arrays import Float32Array, offsets_of
from rlcore.spi.execution import ResponseFeed, Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.config import GrpoConfig
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.failures import Entry, StepEndings, step_entries
from rlcore_rollout.sampler import EpisodeSampler
from rlcore_rollout.step_plans import PromptLimit

from .answering import answer_stream  # type: ignore[import-not-found]

EPSILON = 1e-4
CUT = "…"
"""The end of a text that a limit of tokens cuts off."""


class Phrases(FakeTokenizer):
    """Each text of a list is one token, from 100 on; everything else is that of FakeTokenizer."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts = texts

    def decode(self, tokens: Any) -> str:
        return "".join(self.texts[token - 100] if token >= 100 else super(Phrases, self).decode([token]) for token in tokens)


@define
class Says:
    """A generator that says one text a sample, in the order of the samples. One that ends in CUT has no end."""

    texts: Sequence[str]
    tokenizer: Phrases
    said: int = 0

    def has(self, capability: str) -> bool:
        return False

    def generate(self, request: GenerateRequest) -> Responses:
        number = len(request.seeds)
        chosen = [(self.said + place) % len(self.texts) for place in range(number)]
        self.said += number
        pieces = [[100 + place] * 2 if self.texts[place].endswith(CUT) else [100 + place, 0] for place in chosen]
        reasons = [FinishReason.STOP if piece[-1] == 0 else FinishReason.LENGTH for piece in pieces]
        tokens = np.concatenate([np.array(piece, np.int32) for piece in pieces])
        result = GenerateResult(
            tokens=tokens,
            offsets=offsets_of([len(piece) for piece in pieces]),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            weight_versions=np.full(len(tokens), request.weight_version, np.int32),
            finish_reasons=np.array(reasons, np.uint8),
        )
        return Responses.of(result, self.tokenizer)

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        answer_stream(self.generate, feed)


@frozen(eq=False)
class Step:
    """A step that was sampled and made into a training batch."""

    collected: CollectedRollouts
    entries: Sequence[Entry]
    advantages: Float32Array
    """float32 [N]: of each sample's last token, as GRPO trains on it."""

    def faults(self) -> list[Entry]:
        """The episodes that did not end by the policy alone."""
        return [one for one in self.entries if one.reason]


def step_of(collected: CollectedRollouts) -> Step:
    """The training batch that GRPO makes of samples, and their ledger."""
    context = AlgorithmContext(
        seed=0,
        samples_per_prompt=4,
        minibatches_per_step=1,
        temperature=1.0,
        generation_logprobs_exact=True,
        max_response_tokens=10,
    )
    trained = Grpo(context, GrpoConfig(advantage_epsilon=EPSILON)).build_batch(collected).batch
    return Step(
        collected=collected,
        entries=step_entries(collected, trained, StepEndings()),
        advantages=trained.token_columns[ADVANTAGES][trained.offsets[1:] - 1],
    )


def sampled(
    environment: Any, row: Row, texts: Sequence[str], *, on_error: Any = "mask", timeout_s: float = 60.0, **options: Any
) -> Step:
    """A step of one group, whose samples say these texts to an environment."""
    runner, tokenizer, progress = EpisodeRunner(environment, timeout_s, on_error), Phrases(texts), Progress()
    defaults: dict[str, Any] = {
        "generator": Says(texts, tokenizer),
        "episodes": runner,
        "tokenizer": tokenizer,
        "sampling": SamplingParams(stop_token_ids=(0,)),
        "samples_per_prompt": len(texts),
        "prompt_limit": PromptLimit(max_tokens=400, drops=False, key="data.train"),
        "max_response_tokens": 2,
        "max_turns": 1,
        "max_failed_fraction": 0.5,
        "clock": PhaseClock(progress),
        "progress": progress,
    }
    try:
        return step_of(EpisodeSampler(**{**defaults, **options}).collect([row], 0, seed=[3]))
    finally:
        runner.close()


def expected_advantages(step: Step) -> Any:
    """float64 [N]: (r - mean) / (std + EPSILON) over the samples of the one group that count; 0.0 of the others."""
    first = step.collected.first_sequences
    valid = step.collected.valid[first]
    rewards = step.collected.rewards[first][valid].astype(np.float64)
    found = np.zeros(len(valid))
    if np.ptp(rewards) > 0:
        found[valid] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)
    return found[step.collected.episode_of]
