"""The announcement of a refit, made before its first byte, and the tensors of the model's checkpoint."""

import copy
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from rlcore.spi import LoraSpec, TensorSpec, WeightExport
from rlcore_torchkit.adapters.lora import linear_layers_of
from rlcore_torchkit.adapters.lora_targets import adapter_shapes, is_adapter, targeted
from rlcore_torchkit.huggingface.models import checkpoint_shapes, empty_model
from rlcore_torchkit.transformers_import import import_transformers


@frozen(kw_only=True)
class AdapterPlace:
    """The number that the adapter of a refit has in the engines, and the others that stay."""

    number: int = 0
    """vLLM's number of the adapter; 0 where there are none."""
    kept: Mapping[int, int] = field(factory=dict)
    """The version of each other adapter, by its number. The engines forget those that are left out."""


NO_PLACE = AdapterPlace()


@frozen(kw_only=True)
class Manifest:
    """Every tensor of a refit in the export's order."""

    weight_version: int
    specs: tuple[TensorSpec, ...]
    persistent: bool
    """True where the tensors themselves stay valid until the refit ends, rather than until their bucket is acknowledged."""
    lora: LoraSpec | None = None
    """The form of the adapters among them; None where there are none."""
    place: AdapterPlace = NO_PLACE

    @classmethod
    def of(cls, export: WeightExport, lora: LoraSpec | None = None, place: AdapterPlace = NO_PLACE) -> "Manifest":
        version = export.weight_version
        return cls(weight_version=version, specs=export.specs, persistent=export.persistent, lora=lora, place=place)

    @property
    def has_weights(self) -> bool:
        """Return whether it brings the model's own weights, and not adapters alone."""
        return not all(is_adapter(spec.name) for spec in self.specs)

    def to_wire(self) -> dict[str, Any]:
        """Plain containers, which vLLM passes on between processes."""
        lora = self.lora
        return {
            "weight_version": self.weight_version,
            "names": [spec.name for spec in self.specs],
            "shapes": [list(spec.shape) for spec in self.specs],
            "dtypes": [spec.dtype for spec in self.specs],
            "kept": [spec.name for spec in self.specs if spec.keeps_dtype],
            "persistent": self.persistent,
            "lora": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)},
            "place": {"number": self.place.number, "kept": [list(pair) for pair in self.place.kept.items()]},
        }

    @classmethod
    def from_wire(cls, content: Mapping[str, Any], specs: tuple[TensorSpec, ...] | None = None) -> "Manifest":
        """`specs` are those of the content, where they are known."""
        if specs is None:
            columns, kept = zip(content["names"], content["shapes"], content["dtypes"], strict=True), set(content["kept"])
            specs = tuple(
                TensorSpec(name=name, shape=tuple(shape), dtype=dtype, keeps_dtype=name in kept)
                for name, shape, dtype in columns
            )
        form = content["lora"]
        lora = None if form is None else LoraSpec(rank=form["rank"], alpha=form["alpha"], targets=tuple(form["targets"]))
        place = AdapterPlace(number=content["place"]["number"], kept=dict(content["place"]["kept"]))
        version, persistent = content["weight_version"], content["persistent"]
        return cls(weight_version=version, specs=specs, persistent=persistent, lora=lora, place=place)


def expected_adapters(hf_config: Any, trust_remote_code: bool, spec: LoraSpec) -> dict[str, tuple[int, ...]]:
    """Name to shape of A and B of every layer that has an adapter."""
    layers = linear_layers_of(_empty_model(hf_config, trust_remote_code))
    return dict(adapter_shapes(targeted(layers, spec), spec.rank))


def expected_shapes(hf_config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """`checkpoint_shapes` of transformers' own model class: vLLM's skips names that it does not know."""
    return checkpoint_shapes(_empty_model(hf_config, trust_remote_code))


def _empty_model(hf_config: Any, trust_remote_code: bool) -> Any:
    import_transformers()
    return empty_model(copy.deepcopy(hf_config), str(hf_config.name_or_path), trust_remote_code=trust_remote_code)
