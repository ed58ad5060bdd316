"""Tiny model directories of every architecture, made once, and the plain transformers forward to compare with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.testing.models import make_model

ARCHITECTURES = installed_model_types()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random model of an architecture; made at the first request."""
    made: dict[str, Path] = {}

    def directory(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_model(tmp_path_factory.mktemp(architecture), architecture)  # type: ignore[arg-type]
        return made[architecture]

    return directory


@pytest.fixture(scope="session", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def plain_model(model_directory: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' own model with eager attention in float32; parameters are shared between tests, gradients cleared."""
    loaded: dict[str, Any] = {}

    def load(architecture: str) -> Any:
        if architecture not in loaded:
            from transformers import AutoModelForCausalLM

            loaded[architecture] = AutoModelForCausalLM.from_pretrained(
                model_directory(architecture), attn_implementation="eager", dtype=torch.float32
            ).eval()
        loaded[architecture].zero_grad(set_to_none=True)
        return loaded[architecture]

    return load


@pytest.fixture(scope="session")
def packed_model(model_directory: Callable[[str], Path]) -> Callable[[str], Any]:
    """Our loading of the same directory: float32, packed attention, head not patched."""
    from rlcore.spi import ModelSpec
    from rlcore_torchkit.huggingface.models import load_model

    loaded: dict[str, Any] = {}

    def load(architecture: str) -> Any:
        if architecture not in loaded:
            loaded[architecture] = load_model(ModelSpec(path=str(model_directory(architecture))), dtype=torch.float32)
        loaded[architecture].zero_grad(set_to_none=True)
        return loaded[architecture]

    return load


@pytest.fixture(scope="session")
def pack() -> Callable[..., tuple[torch.Tensor, np.ndarray]]:
    """Random tokens int32 [T] and offsets int64 [N+1] for given lengths."""

    def make(lengths: list[int], *, seed: int = 0, vocabulary: int = 100) -> tuple[torch.Tensor, np.ndarray]:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocabulary, (int(offsets[-1]),), generator=generator, dtype=torch.int32), offsets

    return make
