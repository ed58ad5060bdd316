"""Adapters that are not in use: what the model, the optimizer and the dropout of each continue with."""

from collections.abc import Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from rlcore_fsdp2.adapters import Adapters, trained
from rlcore_fsdp2.optimizer import Optimizer
from rlcore_fsdp2.sharding import local


@frozen(kw_only=True, eq=False)
class ParkedAdapter:
    """An adapter that is not in use: this rank's parts, on the device of the parameters, and all else that is its own."""

    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    """The gradients held, by the names of their parameters."""
    moments: Mapping[nn.Parameter, dict[str, Tensor]]
    """The optimizer's state."""
    seed: int
    rank: int
    begun: Mapping[str, Tensor] | None
    weight_version: int
    num_accumulated: int
    """Microbatches whose gradients are held."""

    @classmethod
    def take(
        cls, model: nn.Module, optimizer: Optimizer, adapters: Adapters, weight_version: int, num_accumulated: int
    ) -> "ParkedAdapter":
        """Take the adapter in use out of the model; its weights as copies."""
        parameters = trained(model)
        parked = cls(
            weights={name: local(parameter).detach().clone() for name, parameter in parameters.items()},
            gradients={name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None},
            moments=dict(optimizer.state),
            seed=adapters.seed,
            rank=adapters.rank,
            begun=adapters.begun,
            weight_version=weight_version,
            num_accumulated=num_accumulated,
        )
        optimizer.zero_grad()
        optimizer.state.clear()
        return parked

    def put(self, model: nn.Module, optimizer: Optimizer, adapters: Adapters) -> None:
        """Make it the adapter in use of a model without one."""
        parameters = trained(model)
        with torch.no_grad():
            for name, weights in self.weights.items():
                local(parameters[name]).copy_(weights)
        for name, gradient in self.gradients.items():
            parameters[name].grad = gradient
        optimizer.state.update(self.moments)
        adapters.seed, adapters.rank, adapters.begun = self.seed, self.rank, self.begun

    def with_own_gradients(self) -> "ParkedAdapter":
        """Return it with copies of its gradients, to which no later pass adds."""
        return evolve(self, gradients=dict(zip(self.gradients, copies([*self.gradients.values()]), strict=True)))

    def without_gradients(self) -> "ParkedAdapter":
        """Return it as before the first piece of a step."""
        return evolve(self, gradients={}, num_accumulated=0)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies, in few kernels and not one each, with storage of their own."""
    return list(torch._foreach_mul(tensors, 1.0)) if tensors else []
