"""Moves the trainer's memory: Megatron's buffers of weights and gradients, masters and moments, the reference policy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore.spi import SetResidencyRequest
from rlcore_megatron.modules.token_dispatch import drop_float8_copies
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_megatron.training.optimizer_state import optimizers_of
from rlcore_megatron.training.parked_adapter import ParkedAdapter
from rlcore_torchkit.distributed.residency import Residency, num_bytes, storages


class MegatronResidency:
    """Moves weights and state. Parameters and float32 masters are views of one buffer, which is emptied underneath them."""

    def __init__(
        self,
        device: torch.device,
        models: Sequence[Any],
        reference: Sequence[Any] | None,
        optimizer: MegatronOptimizer | None,
        parked: Mapping[str, ParkedAdapter] = MappingProxyType({}),
    ) -> None:
        """`parked` are the adapters that are not in use at the time of each move."""
        self._device, self._models, self._parked = device, models, parked
        self._optimizers = [] if optimizer is None else optimizers_of(optimizer)
        self._reference = reference or ()
        self.residency = Residency(device)

    def move(self, request: SetResidencyRequest) -> int:
        """Bytes left on the device. Gradients are not among them, nor weights' copies in 8 bits: between two steps they mean
        nothing."""
        self._drop_gradients()
        drop_float8_copies(self._models)
        parked = self._parked.values()
        weights = [*self.weights(), *(tensor for one in parked for tensor in one.weights)]
        state = self._state()
        self.residency.move(request, weights, state, scratch=self.gradient_buffers())
        return num_bytes([*weights, *state])

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Room for the gradients of a step. The masters' copies of them are freed after it, also where it is refused."""
        self.residency.restore_scratch()
        try:
            yield
        finally:
            self._drop_gradients()

    def resident(self) -> AbstractContextManager[None]:
        """Everything on the device for as long as it takes to read or write it."""
        return self.residency.resident(self.move)

    def _drop_gradients(self) -> None:
        """Free the gradients of the masters: float32 copies, where they are not views of the buffers."""
        with cuda_or_cpu(self._device.type):
            for optimizer in self._optimizers:
                # An optimizer on the host has memory for them there that it fills in each step.
                if {master.device.type for group in optimizer.param_groups for master in group["params"]} == {
                    self._device.type
                }:
                    optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [parameter for model in (*self._models, *self._reference) for parameter in model.parameters()]

    def gradient_buffers(self) -> list[Tensor]:
        return [buffer.grad_data for model in self._models for buffer in (*model.buffers, *model.expert_parallel_buffers)]

    def _state(self) -> list[Tensor]:
        """Masters that are no views of weights, and moments; counts of steps are on the host anyway."""
        optimizers = self._optimizers
        masters = [master for optimizer in optimizers for group in optimizer.param_groups for master in group["params"]]
        states = [optimizer.state for optimizer in optimizers]
        states += [moments for one in self._parked.values() for moments in one.moments]
        kept = [tensor for each in states for state in each.values() for tensor in state.values()]
        views = {storage._cdata for storage in storages(self.weights())}
        return [
            tensor
            for tensor in (*masters, *kept)
            if isinstance(tensor, Tensor)
            and tensor.device.type == self._device.type
            and tensor.untyped_storage()._cdata not in views
        ]
