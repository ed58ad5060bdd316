"""The adapters of policies in a vLLM model that runs: taken over from memory, beside weights that stay as they are.

vLLM puts a layer with slots for adapters around each of the model's that may have one. Each adapter has a number, by which
requests name it, and a slot. A refit fills the slot of one adapter, and writes to no other.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rlcore.spi import LoraSpec, RefitError
from rlcore_torchkit.adapters.peft_check import PREFIX
from rlcore_torchkit.refit.arrivals import refuse
from rlcore_torchkit.refit.digest import tensor_digests


def put_adapter(
    model: nn.Module, number: int, kept: Collection[int], tensors: Mapping[str, Tensor], spec: LoraSpec, device: str
) -> None:
    """Have requests of this number use these A and B, by name, in place of those before; they are the model's from now on, and
    changed. Other adapters than those `kept` are forgotten.

    RefitError where vLLM's model has no layer for one, which vLLM itself would pass over, or lacks one that is to be kept.
    """
    manager: Any = model.lora_manager
    form = PEFTHelper(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets))  # type: ignore[arg-type]
    adapters = LoRAModel.from_lora_tensors(
        lora_model_id=number,
        tensors={f"{PREFIX}{name}": tensor for name, tensor in tensors.items()},
        peft_helper=form,
        device=device,
        dtype=manager.lora_config.lora_dtype,
    )
    known = {*manager.modules, *(name for names in manager.packed_modules.values() for name in names)}
    refuse(
        'of adapters are of no layer of vLLM\'s model, to which refit.adapters = "merged" sends none',
        adapters.loras.keys() - known,
    )
    held = set(manager.list_adapters())
    if gone := set(kept) - held:
        raise RefitError(f"refit: found no adapter {', '.join(map(str, sorted(gone)))} in vLLM; expected it beside {number}")
    for other in held - set(kept):
        manager.remove_adapter(other)
    manager._last_mapping = None  # which requests use which slot: what is kept of it may have slept
    manager.add_adapter(adapters)
    manager.activate_adapter(number)


def slot_digests(model: nn.Module, number: int) -> dict[str, int]:
    """The digest of each tensor in the slot of an adapter, which is what vLLM computes with, by its layer's name."""
    manager: Any = model.lora_manager
    slot = manager.lora_index_to_id.index(number)
    held = {
        f"{name}.{kind}.{part}": stacked[slot].contiguous()
        for name, layer in manager.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for part, stacked in enumerate(getattr(layer, kind))
    }
    return dict(zip(held, tensor_digests(held.values()), strict=True))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model with its own layers in the places that files name, where vLLM has put others around them."""
    if not hasattr(model, "lora_manager"):
        yield  # to look at every layer for each bucket would take as long as to load a small one
        return
    around = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent._modules.items()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, layer in around:
            parent._modules[name] = layer.base_layer
        yield
    finally:
        for parent, name, layer in around:
            parent._modules[name] = layer
