"""Find an endpoint's abilities by its list of models and one request."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rlcore.schema.suggestions import listed
from rlcore.spi import FinishReason, Problem, SamplingParams
from rlcore_openai.check import SECTION
from rlcore_openai.endpoint import SHOWN, Endpoint
from rlcore_openai.errors import LostAnswerError, WrongAnswerError
from rlcore_openai.samples import CompletionRequest, Sample
from rlcore_openai.tokenizer import Decode, same_text

CERTAIN = -1e-6
"""Log-probability of the only token that may be sampled, up to rounding."""
TOKENS = 16
"""Tokens of the probe, whose text tells tokenizers apart."""


@frozen(kw_only=True)
class Probed:
    """The result of a probe."""

    problems: Sequence[Problem] = ()
    tells_raw: bool = False
    """True where log-probabilities are those of the model, before temperature, top-k and top-p."""


async def probe(endpoint: Endpoint, model: str | None, max_sequence_length: int, decode: Decode, sample: Sample) -> Probed:
    """Set the endpoint's model, and fill `sample` with tokens that are sampled with top-k of 1.

    The log-probability of such a token is 0 where the endpoint reports those after top-k. The tokens' text equals that of
    `decode` where the endpoint has the recipe's tokenizer.
    """
    count = min(TOKENS, max_sequence_length - 1)
    try:
        cards = await endpoint.models()
        if problem := _model_problem(endpoint, cards, model, max_sequence_length):
            return Probed(problems=[problem])
        sampling = SamplingParams(top_k=1)
        await endpoint.complete(CompletionRequest(number=0, prompt=[1], seed=0, max_tokens=count, sampling=sampling), sample)
    except (LostAnswerError, WrongAnswerError) as error:
        expected = "one of vLLM (from 0.10.2 on), of `rlcore serve`, or another that completes prompts of token ids, with seeds"
        remedy = "" if "/v1" in endpoint.url else f"The API is usually at {endpoint.url}/v1."
        return Probed(problems=[_problem(endpoint, f"an endpoint that gives {error}", expected, remedy)])
    if len(sample.tokens) != count or sample.reason is not FinishReason.LENGTH:
        found = f"{len(sample.tokens)} tokens and the finish_reason {sample.reason.name.lower()}, asked for {count}"
        lacking = "" if sample.tokens else ": token ids are what return_token_ids asks for"
        return Probed(problems=[_problem(endpoint, found, f"{count}, cut by their length{lacking}")])
    if not same_text(sample.text, own := decode(sample.tokens)):
        told, read = (f"{text!r:.{SHOWN}}" for text in (sample.text, own[-1]))
        found = f"tokens {sample.tokens} as the text {told}, which by the tokenizer of model.path are {read}"
        remedy = "Set model.path to the model that is served there, or its tokenizer's."
        return Probed(problems=[_problem(endpoint, found, "the tokenizer that the recipe has", remedy)])
    return Probed(tells_raw=sample.logprobs[0] < CERTAIN)


def _model_problem(
    endpoint: Endpoint, cards: Sequence[dict[str, Any]], model: str | None, max_sequence_length: int
) -> Problem | None:
    """Set the endpoint's model, or say why there is none."""
    names = [str(card.get("id")) for card in cards]
    wanted = model if model is not None or len(names) != 1 else names[0]
    if wanted not in names:
        found = f"{model!r}, where {endpoint.url} has {listed([f'{name:.60}' for name in names], 8) or 'none'}"
        return Problem(path=f"{SECTION}.model", found=found, expected="one of the endpoint's models")
    endpoint.model = str(wanted)
    longest = cards[names.index(endpoint.model)].get("max_model_len")
    if isinstance(longest, int) and longest < max_sequence_length:
        found = f"sequences of up to {longest} tokens"
        return _problem(endpoint, found, f"at least {max_sequence_length}, the most that the run has", "Lower [rollout].")
    return None


def _problem(endpoint: Endpoint, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=f"{SECTION}.base_urls", found=f"{endpoint.url}: {found}", expected=expected, remedy=remedy)
