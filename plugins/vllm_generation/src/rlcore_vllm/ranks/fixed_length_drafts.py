"""Pads n-gram drafts to a fixed length, so that each step of speculative decoding is one CUDA graph.

vLLM has graphs of whole steps only for sequences that all bring the same number of tokens. Where n-grams find no match they
guess fewer, and the step falls back to a graph a layer with the attention launched from the host in between: measured on an
H100 with an 8B shape and four sequences, the device is then busy for a quarter of the time. Tokens that nothing speaks for cost
next to nothing, since a step of few sequences reads all weights whatever it computes; they are refused like any wrong guess.
"""

import importlib
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def fill(drafts: Tensor, num_valid: Tensor, last: Tensor, has_sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Guess the last token again wherever nothing was guessed.

    `drafts` int [S, K] with -1 where nothing is guessed, `num_valid` int [S] how many tokens of each row are, `last` int [S]
    the last token of each sequence, `has_sampled` bool [S] false where the prompt is not through. Returns the first two anew.
    """
    filled = torch.where(drafts < 0, last[:, None].to(drafts.dtype), drafts)
    return filled, torch.where(has_sampled, torch.full_like(num_valid, drafts.shape[1]), num_valid)


def use_fixed_length_drafts(proposer: Any = None) -> None:
    """Have the class that guesses on the device, vLLM's NgramProposerGPU, fill its guesses."""
    proposer = proposer or importlib.import_module("vllm.v1.spec_decode.ngram_proposer_gpu").NgramProposerGPU
    if hasattr(proposer.propose, "__wrapped__"):
        return
    propose = proposer.propose

    @wraps(propose)
    def propose_whole(
        self: Any, num_speculative_tokens: int, num_tokens: Tensor, tokens: Tensor, sampled: Tensor, num_sampled: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafts, num_valid = propose(self, num_speculative_tokens, num_tokens, tokens, sampled, num_sampled)
        last = (num_tokens + num_sampled - 1).clamp(0, tokens.shape[1] - 1).long()
        return fill(drafts, num_valid, tokens.gather(1, last[:, None])[:, 0], num_sampled > 0)

    proposer.propose = propose_whole
