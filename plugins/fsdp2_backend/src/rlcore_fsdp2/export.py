"""The policy's full tensors under the names that `save_pretrained` writes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from rlcore.spi import DtypeName, ExportWeightsRequest, TensorSpec, WeightExport
from rlcore.spi.weights import ITEM_BYTES
from rlcore_fsdp2.adapters import Adapters
from rlcore_fsdp2.sharding import local
from rlcore_fsdp2.shards import Parts
from rlcore_torchkit.adapters.lora import merged
from rlcore_torchkit.adapters.lora_targets import LORA_A, LORA_B, is_adapter
from rlcore_torchkit.refit.digest import make_buckets
from rlcore_torchkit.refit.shard_sender import ShardSender


@frozen(kw_only=True)
class Exported:
    """One parameter, or several that a model file holds as one, and the tensors that it holds in their place."""

    parameters: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face name to shape; one entry with the parameter's own name unless transformers fuses it on loading."""
    kept: DtypeName | None = None
    """The dtype of a buffer, which is exported as it is; None for a parameter, which is cast."""

    @property
    def parameter(self) -> str:
        """The first parameter, which stands for all."""
        return self.parameters[0]

    @property
    def is_itself(self) -> bool:
        return tuple(self.shapes) == self.parameters

    def dtype(self, requested: torch.dtype) -> torch.dtype:
        """The dtype that it is exported in."""
        return requested if self.kept is None else getattr(torch, self.kept)


class Exporter:
    """Streams a model's parameters, with its adapters merged in or apart; built while they are whole and without adapters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.adapters: Adapters | None = None
        _note_conversions(model)
        self.exported = _all_exported(model)

    def export(self, request: ExportWeightsRequest, parameters: Mapping[str, Tensor], device: torch.device) -> WeightExport:
        """Every rank iterates, and gets tensors on `device`; whole `parameters` that are there in the dtype are not copied."""
        dtype = getattr(torch, request.dtype)
        exported, merges = self._selected(request, parameters)
        is_own = all(
            self._is_sent_as_held(each, parameters, merges=merges)
            and _is_whole(parameters[each.parameter], each.dtype(dtype), device)
            for each in exported
        )
        return WeightExport(
            weight_version=request.weight_version,
            specs=tuple(_specs(exported, request.dtype)),
            buckets=make_buckets(self._tensors(exported, parameters, merges, dtype, device), request.max_bucket_bytes),
            persistent=is_own,
        )

    def shard(
        self, request: ExportWeightsRequest, parameters: Mapping[str, Tensor], sender: ShardSender, device: torch.device
    ) -> WeightExport:
        """Every rank sends its own blocks. What transformers fuses, or an adapter is merged into, is gathered one at a time,
        and sent as any other tensor that all ranks hold."""
        exported, merges = self._selected(request, parameters)
        parts = Parts(exported, lambda each: self._is_sent_as_held(each, parameters, merges=merges), parameters)
        specs = tuple(_specs(exported, request.dtype))

        def gathered(each: Exported) -> dict[str, Tensor]:
            return dict(self._tensors([each], parameters, merges, each.dtype(getattr(torch, request.dtype)), device))

        return sender.export(request, specs, parts.held(), parts.reader(gathered))

    def _selected(self, request: ExportWeightsRequest, parameters: Mapping[str, Tensor]) -> tuple[list[Exported], bool]:
        """The tensors that the request asks for, and whether adapters are merged into them."""
        if request.adapters == "merged":
            return self.exported, True
        adapters = [_itself(name, parameter) for name, parameter in parameters.items() if is_adapter(name)]
        return ([] if request.adapters == "alone" else self.exported) + adapters, False

    def _is_sent_as_held(self, each: Exported, parameters: Mapping[str, Tensor], *, merges: bool) -> bool:
        adapter = f"{each.parameter.removesuffix('weight')}{LORA_A}"
        return each.is_itself and not (merges and adapter in parameters) and self._factor(each.parameter) == 1.0

    def _factor(self, name: str) -> float:
        """The factor that an exported tensor has: of B, so that the scale of `context.lora` is right at a smaller rank too."""
        if self.adapters is None or not name.endswith(LORA_B):
            return 1.0
        return self.adapters.spec.rank / self.adapters.rank

    def _tensors(
        self,
        exported: Iterable[Exported],
        parameters: Mapping[str, Tensor],
        merges: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Iterator[tuple[str, Tensor]]:
        for each in exported:
            full = {name: self._whole(name, parameters, merges, each.dtype(dtype), device) for name in each.parameters}
            yield from (full if each.is_itself else revert_weight_conversion(self._model, full)).items()

    def _whole(
        self, name: str, parameters: Mapping[str, Tensor], merges: bool, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The weight with its adapter merged in, where it has one and `merges` is set."""
        weight = parameters[name].detach()
        a, b = (parameters.get(f"{name.removesuffix('weight')}{key}") for key in (LORA_A, LORA_B))
        if merges and self.adapters is not None and a is not None and b is not None:
            a, b = (whole(factor.detach(), factor.dtype, device) for factor in (a, b))
            return merged(whole(weight, weight.dtype, device), a, b, self.adapters.scale).to(dtype)
        if (factor := self._factor(name)) == 1.0:
            return whole(weight, dtype, device)
        return (whole(weight, weight.dtype, device) * factor).to(dtype)


