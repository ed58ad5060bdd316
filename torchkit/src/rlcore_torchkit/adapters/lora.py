"""The arithmetic of low-rank adapters, the same for every trainer and layout: first values, dropout, merged weights."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.spi.context import LoraSpec
from rlcore_torchkit.adapters.lora_targets import LORA_A, Shape, adapter_shapes, linear_layers
from rlcore_torchkit.adapters.peft_directory import read_adapters
from rlcore_torchkit.architectures.decoders import described_family, layers_of
from rlcore_torchkit.huggingface.models import dims_of


def linear_layers_of(model: Any) -> dict[str, Shape]:
    """Return name to (out, in) of the linear layers of a transformers decoder, by its family or else by its modules."""
    family = described_family(model.config.to_dict())
    if family is not None:
        return linear_layers(family, dims_of(model.config))
    inside = {id(module) for module in layers_of(model).modules()}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside}
    return {name: (module.out_features, module.in_features) for name, module in linear.items()}


def initial_adapters(
    layers: Mapping[str, Shape],
    spec: LoraSpec,
    model: str,
    seed: int,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return A and B of every layer by name, in `dtype`, on the host: those of `spec.init_from`, or else PEFT's, A uniform in
    ±1/√in and B zero, which depend on the seed, the names and the rank alone.

    Rows of A behind a smaller `rank` are zero. With the columns of B they stay zero: each gradient is a product with the other.
    ModelError where `spec.init_from` is not for these layers of `model`, a path.
    """
    shapes = adapter_shapes(layers, spec.rank)
    if spec.init_from is not None:
        return read_adapters(spec.init_from, shapes, spec, model, dtype)
    used = spec.rank if rank is None else rank
    return {name: _initial(name, shape, seed, used).to(dtype) for name, shape in shapes.items()}


def _initial(name: str, shape: Shape, seed: int, rank: int) -> Tensor:
    values = torch.zeros(shape)
    if name.endswith(LORA_A):
        bound = 1 / math.sqrt(shape[1])
        values[:rank].uniform_(-bound, bound, generator=seeded(torch.device("cpu"), seed, name))
    return values


def seeded(device: torch.device, *key: object) -> torch.Generator:
    """A generator of random numbers on `device` that the key decides."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@frozen(kw_only=True)
class Dropout:
    """The inputs that adapters drop in one microbatch of a train step."""

    share: float
    """Share of the inputs that is dropped; above 0."""
    key: tuple[object, ...]
    """The run's seed, the weights' version, the data-parallel and the context rank, and the microbatch's number."""
    num_tokens: int
    """Tokens of the whole microbatch."""

    def kept(self, name: str, states: Tensor, num_inputs: int, *, num_rows: int, first_row: int, first_column: int) -> Tensor:
        """Zeros and 1 / (1 - share), [T', I'], for the layer `name` with inputs `states` [T', I'].

        They are rows and columns, from `first_row` and `first_column` on, of one draw for all I inputs and all `num_rows` that
        ranks divide by tokens, so that a layout of tensor ranks drops what one rank would. Rows behind the microbatch's tokens
        are padding, and kept.
        """
        num_drawn = min(num_rows, self.num_tokens)
        random = seeded(states.device, *self.key, name)
        drawn = torch.rand(num_drawn, num_inputs, generator=random, device=states.device) >= self.share
        rows, columns = (
            slice(first, first + size) for first, size in zip((first_row, first_column), states.shape, strict=True)
        )
        whole = F.pad(drawn.to(states.dtype), (0, 0, 0, num_rows - num_drawn), value=1.0)
        return whole[rows, columns] / (1 - self.share)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A in the dtype of A [rank, in] and B [out, rank], of a weight [out, in] in any dtype."""
    return torch.addmm(weight.to(a.dtype), b, a, alpha=scale)
