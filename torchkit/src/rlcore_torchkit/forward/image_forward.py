"""Hidden states of packed sequences that read images, by transformers' own classes.

Shapes: T tokens of N sequences, I images of P patches together, C numbers of a patch, H hidden size.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.batch import Images, TokenBatch
from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import ContractError
from rlcore_model_files.images import decode_image, image_size, load_image_processor
from rlcore_torchkit.architectures.decoders import has_states, is_image_model, is_vision
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.forward.decoder_forward import (
    bounds_of_rows,
    decode_rows,
    general_forward,
    padded_forward,
    padded_rows,
    patch_decoder,
)
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import Attention

_SCALED_BY_QWEN = "transformers.models.qwen2_vl."
"""The package of the image processors whose `smart_resize` gives an image's grid from its size."""


def patch_any_decoder(model: Any, spec: ModelSpec) -> None:
    """`patch_decoder` with what reads images where `model`, of `spec`, is one of IMAGE_MODELS."""
    if not is_image_model(model.config.to_dict()):
        patch_decoder(model)
        return
    patch_decoder(model, partial(image_forward, image_processor(spec)))


def image_processor(spec: ModelSpec) -> Any:
    """Load transformers' image processor of a model."""
    return load_image_processor(spec.path, spec.revision, trust_remote_code=spec.trust_remote_code)


def check_images(batches: Sequence[TokenBatch], model: Any) -> None:
    """ContractError where sequences have images, and the model reads text alone."""
    if any(batch.images is not None for batch in batches) and not is_image_model(model.config.to_dict()):
        raise ContractError(f"images: found some, for a {type(model).__name__}; expected none: it reads text alone")


def freeze_vision(model: Any) -> None:
    """Train nothing of a model's vision tower, what projects its output among it."""
    for name, parameter in model.named_parameters():
        if is_vision(name):
            parameter.requires_grad_(False)


@frozen(kw_only=True, eq=False)
class ShownImages:
    """Images that tokens of packed sequences stand for."""

    pixels: Tensor
    """float32 [P, C]: the patches of all images, one image after another; [0, 0] where only positions are read."""
    grids: Tensor
    """int64 [I, 3]: patches of each image in time, height and width."""
    places: Tensor
    """bool [T]: tokens that stand for images."""
    positions: Tensor
    """int64 [3, 1, T]: rotary positions in time, height and width."""
    features: slice = slice(None)
    """Rows of the vision tower's output that the tokens get, where they stand for parts of the images."""

    def part(self, part: ContextPart, merged: int) -> "ShownImages":
        """The images that a context rank's tokens stand for, whole where the rank has a part of their tokens; `merged` patches
        become one token."""
        places = part.split(self.places)
        begin = int(self.places[: part.start].sum())
        end = begin + int(places.sum())
        sizes = self.grids.prod(1)
        stops = sizes.cumsum(0) // merged
        starts = stops - sizes // merged
        held = (starts < end) & (stops > begin)
        first = int(starts[held][0]) if begin < end else begin
        return ShownImages(
            pixels=self.pixels[held.repeat_interleave(sizes)],
            grids=self.grids[held],
            places=places,
            positions=part.split(self.positions),
            features=slice(begin - first, end - first),
        )


def image_forward(processor: Any, model: Any, tokens: Tensor, packed: PackedSequences, images: Images | None = None) -> Tensor:
    """Hidden states [T, H] after the final norm. `processor` is transformers' image processor of the model; `images` are the
    files that each sequence reads, a row of placeholders for each. ContractError where these rows have other lengths."""
    shown = shown_images(processor, model, tokens, packed, images)
    keeps_states = has_states(model)
    if shown is None:
        forward = padded_forward if keeps_states else general_forward
        return forward(model, tokens, packed) + unused_vision(model)
    return (_decode_padded if keeps_states else decode_images)(model, tokens, packed, shown)


def shown_images(
    processor: Any, model: Any, tokens: Tensor, packed: PackedSequences, images: Images | None, *, has_pixels: bool = True
) -> ShownImages | None:
    """Return the images of packed sequences, on the host; None without one. Arguments and errors as of `image_forward`; without
    `has_pixels` no image is decoded whose size alone says its grid."""
    files = [] if images is None else list(chain.from_iterable(images))
    if not files:
        return None
    assert images is not None
    pixels, grids = pixels_of(processor, files) if has_pixels else (torch.empty(0, 0), grids_of(processor, files))
    places, positions = place_images(model, tokens.cpu(), packed, [len(own) for own in images], grids)
    return ShownImages(pixels=pixels, grids=grids, places=places, positions=positions)


def decode_images(model: Any, tokens: Tensor, packed: PackedSequences | Attention, shown: ShownImages) -> Tensor:
    """Hidden states [T, H] after the final norm of one row of tokens, int32 or int64 [T], some of which stand for images."""
    device = tokens.device
    positions = shown.positions.to(device)
    if not shown.places.any():
        return decode_rows(model, tokens[None], positions, packed).squeeze(0) + unused_vision(model)
    with _placed(model.base_model, shown.places[None, :, None].to(device), shown.features):
        inputs = {"pixel_values": shown.pixels.to(device), "image_grid_thw": shown.grids.to(device)}
        return decode_rows(model, tokens[None], positions, packed, **inputs).squeeze(0)