def _specs(exported: Iterable[Exported], dtype: DtypeName) -> Iterator[TensorSpec]:
    for each in exported:
        for name, shape in each.shapes.items():
            yield TensorSpec(name=name, shape=shape, dtype=each.kept or dtype, keeps_dtype=each.kept is not None)


def _itself(name: str, parameter: Tensor) -> Exported:
    return Exported(parameters=(name,), shapes={name: tuple(parameter.shape)})


def exported_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, a tied one by that of its checkpoints, and the buffers that these hold, such as the biases of
    routers."""
    saved, tied = model.state_dict().keys(), getattr(model, "all_tied_weights_keys", {})
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            names.setdefault(id(parameter), name)
    parameters = {names.get(id(parameter), name): parameter for name, parameter in model.named_parameters()}
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _note_conversions(model: Any) -> None:
    """Note how checkpoints hold a model that from_pretrained did not make: transformers would search all modules for each
    tensor."""
    if getattr(model, "_weight_conversions", None) is None:
        found = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        # As transformers does it: whether checkpoints have a prefix is known of loaded models alone.
        model._weight_conversions = [each for each in found if not isinstance(each, PrefixChange)]


def _all_exported(model: nn.Module) -> list[Exported]:
    """Return each parameter and buffer with its tensors; those that share one together."""
    tensors, by_tensor = exported_tensors(model), dict[str, list[str]]()
    for name, tensor in tensors.items():
        for key in _exported(model, {name: tensor}).shapes:
            by_tensor.setdefault(key, []).append(name)
    groups = dict.fromkeys(map(tuple, by_tensor.values()))
    return [_exported(model, {name: tensors[name] for name in group}) for group in groups]


def _exported(model: nn.Module, tensors: Mapping[str, Tensor]) -> Exported:
    converted = revert_weight_conversion(model, {name: torch.empty_like(each, device="meta") for name, each in tensors.items()})
    shapes = {key: tuple(tensor.shape) for key, tensor in converted.items()}
    first = next(iter(tensors.values()))
    dtype = str(first.dtype).removeprefix("torch.")
    kept: Any = None if isinstance(first, nn.Parameter) else dtype if dtype in ITEM_BYTES else "float32"
    return Exported(parameters=tuple(tensors), shapes=shapes, kept=kept)


def _is_whole(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    is_sharded = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
    return not is_sharded and parameter.dtype == dtype and local(parameter).device.type == device.type


def whole(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The whole tensor in `dtype` on `device`; cast before it is gathered, so that less travels."""
    part = local(parameter).to(device, dtype)
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return part
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    shape, stride = parameter.shape, parameter.stride()
    full = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    for dim in range(mesh.ndim):  # FSDP's dimensions come first: they divide the parts that the others have made
        if not placements[dim].is_replicate():
            placements[dim] = Replicate()
            full = full.redistribute(placements=placements)
    return full.to_local()
