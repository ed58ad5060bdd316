"""FSDP2 applied to a Hugging Face causal language model: one group per decoder layer, and one for all the rest."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, *, reshard_after_forward: bool) -> None:
    """Shard `model`, in place, over the one dimension of `mesh`.

    Parameters keep their dtype; layers compute in `compute_dtype` and gradients are reduced in float32. The reduction is a
    sum, not FSDP's usual mean: each rank's loss is already divided by global counts.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The backward pass begins with the root's group, so it stays gathered.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def reshard(model: nn.Module) -> None:
    """Free the full weights that a forward pass without a backward leaves gathered, and that would grow stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its storage; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
