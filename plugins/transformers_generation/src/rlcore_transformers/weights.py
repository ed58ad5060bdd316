"""The weights that the generator holds: its own copies, or the trainer's tensors themselves."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlcore.spi import LoraSpec, WeightExport
from rlcore_torchkit.adapters.lora import merged
from rlcore_torchkit.adapters.lora_targets import LORA_A, LORA_B, is_adapter
from rlcore_torchkit.refit.arrivals import check_digests, check_names, check_shape, check_specs, refuse
from rlcore_torchkit.refit.digest import tensor_digest, tensor_digests


class HeldWeights:
    """Complete weights of one version, or none."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        """`shapes` are those of all tensors; where A and B of adapters are among them, an export may bring these alone, and the
        others stay."""
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._own: dict[str, Tensor] = {}
        """Copies, kept from one refit to the next."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors held, by Hugging Face name; empty before the first refit and after one that failed."""

    def receive(self, export: WeightExport, may_alias: bool) -> dict[str, int]:
        """Take over an export and return the digest of each tensor now held; where the dtype was cast, of what arrived.

        RefitError, and nothing held, where a tensor is missing, unknown, repeated, misshapen or not what its digest says.
        """
        kept = {} if export.has_weights else {name: held for name, held in self.tensors.items() if not is_adapter(name)}
        self.tensors = {}
        expected = {name: shape for name, shape in self._shapes.items() if name not in kept}
        check_specs(export.specs, expected)
        received: dict[str, Tensor] = {}
        cast: dict[str, int] = {}
        claimed: dict[str, int] = {}
        for bucket in export.buckets:
            check_names([named.name for named in bucket.tensors], expected, received)
            for named in bucket.tensors:
                tensor: Tensor = torch.as_tensor(named.tensor).detach()
                check_shape(named.name, tuple(tensor.shape), expected)
                if tensor.dtype != self._dtype:
                    cast[named.name] = tensor_digest(tensor)
                received[named.name] = self._keep(named.name, tensor, may_alias and export.persistent)
                claimed[named.name] = named.digest
        refuse("missing from the buckets", expected.keys() - received.keys())
        digests = dict(zip(received, tensor_digests(received.values()), strict=True)) | cast
        check_digests(digests, claimed)
        self.tensors = kept | received
        self._own = {name: tensor for name, tensor in self._own.items() if self.tensors[name] is tensor}
        return digests

    def merged(self, lora: LoraSpec) -> dict[str, Tensor]:
        """The model's weights as its adapters of this form change them; those without one are the tensors held."""
        tensors = {}
        for name, weight in self.tensors.items():
            layer = name.removesuffix("weight")
            a, b = (self.tensors.get(f"{layer}{key}") for key in (LORA_A, LORA_B))
            if not is_adapter(name):
                tensors[name] = (
                    weight if a is None or b is None else merged(weight, a.float(), b.float(), lora.scale).to(self._dtype)
                )
        return tensors

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these, of the model's names and shapes, by copies where the dtype, device or layout is another."""
        self._own = {name: tensor.detach().to(self._device, self._dtype).contiguous() for name, tensor in tensors.items()}
        self.tensors = dict(self._own)

    def move(self, device: torch.device) -> None:
        """Hold the weights on `device`; the trainer's own tensors are copied and let go."""
        if any(tensor.device != device for tensor in self.tensors.values()):
            self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
            self._own = dict(self.tensors)

    def drop(self) -> None:
        self.tensors = {}
        self._own = {}

    def num_bytes(self, device: torch.device) -> int:
        """Bytes on `device` that are kept alive here, the trainer's included."""
        held = [*self.tensors.values(), *self._own.values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held if tensor.device == device}.values())

    def _keep(self, name: str, tensor: Tensor, may_alias: bool) -> Tensor:
        """The tensor itself where that is allowed and will do, otherwise a copy of it."""
        if may_alias and tensor.dtype == self._dtype and tensor.device == self._device and tensor.is_contiguous():
            return tensor
        own = self._own.get(name)
        if own is None or own.device != self._device:
            own = self._own[name] = torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
        return own.copy_(tensor)
