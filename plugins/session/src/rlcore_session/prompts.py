"""Prompts and options of sampling, checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.spi import GenerateRequest, Problem, RaggedTokens, SamplingParams, Tokenizer, capabilities
from rlcore.spi.execution import GeneratorGroup
from rlcore_session.batches import Limits, token_array
from rlcore_session.errors import not_held, require_none

NUM_SEEDS = 2**62
LEAST_TEMPERATURE = 1e-5
"""The least temperature besides 0: logits that are divided by less are infinite."""


@frozen(kw_only=True)
class SampleOptions:
    """The options of one call; None is what [rollout] says."""

    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    adapter: str | None = None
    """The adapter that samples; None is that of the last sync."""


@frozen(kw_only=True, eq=False)
class Requests:
    """Makes the requests of a session's calls."""

    recipe: Recipe
    tokenizer: Tokenizer
    limits: Limits
    generator: GeneratorGroup
    adapters: Callable[[], Mapping[str, int]] | None
    """Returns the version of each adapter that the generator holds; None where it holds one alone."""

    def request(self, prompts: Any, options: SampleOptions, number: int) -> GenerateRequest:
        """The request of the session's call of a number. CallError with all that is wrong."""
        found = list(self._option_problems(options))
        tokens = list[list[int]]()
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence) or not prompts:
            expected = "a list of texts, of chats, or of lists of token ids"
            kind = "an empty list" if isinstance(prompts, list | tuple) else f"a {type(prompts).__name__}"
            found.append(Problem(path="prompts", found=kind, expected=expected, remedy="Write a single prompt as [prompt]."))
        else:
            for index, prompt in enumerate(prompts):
                ids, problems = self._tokens(f"prompts[{index}]", prompt, options.max_tokens)
                found += problems
                tokens.append(ids)
        require_none(found)
        seed = [self.recipe.run.seed, number] if options.seed is None else [int(options.seed)]
        num_samples = len(tokens) * options.num_samples
        lengths = np.array([self._max_tokens(ids, options) for ids in tokens], np.int32)
        return GenerateRequest(
            prompts=RaggedTokens.from_lists(tokens),
            num_samples=int(options.num_samples),
            seeds=np.random.default_rng(seed).integers(NUM_SEEDS, size=num_samples),
            max_tokens=np.repeat(lengths, options.num_samples),
            sampling=self._sampling(options),
            weight_version=0,
        )

    def _max_tokens(self, prompt: Sequence[int], options: SampleOptions) -> int:
        room = self.limits.max_sequence_length - len(prompt)
        return min(self.recipe.rollout.max_response_tokens, room) if options.max_tokens is None else options.max_tokens

    def _tokens(self, path: str, prompt: Any, max_tokens: int | None) -> tuple[list[int], list[Problem]]:
        """The tokens of a prompt, and what is wrong with it."""
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            ids = [*tokenizer.prompt_prefix, *tokenizer.encode(prompt)]
        elif isinstance(prompt, Sequence) and len(prompt) and all(isinstance(message, Mapping) for message in prompt):
            ids = tokenizer.encode(tokenizer.render_chat(prompt))
        else:
            found = token_array(prompt) if isinstance(prompt, Sequence | np.ndarray) else None
            if found is None:
                expected = "a text, a list of messages, or a list of token ids"
                return [], [Problem(path=path, found=f"a {type(prompt).__name__}", expected=expected)]
            ids = found.tolist()
        if not ids:
            return [], [Problem(path=path, found="no token", expected="one at least")]
        problems = list(self.limits.unknown_tokens(path, np.asarray(ids)))
        most, asked = self.limits.max_sequence_length, 1 if max_tokens is None else max_tokens
        if len(ids) + asked > most:
            expected = f"at most {most} together (rollout.max_prompt_tokens + rollout.max_response_tokens)"
            found_ = f"{len(ids)} tokens, and {asked} to follow"
            problems.append(Problem(path=path, found=found_, expected=expected, remedy="Shorten it, or raise one of the two."))
        return ids, problems

    def _option_problems(self, options: SampleOptions) -> Iterator[Problem]:
        value: Any
        bounds: dict[str, tuple[Any, Any, float, float]] = {
            "num_samples": (options.num_samples, Integral, 1, 2**20),
            "max_tokens": (options.max_tokens, Integral, 1, 2**31 - 1),
            "temperature": (options.temperature, Real, 0, np.inf),
            "top_k": (options.top_k, Integral, 0, 2**31 - 1),
            "top_p": (options.top_p, Real, 0, 1),
            "seed": (options.seed, Integral, 0, np.inf),
        }
        for name, (value, kind, low, high) in bounds.items():
            if value is None and name != "num_samples":
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high or value == np.inf:
                expected = (
                    f"{'an integer' if kind is Integral else 'a number'} from {low}{f' to {high}' if high < np.inf else ' on'}"
                )
                yield Problem(path=name, found=repr(value), expected=expected)
            elif name == "temperature" and 0 < value < LEAST_TEMPERATURE:
                yield Problem(path=name, found=repr(value), expected=f"0, or at least {LEAST_TEMPERATURE:g}")
            elif name == "top_p" and value == 0:
                yield Problem(path=name, found="0", expected="above 0; 1.0 samples from all tokens")
        stops = [options.stop] if isinstance(options.stop, str) else options.stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) and text for text in stops):
            yield Problem(path="stop", found=repr(options.stop), expected="a text, or a list of texts that are not empty")
        if options.adapter is not None:
            yield from self._adapter_problems(options.adapter)
        ids = options.stop_token_ids or ()
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in ids):
            yield Problem(path="stop_token_ids", found=repr(ids), expected="a list of token ids of int32")
        needs = {
            "seed": (options.seed is not None, capabilities.PER_SAMPLE_SEEDS),
            "top_k": (bool(options.top_k), capabilities.TOP_K),
            "top_p": (options.top_p not in (None, 1), capabilities.TOP_P),
            "stop": (bool(stops), capabilities.STOP_STRINGS),
        }
        for name, (is_asked, capability) in needs.items():
            if is_asked and not self.generator.has(capability):
                found = f"{getattr(options, name)!r}, with a generator without the capability `{capability}`"
                yield Problem(path=name, found=found, expected="no such argument, or a generator that has it")

    def _adapter_problems(self, adapter: Any) -> Iterator[Problem]:
        if self.adapters is None:
            found = f"{adapter!r:.80}, with a generator that holds the weights of the last sync alone"
            expected = 'no such argument, or refit.adapters = "unmerged" and a generator with the capability `many_adapters`'
            yield Problem(path="adapter", found=found, expected=expected)
        elif self.adapters().get(adapter, -1) < 0:
            yield not_held(adapter, self.adapters())

    def _sampling(self, options: SampleOptions) -> SamplingParams:
        rollout = self.recipe.rollout
        stops = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
        own_ids = self.tokenizer.stop_token_ids if rollout.stop_token_ids is None else rollout.stop_token_ids
        return SamplingParams(
            temperature=rollout.temperature if options.temperature is None else float(options.temperature),
            top_k=rollout.top_k if options.top_k is None else int(options.top_k),
            top_p=rollout.top_p if options.top_p is None else float(options.top_p),
            stop_token_ids=own_ids if options.stop_token_ids is None else tuple(options.stop_token_ids),
            stop_strings=tuple(dict.fromkeys([*rollout.stop_strings, *stops])),
        )