def _decode_padded(model: Any, tokens: Tensor, packed: PackedSequences, shown: ShownImages) -> Tensor:
    """Hidden states [T, H] as `decode_images`, by a padded row for each sequence, with which states begin anew."""
    gather, real = padded_rows(packed)
    rows, device = tokens[gather], tokens.device
    places = torch.zeros(rows.numel(), dtype=torch.bool, device=device).index_copy(0, real, shown.places.to(device))
    positions = shown.positions.to(device)[:, 0, gather]
    with _placed(model.base_model, places.view(*rows.shape, 1), shown.features):
        inputs = {"pixel_values": shown.pixels.to(device), "image_grid_thw": shown.grids.to(device)}
        hidden = decode_rows(model, rows, positions, bounds_of_rows(rows)[1], **inputs)
    return hidden.flatten(0, 1).index_select(0, real)


def pixels_of(processor: Any, files: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """float32 [P, C]: the patches of images one after another, as the processor makes them; and int64 [I, 3]: how many patches
    each has in time, height and width. An image that occurs several times is decoded once."""
    distinct = list(dict.fromkeys(files))
    made = processor(images=[decode_image(file) for file in distinct], return_tensors="pt")
    pixels, grids = made["pixel_values"], made["image_grid_thw"]
    if len(distinct) == len(files):
        return pixels, grids
    parts = dict(zip(distinct, zip(pixels.split(grids.prod(1).tolist()), grids, strict=True), strict=True))
    return torch.cat([parts[file][0] for file in files]), torch.stack([parts[file][1] for file in files])


def grids_of(processor: Any, files: Sequence[bytes]) -> Tensor:
    """int64 [I, 3]: the grids of `pixels_of`. Processors of Qwen2-VL to Qwen3-VL say them by an image's size, without its
    pixels; others make the pixels."""
    if not type(processor).__module__.startswith(_SCALED_BY_QWEN):
        return pixels_of(processor, files)[1]
    scaled, patch, size = sys.modules[type(processor).__module__].smart_resize, processor.patch_size, processor.size
    bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    found = [scaled(*image_size(file), patch * processor.merge_size, **bounds) for file in files]
    return torch.tensor([(1, height // patch, width // patch) for height, width in found])


def place_images(
    model: Any, tokens: Tensor, packed: PackedSequences, counts: Sequence[int], grids: Tensor
) -> tuple[Tensor, Tensor]:
    """bool [T]: which tokens stand for images, given how many each sequence reads; and int64 [3, 1, T]: the positions that the
    model's own `get_rope_index` gives each sequence. All on the host."""
    base = model.base_model
    merged = int(base.config.vision_config.spatial_merge_size) ** 2
    num_tokens = (grids.prod(1) // merged).tolist()
    places = torch.zeros(len(tokens), dtype=torch.bool)
    positions = torch.empty(3, 1, len(tokens), dtype=torch.long)
    offsets, image = packed.offsets.tolist(), 0
    for start, end, count in zip(offsets[:-1], offsets[1:], counts, strict=True):
        own = slice(image, image + count)
        image += count
        if not count:
            positions[:, 0, start:end] = torch.arange(end - start)
            continue
        found = (tokens[start:end] == base.config.image_token_id).nonzero()[:, 0]
        wanted = num_tokens[own]
        rows = _rows_of(found)[:count]
        if rows != wanted:
            raise ContractError(
                f"images: found rows of {rows} placeholders in a sequence; expected {wanted} for its {count} images. Give this "
                "model the preprocessor_config.json of the policy, whose image processor has made the prompts"
            )
        places[start + found[: sum(wanted)]] = True
        kinds = places[start:end].int()[None]
        row = tokens[start:end].long()[None]
        positions[:, :, start:end] = base.get_rope_index(row, kinds, image_grid_thw=grids[own])[0]
    return places, positions


def _rows_of(found: Tensor) -> list[int]:
    """Return the lengths of the rows of placeholders; `found` int64 [F] are their places, ascending."""
    ends = (found.diff() != 1).nonzero()[:, 0].tolist()
    return [end - begin for begin, end in pairwise([-1, *ends, len(found) - 1])] if len(found) else []


@contextmanager
def _placed(base: Any, places: Tensor, features: slice) -> Iterator[None]:
    """Have the model put images where they are: it would take any placeholder for one, also what a policy has said. Of the
    vision tower's rows it takes `features`."""
    compute = base.get_image_features

    def chosen(*arguments: Any, **options: Any) -> Any:
        output = compute(*arguments, **options)
        output.pooler_output = (torch.cat(tuple(output.pooler_output))[features],)
        if layers := getattr(output, "deepstack_features", None):  # before transformers 5.19 a tensor for each layer
            output.deepstack_features = [
                layer[features] if isinstance(layer, Tensor) else (torch.cat(layer)[features],) for layer in layers
            ]
        return output

    base.get_placeholder_mask = lambda *_, **__: (places, torch.zeros_like(places))
    if features != slice(None):
        base.get_image_features = chosen
    try:
        yield
    finally:
        del base.get_placeholder_mask
        base.__dict__.pop("get_image_features", None)


def unused_vision(model: Any) -> Tensor | float:
    """Return zero with a gradient for every trained parameter of the vision tower: all ranks then reduce the same gradients."""
    trained = [p for name, p in model.named_parameters() if is_vision(name) and p.requires_grad]
    if not (torch.is_grad_enabled() and trained):
        return 0.0
    return 0.0 * torch.stack([parameter.sum() for parameter in trained]).sum()
