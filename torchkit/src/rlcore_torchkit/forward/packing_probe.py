"""Test, when a model is built, that packed sequences have the same log-probabilities as each one by itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.spi.errors import ModelError, Problem
from rlcore_torchkit.architectures.decoders import is_image_model, layer_windows
from rlcore_torchkit.forward.decoder_forward import (
    has_own_attention,
    patch_decoder,
    use_own_attention,
    use_own_logits,
    vocabulary_size,
)
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.head.softmax_chunks import wide_dtype
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import PACKED_ATTENTION, attention_of, count_windows

logger = logging.getLogger(__name__)
LENGTHS = [9, 14]
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Most mean distance of the log-probabilities of tokens from those of their sequence alone, by the dtype that computes, as a
share of their standard deviation: far above what rounding does, far below what another sequence does."""


def probe_packing(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """ModelError unless a model that went through `patch_decoder` says of two random sequences together what its class says of
    each alone, with transformers' own attention and masks. Called on every rank, with weights in place; `dtype` computes.

    A class that does not pass is tried with its own logits, with its own attention, and at last with both, which take more
    memory.
    """
    try:
        _probe(model, device, dtype)
    except ModelError:
        if is_image_model(model.config.to_dict()) or not _passes_by_itself(model, device, dtype):
            raise
    if has_own_attention(model):
        logger.warning(
            "%s computes attention by itself, with all scores of a padded row for each sequence", type(model).__name__
        )


def _passes_by_itself(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a model passes with its class's own logits, attention, or both; it then computes by these."""
    ways = [] if has_own_attention(model) else [(use_own_logits,)]
    for way in (*ways, (use_own_attention, patch_decoder), (use_own_logits,)):
        for change in way:
            change(model)
        with suppress(ModelError):
            _probe(model, device, dtype)
            if use_own_logits in way:
                logger.warning("%s computes logits by itself, all of them in memory", type(model).__name__)
            return True
    return False


@torch.no_grad()
def _probe(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    name = model.config.name_or_path
    random = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_size(model)
    tokens = torch.randint(vocabulary, (sum(LENGTHS),), generator=random).to(device)
    packed = PackedSequences.from_offsets(np.cumsum([0, *LENGTHS]), device)
    try:
        with count_windows() as windows:
            together, _ = packed_logprobs(model, tokens, packed, temperature=1.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a foreign class may raise anything on arguments that it does not know
        _refuse(name, f"{type(model).__name__}, which does not compute packed sequences: {error}")
    expected = None if has_own_attention(model) else layer_windows(model.config)
    if expected is not None and windows.count != expected:
        _refuse(name, f"{expected} layers of sliding_attention, of which {windows.count} tell their window to attention")
    try:
        with _own_forward(model):
            alone = torch.cat([_alone(model, sequence) for sequence in torch.split(tokens, LENGTHS)])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _refuse(name, f"{type(model).__name__}, whose own forward pass does not do without masks of its own: {error}")
    distances = torch.split((together - alone).abs(), LENGTHS)
    spread, bound = alone[alone != 0].std().item(), BOUNDS[dtype]
    found = [distance[1:].mean().item() for distance in distances]
    if not all(distance <= bound * spread for distance in found):
        what = " and ".join(f"{distance:.2g}" for distance in found)
        remedy = "It may hand a state from one sequence to the next, or compute its logits in a way of its own"
        given = f"log-probabilities {what} from those of the two sequences alone"
        raise ModelError([Problem(path=name, found=given, expected=f"at most {bound * spread:.2g}", remedy=remedy)])


def _refuse(name: str, found: str) -> None:
    expected = "a decoder that attends through transformers' attention interface"
    raise ModelError([Problem(path=name, found=found, expected=expected, remedy="Use another model")])


@contextmanager
def _own_forward(model: Any) -> Iterator[None]:
    """The class's own forward and eager attention; still called through the module, which FSDP gathers weights for."""
    patched, is_own = model.forward, has_own_attention(model)
    model.forward = partial(type(model).forward, model)
    if not is_own:
        model.set_attn_implementation(attention_of(model.config, "eager"))
    try:
        yield
    finally:
        model.forward = patched
        if not is_own:
            model.set_attn_implementation(attention_of(model.config, PACKED_ATTENTION))


def _alone(model: Any, tokens: Tensor) -> Tensor:
    """float32 or float64 [length]: log-probabilities, 0.0 at the first token."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    chosen = logits.log_softmax(-1, wide_dtype(logits.dtype)).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])
