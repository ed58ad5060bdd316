"""vLLM as the engine whose families are tried."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from attrs import evolve

from rlcore import spi
from rlcore_torchkit.testing.families.backends import generator_context
from rlcore_torchkit.testing.families.engine import Digests, Family, TriedEngine
from rlcore_vllm.families.sizes import CPU_OPTIONS, OPTIONS, SIZES
from rlcore_vllm.provider import PROVIDER
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import FLOAT32_HEAD, engine_settings

_CONFIG = VllmConfig(
    cpu_kv_cache_gib=0.25,
    gpu_memory_utilization=0.05,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    enforce_eager=True,
    refit_timeout_s=600.0,
)
_CACHE_BYTES = 2**28
"""KV cache on CUDA: a number of bytes, since engines of several families would count each other's memory."""


class TriedVllm(TriedEngine):
    """vLLM with its engine in the process of the trial."""

    name = "vllm"
    trainer = "fsdp2"
    command = "rlcore_vllm.families"
    channel = "in_process"
    preloaded = (
        "rlcore_torchkit.testing.families.engine_trial",
        "rlcore_fsdp2.backend",
        "rlcore_vllm.families.preloaded",
        "transformers.models.auto.modeling_auto",
        "transformers.generation.utils",
    )
    provider = PROVIDER
    initializer_range = 0.05

    def families(self) -> dict[str, Family]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        from rlcore_vllm.families.registry import registered_classes

        classes = registered_classes()
        return {
            name: Family(model_type=name, class_name=class_name, implementation=classes[class_name])
            for name, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
            if class_name in classes
        }

    def versions(self) -> str:
        import vllm

        return f"vLLM {vllm.__version__}, torch {version('torch')}, transformers {version('transformers')}"

    def sizes(self) -> Mapping[str, int]:
        return SIZES

    def options(self, model_type: str) -> Mapping[str, Any]:
        on_device = CPU_OPTIONS.get(model_type, {}) if self.device == "cpu" else {}
        return {**OPTIONS.get(model_type, {}), **on_device}

    def config(self) -> VllmConfig:
        return _CONFIG

    def start(self, context: spi.GeneratorContext) -> Any:
        from rlcore_vllm.backend import VllmBackend

        return VllmBackend(context, self._started_config())

    def held_digests(self, backend: Any) -> Digests:
        (digests,) = backend.held_digests()
        found: Digests = digests
        return found

    def own_digests(self, model: spi.ModelSpec) -> Digests:
        from rlcore_vllm.engines.engine import Engine

        settings = engine_settings(generator_context(model, None, self.device), self._started_config())
        arguments = {**settings.arguments, "hf_overrides": FLOAT32_HEAD, "enable_sleep_mode": self.device == "cuda"}
        engine = Engine(evolve(settings, in_process=True, arguments=arguments))
        try:
            (digests,) = engine.call_workers("rlcore_held_digests", {}).result()
        finally:
            engine.close()
        found: Digests = digests
        return found

    def prepare_child(self) -> None:
        # Triton reads it when it compiles, which it does long after an engine in this process has started.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from rlcore_vllm.families.registry import look_at_models_here

        look_at_models_here()

    def _started_config(self) -> VllmConfig:
        """The section with an argument that `check` refuses in a recipe."""
        return _CONFIG if self.device == "cpu" else evolve(_CONFIG, engine={"kv_cache_memory_bytes": _CACHE_BYTES})
