"""What generators check of a request because the model, or the sampler, sets the limit, and mix seeds by; imports no torch."""

import numpy as np
from numpy.typing import NDArray

from rlcore.spi.arrays import Int64Array
from rlcore.spi.errors import ContractError
from rlcore.spi.generator import GenerateRequest, SamplingParams


def check_sampling(sampling: SamplingParams, smallest_temperature: float = 0.0) -> None:
    """ContractError for values that name no distribution; a temperature of 0 always names the most probable token."""
    temperature = sampling.temperature
    bad = [
        f"{name} = {value!r}"
        for name, value, good in (
            ("temperature", temperature, temperature == 0.0 or max(smallest_temperature, 0.0) <= temperature < np.inf),
            ("top_k", sampling.top_k, sampling.top_k >= 0),
            ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0),
            ("stop_strings", sampling.stop_strings, all(sampling.stop_strings)),
        )
        if not good
    ]
    if bad:
        least = f"of 0 or at least {smallest_temperature}" if smallest_temperature else "of at least 0"
        expected = f"a temperature {least}, top_k of at least 0, top_p above 0 and at most 1, no empty stop string"
        raise ContractError(f"generate: found {', '.join(bad)}; expected {expected}")


def sample_limits(request: GenerateRequest, max_sequence_length: int, vocab_size: int) -> Int64Array:
    """int64 [samples]: most tokens of each sample, by `max_tokens` and by the longest sequence.

    ContractError for a prompt with a token that is not in the vocabulary.
    """
    tokens = request.prompts.tokens
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        found = f"token ids from {tokens.min()} to {tokens.max()}"
        raise ContractError(f"generate: found {found}; expected ids from 0 to {vocab_size - 1}")
    return np.minimum(request.max_tokens, max_sequence_length - np.repeat(request.prompts.lengths, request.num_samples))


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A mix of all bits of each number (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
