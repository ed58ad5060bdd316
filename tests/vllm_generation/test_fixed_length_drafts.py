"""Guesses by n-grams are filled up to the same number of tokens in every step."""

from typing import Any

import torch
from torch import Tensor

from rlcore_vllm.ranks.fixed_length_drafts import use_fixed_length_drafts

PADDING = 7


class Proposer:
    """As vLLM's: writes what was sampled into the sequences, and guesses the two tokens behind the first 5, if there is one."""

    def propose(
        self, num_speculative_tokens: int, num_tokens: Tensor, tokens: Tensor, sampled: Tensor, num_sampled: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafts = torch.full((len(tokens), num_speculative_tokens), -1, dtype=torch.int32)
        num_valid = torch.zeros(len(tokens), dtype=torch.int32)
        for row, (start, count) in enumerate(zip(num_tokens.tolist(), num_sampled.tolist(), strict=True)):
            tokens[row, start : start + count] = sampled[row, :count]
            found = (tokens[row, : start + count] == 5).nonzero()
            if count and len(found):
                guess = tokens[row, found[0, 0] + 1 : found[0, 0] + 3]
                drafts[row, : len(guess)], num_valid[row] = guess, len(guess)
        return drafts, num_valid


def test_what_is_not_guessed_is_the_last_token_again_and_counts_where_the_prompt_is_through() -> None:
    proposer: Any = type("Own", (Proposer,), {"propose": Proposer.propose})
    use_fixed_length_drafts(proposer)
    use_fixed_length_drafts(proposer)  # a second time changes nothing
    tokens = torch.full((3, 8), PADDING, dtype=torch.int32)
    tokens[0, :3] = torch.tensor([5, 1, 2])
    tokens[1, :2] = torch.tensor([3, 4])
    tokens[2, :2] = torch.tensor([5, 6])
    sampled = torch.tensor([[8, 9, -1], [6, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    drafts, num_valid = proposer().propose(3, torch.tensor([3, 2, 2]), tokens, sampled, torch.tensor([2, 1, 0]))
    assert drafts.tolist() == [[1, 2, 9], [6, 6, 6], [6, 6, 6]]
    assert num_valid.tolist() == [3, 3, 0]


def test_vllms_own_proposer_has_the_arguments_that_are_wrapped() -> None:
    import inspect

    from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

    names = ["self", "num_speculative_tokens", "num_tokens_no_spec", "token_ids_gpu"]
    names += ["valid_sampled_token_ids_gpu", "valid_sampled_tokens_count"]
    assert list(inspect.signature(NgramProposerGPU.propose).parameters) == names
