"""The request for one sample to an endpoint, and the sample as its stream arrives."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from rlcore.spi.arrays import offsets_of
from rlcore_openai.errors import WrongAnswerError

MAX_NATS, TOLERANCE = 1e30, 1e-4
"""Bounds of a log-probability: above -MAX_NATS, and at most TOLERANCE, for rounding."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@frozen(kw_only=True, eq=False)
class CompletionRequest:
    """The request for one sample."""

    number: int
    """Within its request."""
    prompt: Sequence[int]
    seed: int
    max_tokens: int
    sampling: SamplingParams
    conversation: int = -1
    """-1 for none."""

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of a completion. It says whatever a model's generation_config.json may change: from there vLLM's
        server takes what a request leaves out."""
        sampling, is_greedy = self.sampling, self.sampling.temperature == 0.0
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": sampling.temperature,
            "top_p": 1.0 if is_greedy else sampling.top_p,
            "top_k": 0 if is_greedy else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }


@define(kw_only=True, eq=False)
class Sample:
    """One sample, as far as its stream has arrived."""

    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    text: str = ""
    """The tokens' text, by the endpoint's own tokenizer."""
    reason: FinishReason = FinishReason.ABORTED
    vocab_size: int | None = None
    """The number of tokens of the model; None where it is not known."""

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add the tokens of one event of a stream. WrongAnswerError where a part is missing or of another form."""
        tokens, logprobs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
        if not isinstance(tokens, list) or not isinstance(logprobs, list):
            raise WrongAnswerError("token ids or log-probabilities that are no list")
        if choice.get("index", 0) != 0:
            raise WrongAnswerError(f"a choice with the index {choice['index']!r:.40}, where one choice was asked for")
        if len(logprobs) > len(tokens):
            raise WrongAnswerError(f"{len(logprobs)} log-probabilities of {len(tokens)} token ids (return_token_ids)")
        is_text_alone = choice.get("text") and not tokens and not self.tokens  # held text may follow the tokens that it is of
        if len(logprobs) < len(tokens) or is_text_alone:
            lacking = "token ids (return_token_ids)" if len(logprobs) >= len(tokens) else "log-probabilities (logprobs)"
            raise WrongAnswerError(f"an answer without {lacking}")
        if wrong := [one for one in tokens if type(one) is not int or not 0 <= one < (self.vocab_size or 2**31)]:
            below = "" if self.vocab_size is None else f", below {self.vocab_size}, the model's vocabulary"
            raise WrongAnswerError(f"the token id {wrong[0]!r:.40}, where numbers from 0 on are ids{below}")
        if wrong := [one for one in logprobs if type(one) not in (int, float) or not -MAX_NATS < one <= TOLERANCE]:
            raise WrongAnswerError(f"the log-probability {wrong[0]!r:.40}, where finite numbers up to 0.0 are")
        self.tokens += tokens
        self.text += choice.get("text") or ""
        self.logprobs += logprobs
        if (reason := choice.get("finish_reason")) is not None:
            if reason not in REASONS:
                raise WrongAnswerError(f"the finish_reason {reason!r:.40}, none of {', '.join(REASONS)}")
            self.reason = REASONS[reason]

    def has_ended(self, max_tokens: int) -> bool:
        """Return whether its last event has arrived. WrongAnswerError where it is not as long as its reason says."""
        if len(self.tokens) > max_tokens:
            raise WrongAnswerError(f"more than {max_tokens} tokens, the most that were asked for")
        if self.reason is FinishReason.LENGTH and len(self.tokens) < max_tokens:
            raise WrongAnswerError(f"{len(self.tokens)} tokens and the finish_reason length, asked for {max_tokens}")
        if self.reason is FinishReason.STOP and not self.tokens:
            raise WrongAnswerError("an answer without tokens")
        return self.reason is not FinishReason.ABORTED

    def cut(self, stop_token_ids: Sequence[int]) -> "Sample":
        """Return it as it is when its stream ends: one whose stop token has come has ended."""
        if self.reason is FinishReason.ABORTED and self.tokens and self.tokens[-1] in stop_token_ids:
            self.reason = FinishReason.STOP
        return self


def wanted_of(request: GenerateRequest, max_sequence_length: int) -> Iterator[CompletionRequest]:
    """Yield the samples of a request, in order."""
    for number, (seed, limit) in enumerate(zip(request.seeds.tolist(), request.max_tokens.tolist(), strict=True)):
        prompt = request.prompts.sequence(number // request.num_samples).tolist()
        yield CompletionRequest(
            number=number,
            prompt=prompt,
            seed=seed,
            max_tokens=min(limit, max_sequence_length - len(prompt)),
            sampling=request.sampling,
            conversation=-1 if request.conversations is None else int(request.conversations[number]),
        )


def result_of(samples: Sequence[Sample], weight_version: int) -> GenerateResult:
    """Return samples as a generator's result."""
    offsets = offsets_of([len(sample.tokens) for sample in samples])
    return GenerateResult(
        tokens=np.array([token for sample in samples for token in sample.tokens], np.int32),
        offsets=offsets,
        logprobs=np.array([logprob for sample in samples for logprob in sample.logprobs], np.float32),
        weight_versions=np.full(offsets[-1], weight_version, np.int32),
        finish_reasons=np.array([sample.reason for sample in samples], np.uint8),
    )
