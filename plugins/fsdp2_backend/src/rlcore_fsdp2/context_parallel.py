"""Context parallelism for transformers' models: each rank holds an equal share of a packed microbatch's tokens.

Shapes: T tokens, C context ranks, S tokens of a rank with C·S >= T, H query heads, K key heads, D head dimension.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from rlcore.spi import ContractError, Images, ModelSpec
from rlcore_torchkit.forward.context_parallel import ContextPart, exchanged_attention, part_logprobs, part_values
from rlcore_torchkit.forward.decoder_forward import decode_rows, decoder_head
from rlcore_torchkit.forward.image_forward import decode_images, image_processor, shown_images, unused_vision
from rlcore_torchkit.head.logprobs import Decode, EntropyMode, HeadLogprobs, own_head
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.head.values import shared_by, token_values
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import Scores, causal_attention


@frozen(eq=False)
class ContextAttention:
    """Attention over tokens that are split over ranks. H must be divisible by C and by K; keys are repeated until C divides
    them."""

    part: ContextPart

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler sees nothing to gain in collectives and a kernel
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """[S, H, D] from query [S, H, D], key and value [S, K, D]."""
        attend = partial(causal_attention, packed=self.part.packed, scores=scores)
        return exchanged_attention(query, key, value, self.part, attend)


def context_forward(model: nn.Module, tokens: Tensor, part: ContextPart) -> Tensor:
    """Hidden states after the final norm: [S, hidden], of this rank's part of `tokens`, int32 or int64 [T].

    What a decoder returns beyond S, as tensor parallelism pads, is left there.
    """
    packed = part.packed
    if tokens.shape != (packed.num_tokens,):
        raise ContractError(f"tokens: found shape {list(tokens.shape)}; expected [{packed.num_tokens}], as the offsets say")
    decoder: Any = model.base_model
    inputs = {"input_ids": part.split(tokens[None]), "position_ids": part.split(packed.position_ids)}
    output = decoder(**inputs, use_cache=False, packed=ContextAttention(part))
    hidden: Tensor = output.last_hidden_state
    return hidden.squeeze(0)


def image_context_forward(
    processor: Any, model: Any, tokens: Tensor, part: ContextPart, images: Images | None = None
) -> Tensor:
    """Hidden states [S, hidden] as `context_forward`, of one of IMAGE_MODELS; arguments and errors as of `image_forward`.

    Every rank finds places and positions of all images, and runs the vision tower for those of its tokens. An image whose
    tokens several ranks have is computed on each, with gradients from the rank's own tokens.
    """
    shown = shown_images(processor, model, tokens, part.packed, images)
    own, attention = part.split(tokens), ContextAttention(part)
    if shown is None:
        return decode_rows(model, own[None], part.split(part.packed.position_ids), attention)[0] + unused_vision(model)
    return decode_images(model, own, attention, shown.part(part, int(processor.merge_size) ** 2))


def patch_context(
    model: Any, group: dist.ProcessGroup, head: HeadLogprobs | None = None, decode: Decode = context_forward
) -> None:
    """Let a model that went through `patch_head` compute a share of the tokens on each rank of `group`.

    Its forward returns the log-probabilities and entropies of the whole microbatch on every rank; the gradients are those of
    this rank's tokens, to be summed over the ranks. `head` takes the place of `token_logprobs` with the head's weight.
    """
    model.forward = partial(_policy_forward, model, group, head or own_head(model), decode)


def patch_image_context(model: Any, spec: ModelSpec, group: dist.ProcessGroup) -> None:
    """Do what `patch_context` does to a model of images, one of IMAGE_MODELS, which `spec` names."""
    patch_context(model, group, decoder_head(model), partial(image_context_forward, image_processor(spec)))


def patch_context_values(model: Any, group: dist.ProcessGroup, num_ranks: int) -> None:
    """As `patch_context`, of a model that went through `patch_value_head` with so many tensor ranks."""
    model.forward = partial(_value_forward, model, group, num_ranks)


def _policy_forward(
    model: nn.Module,
    group: dist.ProcessGroup,
    compute: HeadLogprobs,
    decode: Decode,
    input_ids: Tensor,
    packed: PackedSequences,
    temperature: float,
    entropy: EntropyMode,
    kept: KeptTokens | None = None,
    images: Images | None = None,
) -> tuple[Tensor, Tensor | None]:
    part = ContextPart.of(packed, group)
    hidden = decode(model, input_ids, part) if images is None else decode(model, input_ids, part, images=images)
    return part_logprobs(hidden, input_ids, part, compute, temperature=temperature, entropy=entropy, kept=kept)


def _value_forward(model: Any, group: dist.ProcessGroup, num_ranks: int, input_ids: Tensor, packed: PackedSequences) -> Tensor:
    part = ContextPart.of(packed, group)
    hidden = shared_by(context_forward(model, input_ids, part)[: part.size], num_ranks)
    return part_values(token_values(hidden, model.score.weight), part)
