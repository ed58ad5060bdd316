"""What a loss on sampled tokens reads of its inputs, free of what lies outside the loss mask."""

import torch
from torch import Tensor

from rlcore.spi import ContractError, LossInputs


def masked(values: Tensor, inputs: LossInputs) -> Tensor:
    """`values` [T] with 0 outside the mask, so that nothing there, not even a NaN, reaches value or gradient."""
    return torch.where(inputs.loss_mask, values, 0.0)


def previous_logprobs(inputs: LossInputs, generation: Tensor, choice: str) -> Tensor:
    """The log-probabilities [T] that the policy's are compared with, 0 outside the mask: with `choice` "generation" those
    given, with "trainer" the trainer's own at the start of the step. ContractError where these are missing."""
    if choice == "generation":
        return generation
    if inputs.previous_logprobs is None:
        raise ContractError(
            "found no previous_logprobs in the loss's inputs; expected those that LossSpec.previous_logprobs declares. "
            'Pass on what LossSpec.previous_of returns, or set the algorithm\'s previous_logprobs to "generation"'
        )
    return masked(inputs.previous_logprobs, inputs)
