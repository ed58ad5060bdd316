"""Images in the first stage: transformers' own tower computes features, which take the places of placeholders' embeddings.

Each tensor and context rank reads the images that its tokens show, so that gradients of the tower add up over these ranks as
those of norms do. Shapes: L tokens of this rank, F placeholders among them, H hidden size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn

from rlcore.spi import ModelSpec
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.vision_weights import empty_vision
from rlcore_megatron.modules.packing import PackedBatch
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.forward.image_forward import ShownImages, image_processor, shown_images, unused_vision
from rlcore_torchkit.huggingface.models import quiet_transformers
from rlcore_torchkit.trainer.microbatch import Microbatch


@frozen(eq=False)
class ImageReader:
    """Makes the inputs of the tower, and the positions of all tokens, from the files that a microbatch carries."""

    processor: Any
    """transformers' image processor of the model."""
    model: Any
    """The model's class, which knows positions; without weights."""

    @classmethod
    def of(cls, hf: Any, spec: ModelSpec) -> "ImageReader":
        """The reader of the model at `spec`; ModelError where it has no image processor."""
        return cls(image_processor(spec), empty_vision(hf)[1])

    def read(self, batch: Microbatch, *, has_pixels: bool) -> ShownImages | None:
        """None where no sequence has an image; ContractError where placeholders do not match the images. A chunk without the
        tower reads positions alone, without `has_pixels`."""
        return shown_images(self.processor, self.model, batch.tokens, batch.packed, batch.images, has_pixels=has_pixels)


@define(eq=False)
class PlacedFeatures:
    """Features of one microbatch on their way to the layers that add them, and their gradients on the way back.

    A layer's activations may be recomputed in a backward pass of its own, which must not run through the tower: the tower's
    single backward pass follows that of all layers.
    """

    rows: Tensor
    """int64 [F]: where the placeholders are among this rank's tokens."""
    features: Sequence[Tensor]
    """[F, H] for each layer that adds some, without a graph."""
    gradients: dict[int, Tensor]
    """[F, H] by the layer's number, once its backward pass is done."""


class _Place(torch.autograd.Function):
    """Puts features in the places of embeddings [L, 1, H]."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, placed: PlacedFeatures, features: Tensor, *_: Tensor) -> Tensor:
        ctx.placed = placed
        found = embeddings.clone()
        found[placed.rows, 0] = features.to(found.dtype)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        placed: PlacedFeatures = ctx.placed
        of_text = gradient.clone()
        of_text[placed.rows] = 0.0
        of_layers = [placed.gradients.pop(layer, None) for layer in range(len(placed.features))]
        return of_text, None, gradient[placed.rows, 0], *of_layers


class _Add(torch.autograd.Function):
    """Adds a layer's features to its output [L, 1, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, placed: PlacedFeatures, layer: int) -> Tensor:
        ctx.placed, ctx.layer = placed, layer
        found = hidden.clone()
        found[placed.rows, 0] += placed.features[layer].to(found.dtype)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.placed.gradients[ctx.layer] = gradient[ctx.placed.rows, 0]
        return gradient, None, None


def make_vision(hf: Any, config: Any) -> nn.Module:
    """The tower and its projection, whole, with values that are not set, in the layers' dtype on this rank's device.

    transformers builds the parts again: buffers of a model without values have none either.
    """
    _, vision = empty_vision(hf)
    with torch.device(torch.cuda.current_device()), quiet_transformers():
        for name, part in list(vision.named_children()):
            options = {"dtype": config.params_dtype, "attn_implementation": "sdpa"}
            setattr(vision, name, type(part)._from_config(part.config, **options))
    vision.eval()
    if config.recompute_granularity == "full":
        with quiet_transformers():  # it warns that there are no embeddings of tokens
            vision.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in vision.modules():
            module.training = hasattr(module, "gradient_checkpointing")  # no dropout below
    for parameter in vision.parameters():
        # Each tensor rank has the gradient of its own tokens' images; without sequence parallelism all have the same.
        parameter.sequence_parallel = config.sequence_parallel
        parameter.average_gradients_across_tp_domain = not config.sequence_parallel
    found: nn.Module = vision
    return found


def add_features_behind(layers: Sequence[Any], family: MegatronFamily) -> None:
    """Have the layers of the first chunk that do so add the tower's features behind them."""
    for number in range(sum(family.deepstack)):
        layers[number].register_forward_hook(partial(_add_features, number), with_kwargs=True)


def _add_features(number: int, _: Any, __: Any, options: dict[str, Any], output: tuple[Any, ...]) -> tuple[Any, ...]:
    placed = options["packed_seq_params"].placed
    if placed is None:
        return output
    hidden, *others = output
    return _Add.apply(hidden, placed, number), *others


def place_features(vision: Any, embeddings: Tensor, batch: PackedBatch, part: ContextPart) -> Tensor:
    """[L, 1, H]: the embeddings of this rank's part of the microbatch, with images in place of placeholders. What layers add
    goes with the batch."""
    shown = None if batch.images is None else batch.images.part(part, int(vision.config.vision_config.spatial_merge_size) ** 2)
    if shown is None or not shown.places.any():
        return embeddings + unused_vision(vision)
    device = embeddings.device
    found = vision.get_image_features(shown.pixels.to(device), shown.grids.to(device), return_dict=True)
    features, *deep = (
        _joined(each)[shown.features] for each in (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
    )
    rows = shown.places.nonzero()[:, 0].to(device)
    batch.placed = PlacedFeatures(rows=rows, features=[each.detach() for each in deep], gradients={})
    placed: Tensor = _Place.apply(embeddings, batch.placed, features, *deep)
    return placed


def _joined(features: Any) -> Tensor:
    """Return the features of all images, which transformers divides by images, but for those of layers before 5.19."""
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))
