"""Reads default sampling parameters from a model's generation_config.json."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlcore.model_files import read_object
from rlcore.spi import ModelError, Problem, SamplingParams, capabilities

_NEEDS = {"temperature": None, "top_k": capabilities.TOP_K, "top_p": capabilities.TOP_P}
"""The keys that are taken over, and what a generator needs for them."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("repetition_penalty", "encoder_repetition_penalty", "typical_p", "top_h", "num_beams", "guidance_scale"), (1,)
    ),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_p", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("stop_strings", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("constraints", "force_words_ids", "watermarking_config"), ([], {})),
}
"""Keys that no generator of rlcore supports, each with its neutral values besides null."""


def sampling_defaults(file: Path | None, able: Collection[str]) -> tuple[SamplingParams, list[str]]:
    """Return the distribution that a generation_config.json asks for, as far as a generator that is `able` to do these things
    can, and a sentence for each key that it cannot follow. ModelError where the file holds what is none."""
    if file is None:
        return SamplingParams(), []
    content = read_object(file)
    if isinstance(content, Problem):
        raise ModelError([content])
    stated = {name: value for name in _NEEDS if (value := content.get(name)) is not None}
    problems = [
        Problem(path=str(file), found=f"{name} = {value!r:.40}", expected="a number such as transformers takes")
        for name, value in stated.items()
        if not _is_valid(name, value)
    ]
    if problems:
        raise ModelError(problems)
    taken = {name: value for name, value in stated.items() if (need := _NEEDS[name]) is None or need in able}
    passed_over = sorted(stated.keys() - taken.keys())
    passed_over += [
        name for name, neutral in _NEUTRAL.items() if content.get(name) is not None and content[name] not in neutral
    ]
    notes = [f"{file.name} says {name} = {content[name]}, which the generator does not do" for name in passed_over]
    return SamplingParams(**taken), notes


def _is_valid(name: str, value: Any) -> bool:
    if name == "top_k":
        return type(value) is int and value >= 0
    return type(value) in (int, float) and (0 < value <= 1 if name == "top_p" else value >= 0)
