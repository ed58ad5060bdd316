"""Loading a whole checkpoint, bucket by bucket, into a vLLM model that runs already.

vLLM turns some weights into another form after loading them: packed for oneDNN on CPU, quantised, laid out for a kernel. Its
layerwise reload brings each layer back to checkpoint form on the meta device, gathers what is loaded, and processes the
layer once it is whole. It says nothing about what it got wrong, so everything that it may leave behind is checked here.
"""

from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _place_kernel_tensors

from rlcore.spi import ShardSlice, TensorSpec
from rlcore_torchkit.refit.arrivals import refuse
from rlcore_vllm.engines.versions import keeps_checkpoint_form, without_weights
from rlcore_vllm.ranks.weight_load_plan import LoadWeights, WeightLoadPlan, Weights


class Loader:
    """Loads complete sets of weights, one after another: begin, load every bucket, finish; abandon after a failure."""

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self._model = model
        self._load_weights: LoadWeights = model.load_weights  # type: ignore
        self._model_config = model_config
        self._device = device
        self.is_direct = is_in_checkpoint_form(model, model_config, device)
        """True where tensors are copied straight into the parameters, without the layerwise reload."""
        self._tied_heads = _tied_heads(model)
        self._parameters = {name for name, _ in model.named_parameters()} - _optional_parameters(model)
        self._aliases = _aliases(model)
        self._loaded: set[str] | None = set()
        self._copies = WeightLoadPlan(model)
        self._unwritten: set[str] = set()
        """Tensors that loaders have been seen to read without writing to them."""
        self._attention = [layer for layer in model.modules() if type(layer) is Attention]

    def begin(self) -> None:
        self._loaded = set()
        if self.is_direct:
            self._copies.begin()
            return
        if self._device.type == "cpu":
            # The kernel object holds the experts packed from the old weights, and is made anew only where there is none.
            for layer in self._model.modules():
                method: Any = getattr(layer, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    method.moe_kernel = None
        initialize_layerwise_reload(self._model)

    def keep_rest(self) -> None:
        """Keep what is not loaded as it is, where tensors are loaded directly: no parameter then lacks weights."""
        self._loaded = None

    def needs(self, specs: Iterable[TensorSpec]) -> dict[str, list[ShardSlice]]:
        """The parts of tensors that this refit will read, as WeightLoadPlan.needs; of all others it reads the whole."""
        return self._copies.needs(specs) if self.is_direct else {}

    def load(self, tensors: Iterable[tuple[str, Tensor]], stable: bool, partial: Set[str] = frozenset()) -> None:
        """Load named tensors; unless `stable`, their memory may be overwritten as soon as this has been executed. Of those in
        `partial` what `needs` has named holds values alone; RefitError where that is not all that is read now."""
        weights = list(tensors)
        unknown = [
            name for name, tensor in weights if name in partial and not (self.is_direct and self._copies.know(name, tensor))
        ]
        refuse("came in part, while vLLM's loaders now read the whole", unknown)
        with self._own_copies(weights) as given:
            names = self._copies.load(given, self._load_weights) if self.is_direct else self._load_weights(iter(given))
        if names is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= names
        if not stable and not self.is_direct:
            self._keep_gathered({tensor.untyped_storage().data_ptr() for _, tensor in weights})

    def finish(self) -> None:
        """RefitError, naming layers, where some have not got all their weights; otherwise the model is ready to run."""
        if self._loaded is not None:
            missing = without_weights(self._parameters, self._loaded)
            refuse("of vLLM's model got no weights", {name for name in missing if self._loaded.isdisjoint(self._aliases[name])})
        if self.is_direct:
            for layer in self._attention:
                # FlashInfer's keeps sinks in float32 beside the parameter, and fills them again when it is told to.
                layer.impl.process_weights_after_loading(self._model_config.dtype)
            return
        for head in self._tied_heads:
            # Its weight is the embedding's, which has been loaded; left to vLLM it is reported as missing.
            self._put_back(head)
        for _, layer, info in list(self._pending()):
            if _is_padding(layer) and info.loaded_weights:
                self._put_back(layer)  # nothing of what was loaded is this rank's
        refuse("of vLLM's model are incomplete", self._incomplete_layers())
        finalize_layerwise_reload(self._model, self._model_config)
        if self._device.type == "cpu":
            for head in self._tied_heads:
                # Packed from the old weights; as it loads nothing itself, nothing else packs it again.
                head.quant_method.process_weights_after_loading(head)

    def abandon(self) -> None:
        """Make the model's structure whole again, whatever mixture of weights it then holds."""
        for layer in self._model.modules():
            self._put_back(layer)

    @contextmanager
    def _own_copies(self, weights: Weights) -> Iterator[Weights]:
        """The tensors, for loaders: copies of those that loaders write to, or have never had.

        Some do, such as gpt-oss's, which sets biases to zero that another rank adds. What came may be the trainer's own memory,
        or memory that other ranks read, or to which the next refit's changes are relative.
        """
        given, copies = list[tuple[str, Tensor]](), list[tuple[str, Tensor, int]]()
        for name, tensor in weights:
            if name in self._unwritten:
                given.append((name, tensor))
                continue
            copy = tensor.clone()
            given.append((name, copy))
            # Only copies are asked: tensors made in inference mode, as a trainer's may be, count no versions.
            copies.append((name, copy, copy._version))
        yield given
        self._unwritten.update(name for name, copy, version in copies if copy._version == version)

    def _put_back(self, layer: nn.Module) -> None:
        """Undo what the layerwise reload did to a layer that it has not processed."""
        info = LAYERWISE_INFO.get(layer)
        if info is not None and info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()

    def _pending(self) -> Iterator[tuple[str, nn.Module, Any]]:
        for name, layer in self._model.named_modules():
            info = LAYERWISE_INFO.get(layer)
            if info is not None and info.can_load():
                yield name, layer, info

    def _keep_gathered(self, storages: set[int]) -> None:
        """Copy what layers that are not whole yet have gathered from these storages by reference."""
        for _, _, info in self._pending():
            for _, bound in info.loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                        bound.arguments[key] = value.clone()

    def _incomplete_layers(self) -> list[str]:
        """Layers with parameters that got nothing, or, where vLLM pads nothing, less than all of it."""
        return [
            f"{name} ({info.load_numel} of {info.load_numel_total} elements)"
            for name, layer, info in self._pending()
            if not isinstance(layer, Attention)
            and layer._parameters
            and info.load_numel_total  # 0 where another layer has the same parameters
            and (info.load_numel <= 0 or (isinstance(layer, LinearBase) and info.load_numel < info.load_numel_total))
        ]


def is_in_checkpoint_form(model: nn.Module, model_config: Any, device: torch.device) -> bool:
    """Return whether every parameter still is as the checkpoint has it, so that its own weight loader can write to it in place.

    True only where each layer's method is known to leave weights as they are, nothing is computed from them after loading
    (as MLA does) but by the backend of attention, and shape, dtype and strides equal those recorded before the first load.
    """
    if device.type != "cuda" or model_config.quantization is not None:
        return False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and not keeps_checkpoint_form(method):
            return False
        processes = hasattr(layer, "process_weights_after_loading") and not isinstance(layer, QuantizeMethodBase)
        if processes and type(layer) is not Attention:
            return False
        info = LAYERWISE_INFO.get(layer)
        recorded = {} if info is None else info.restore_metadata[0]
        for name, parameter in layer._parameters.items():
            if parameter is not None and name in recorded and not _is_alike(parameter, recorded[name]):
                return False
    return True


def _is_alike(parameter: Tensor, recorded: Tensor) -> bool:
    return (
        parameter.shape == recorded.shape
        and parameter.dtype == recorded.dtype
        and parameter.stride() == recorded.stride()
        and hasattr(parameter, "weight_loader") == hasattr(recorded, "weight_loader")
    )


def _tied_heads(model: nn.Module) -> list[Any]:
    """Output heads whose weight is another layer's parameter."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(layer)
    return [layer for layers in owners.values() if len(layers) > 1 for layer in layers if isinstance(layer, ParallelLMHead)]


def _aliases(model: nn.Module) -> dict[str, set[str]]:
    """Return all names of each parameter by each of its names: loaders report one of those of a layer with several."""
    owners: dict[tuple[int, str], set[str]] = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        for name in layer._parameters:
            owners.setdefault((id(layer), name), set()).add(f"{prefix}.{name}" if prefix else name)
    return {name: names for names in owners.values() for name in names}


def _is_padding(layer: nn.Module) -> bool:
    """Return whether all rows of an embedding on this rank are beyond a vocabulary that is smaller than what vLLM pads it
    to."""
    return isinstance(layer, VocabParallelEmbedding) and layer.shard_indices.num_org_elements == 0


def _optional_parameters(model: nn.Module) -> set[str]:
    """Return the names that a checkpoint may lack: scales of attention layers, and what processing makes, such as scales of
    weights.

    Biases are no such thing, though 0.32 does not note them before the first load.
    """
    return {
        f"{prefix}.{name}"
        for prefix, layer in model.named_modules()
        for name in layer._parameters
        if isinstance(layer, Attention) or (name != "bias" and name not in _recorded(layer, name))
    }


def _recorded(layer: nn.Module, name: str) -> Collection[str]:
    """The parameters that a layer had before the first load; `name` itself where that was not noted."""
    info = LAYERWISE_INFO.get(layer)
    return (name,) if info is None else info.restore_metadata[0].keys()
