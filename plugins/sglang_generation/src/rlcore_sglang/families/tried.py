"""SGLang as the engine whose families are tried."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from rlcore import spi
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.provider import PROVIDER
from rlcore_torchkit.testing.families.backends import generator_context
from rlcore_torchkit.testing.families.engine import Digests, Family, TriedEngine
from rlcore_torchkit.testing.families.tiny import SIZES

_CONFIG = SglangConfig(max_total_tokens=4096, max_running_requests=8, mem_fraction_static=0.1)


class TriedSglang(TriedEngine):
    """SGLang, whose engine is in processes of its own."""

    name = "sglang"
    trainer = "fsdp2"
    command = "rlcore_sglang.families"
    channel = "shared_memory"
    preloaded = (
        "rlcore_torchkit.testing.families.engine_trial",
        "rlcore_fsdp2.backend",
        "rlcore_sglang.backend",
        "transformers.models.auto.modeling_auto",
    )
    provider = PROVIDER
    initializer_range = 0.2

    def families(self) -> dict[str, Family]:
        from sglang.srt.models.registry import ModelRegistry
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        classes = set(ModelRegistry.get_supported_archs())
        return {
            name: Family(model_type=name, class_name=class_name, implementation=class_name)
            for name, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
            if class_name in classes
        }

    def versions(self) -> str:
        packages = {"SGLang": "sglang", "torch": "torch", "transformers": "transformers"}
        return ", ".join(f"{name} {version(package)}" for name, package in packages.items())

    def sizes(self) -> Mapping[str, int]:
        return SIZES

    def options(self, model_type: str) -> Mapping[str, Any]:
        return {"sliding_window": None} if model_type == "mistral" else {}

    def config(self) -> SglangConfig:
        return _CONFIG

    def start(self, context: spi.GeneratorContext) -> Any:
        from rlcore_sglang.backend import SglangBackend

        return SglangBackend(context, _CONFIG)

    def held_digests(self, backend: Any) -> Digests:
        (digests,) = backend.held_digests()
        found: Digests = digests
        return found

    def own_digests(self, model: spi.ModelSpec) -> Digests:
        backend = self.start(generator_context(model, None, self.device))
        try:
            return self.held_digests(backend)
        finally:
            backend.close(spi.CloseRequest())

    def prepare_child(self) -> None:
        """Nothing: the engine has an environment of its own."""
