"""The generator `transformers` as an engine whose families are tried."""

from collections.abc import Callable
from typing import Any

from rlcore import spi
from rlcore_torchkit.testing.families.backends import installed_provider
from rlcore_torchkit.testing.families.engine import Family, TriedEngine
from rlcore_torchkit.testing.families.tiny import SIZES
from rlcore_transformers.backend import TransformersBackend
from rlcore_transformers.config import TransformersConfig

LLAMA = Family(model_type="llama", class_name="LlamaForCausalLM", implementation="LlamaForCausalLM")
HELD = {"model.norm.weight": 1, "model.fused": 2}


class Engine(TriedEngine):
    name = "transformers"
    trainer = "fsdp2"
    command = "transformers"
    channel = "in_process"
    provider = installed_provider("generators", "transformers")
    initializer_range = 0.1

    def __init__(self, held: dict[str, int] = HELD, spoil: Callable[[Any], Any] = lambda backend: backend) -> None:
        super().__init__("cpu")
        self._held, self._spoil = held, spoil

    def families(self) -> dict[str, Family]:
        return {"llama": LLAMA}

    def versions(self) -> str:
        return "one"

    def sizes(self) -> dict[str, int]:
        return dict(SIZES)

    def options(self, model_type: str) -> dict[str, Any]:
        return {"tie_word_embeddings": model_type == "llama"}

    def config(self) -> TransformersConfig:
        return TransformersConfig()

    def start(self, context: spi.GeneratorContext) -> Any:
        return self._spoil(TransformersBackend(context, self.config()))

    def held_digests(self, backend: Any) -> dict[str, int]:
        return self._held

    def own_digests(self, model: spi.ModelSpec) -> dict[str, int]:
        return HELD

    def prepare_child(self) -> None:
        pass
