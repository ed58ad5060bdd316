"""The adapters of a policy in a vLLM model that runs: taken over from memory, beside weights that stay as they are.

vLLM puts a layer with room for adapters around each of the model's that may have one. All requests of an engine have the same
adapters, so one slot is enough, and a refit fills it anew.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rlcore.spi import LoraSpec
from rlcore_torchkit.adapters.peft_check import PREFIX
from rlcore_torchkit.refit.arrivals import refuse
from rlcore_vllm.engines.versions import ADAPTERS_ID


def replace_adapters(model: nn.Module, tensors: Mapping[str, Tensor], spec: LoraSpec, device: str) -> None:
    """Have all requests use these A and B, by name, in place of those before; they are the model's from now on, and changed.

    RefitError where vLLM's model has no layer for one, which vLLM itself would pass over.
    """
    manager: Any = model.lora_manager
    form = PEFTHelper(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets))  # type: ignore[arg-type]
    adapters = LoRAModel.from_lora_tensors(
        lora_model_id=ADAPTERS_ID,
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
    manager.remove_all_adapters()
    manager._last_mapping = None  # which requests use which slot: what is kept of it may have slept
    manager.add_adapter(adapters)
    manager.activate_adapter(ADAPTERS_ID)


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
