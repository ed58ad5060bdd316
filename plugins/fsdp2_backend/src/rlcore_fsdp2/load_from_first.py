"""The weights of a divided model that transformers alone knows how to read: the first rank reads them and sends them round."""

from typing import Any

import torch
import torch.distributed as dist

from rlcore.spi import ModelSpec
from rlcore_fsdp2.sharding import fill
from rlcore_torchkit.adapters.lora_targets import is_adapter
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.huggingface.models import load_model


@torch.no_grad()
def load_from_first(model: Any, spec: ModelSpec, device: torch.device, *, parameters_on: torch.device) -> None:
    """Give a causal language model on device "meta", already sharded, its values, as transformers reads them.

    The first rank has the whole model on its host meanwhile; one tensor at a time goes to all ranks, through `device`.
    Parameters keep their dtype and go to `parameters_on`, buffers to `device`; adapters are left without values. ModelError,
    the same on every rank, where the model cannot be loaded.
    """
    dtype = next(parameter.dtype for name, parameter in model.named_parameters() if not is_adapter(name))
    source, dtypes = _read(spec, dtype)
    aliases = _aliases(model)
    model.to_empty(device=parameters_on)
    for name, (module, key) in aliases.items():  # what to_empty has put into one is not what it has put into the other
        module.register_parameter(key, model.get_parameter(name))
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        whole = _send(None if source is None else source.get_parameter(name), parameter.shape, parameter.dtype, device)
        fill(parameter, whole)
    for name, buffer in list(model.named_buffers()):
        whole = _send(None if source is None else source.get_buffer(name), buffer.shape, dtypes[name], device)
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = whole


def _read(spec: ModelSpec, dtype: torch.dtype) -> tuple[Any, dict[str, torch.dtype]]:
    """Read the whole model on the first rank, and its buffers' dtypes on all; a failure there is one everywhere."""
    source = together(lambda: load_model(spec, dtype=dtype, any_decoder=True) if dist.get_rank() == 0 else None)
    return source, first_rank(lambda: {name: buffer.dtype for name, buffer in source.named_buffers()})


def _aliases(model: Any) -> dict[str, tuple[Any, str]]:
    """Return the parameters that a second module holds too, such as a tied head's: name to that module and its key there."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (module, key)
        for prefix, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and names[id(parameter)] != f"{prefix}.{key}".lstrip(".")
    }


def _send(tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The first rank's tensor on every rank's device."""
    whole = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.detach().to(device, dtype)
    whole = whole.contiguous()
    dist.broadcast(whole, src=0)
    return whole
