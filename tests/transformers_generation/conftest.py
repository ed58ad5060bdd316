"""Models, exports, generators and an independent reference, shared by the generator's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import (
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    ModelSpec,
    NamedTensor,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    TensorSpec,
    WeightBucket,
    WeightExport,
    tensor_digest,
)
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.backend import TransformersBackend
from rlcore_transformers.config import TransformersConfig

ARCHITECTURES = installed_model_types()
MAX_LENGTH = 96


def make_checkpoint(directory: Path, architecture: str, *, seed: int = 0, tied: bool = True, **overrides: Any) -> Path:
    """A tiny model directory whose biases and norms are random too, so that leaving one out shows."""
    make_model(directory, architecture, seed=seed, tied=tied, alphabet="abcdefghijklmnopqrstuvwxyz .")
    config = AutoConfig.from_pretrained(directory, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    return directory


def checkpoint_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What save_pretrained wrote."""
    return load_file(directory / "model.safetensors")


def make_export(
    tensors: dict[str, torch.Tensor], *, version: int = 0, persistent: bool = False, num_buckets: int = 3
) -> WeightExport:
    """An export of these tensors, with digests by the numpy definition."""
    dtype_names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    specs = tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_names[tensor.dtype]) for name, tensor in tensors.items()
    )
    named = [NamedTensor(name=name, tensor=tensor, digest=digest_of(tensor)) for name, tensor in tensors.items()]
    buckets = [WeightBucket(tensors=tuple(named[first::num_buckets])) for first in range(num_buckets)]
    return WeightExport(weight_version=version, specs=specs, buckets=iter(buckets), persistent=persistent)


def digest_of(tensor: torch.Tensor) -> int:
    return tensor_digest(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


def refit(backend: TransformersBackend, export: WeightExport, *, may_alias: bool = False) -> dict[str, int]:
    request = RefitRequest(weight_version=export.weight_version, channel="in_process", weights=export, may_alias=may_alias)
    return dict(backend.refit(request).digests)


def make_backend(
    directory: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    max_length: int = MAX_LENGTH,
    fill: bool = True,
    **options: Any,
) -> TransformersBackend:
    """A generator that holds the directory's weights, unless `fill` is False."""
    context = GeneratorContext(
        model=ModelSpec(path=str(directory), dtype=dtype),
        rank_info=RankInfo(device=device),
        seed=0,
        max_sequence_length=max_length,
    )
    backend = TransformersBackend(context, TransformersConfig(**options))
    if fill:
        tensors = checkpoint_tensors(directory)
        refit(backend, make_export({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}))
    return backend


def make_request(
    prompts: Sequence[Sequence[int]],
    *,
    num_samples: int = 1,
    max_tokens: int | Sequence[int] = 12,
    seeds: Sequence[int] | None = None,
    version: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    count = len(prompts) * num_samples
    limits = np.full(count, max_tokens, np.int32) if isinstance(max_tokens, int) else np.array(max_tokens, np.int32)
    return GenerateRequest(
        prompts=RaggedTokens.from_lists(prompts),
        num_samples=num_samples,
        seeds=np.arange(count) if seeds is None else np.array(seeds, np.int64),
        max_tokens=limits,
        sampling=SamplingParams(**sampling),
        weight_version=version,
    )


def split(result: GenerateResult, column: str = "tokens") -> list[list[Any]]:
    """One list a sample."""
    values = getattr(result, column)
    return [values[first:last].tolist() for first, last in zip(result.offsets[:-1], result.offsets[1:], strict=True)]


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 20, length).tolist() for length in lengths]


def reference_logits(directory: Path, sequence: Sequence[int]) -> np.ndarray:
    """float64 [T, V]: transformers' own modules and eager attention, in float32, on one sequence without a cache."""
    model = reference_model(directory)
    with torch.no_grad():
        return model(torch.tensor([list(sequence)]), use_cache=False).logits[0].double().numpy()


_MODELS: dict[Path, Any] = {}


def reference_model(directory: Path) -> Any:
    if directory not in _MODELS:
        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        _MODELS[directory] = loaded.eval()
    return _MODELS[directory]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The functions above, which test modules cannot import."""
    return SimpleNamespace(
        checkpoint_tensors=checkpoint_tensors,
        digest_of=digest_of,
        log_softmax=log_softmax,
        make_backend=make_backend,
        make_export=make_export,
        make_request=make_request,
        random_prompts=random_prompts,
        reference_logits=reference_logits,
        reference_model=reference_model,
        refit=refit,
        split=split,
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(architecture, **options) makes each model directory once."""
    made: dict[str, Path] = {}

    def make(architecture: str = "qwen3", **options: Any) -> Path:
        key = f"{architecture}-{sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[key]

    return make


@pytest.fixture(scope="session", params=ARCHITECTURES)
def any_checkpoint(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    """A model of each architecture in turn; tied embeddings in half of them."""
    return checkpoint(request.param, tied=request.param in ("qwen3", "qwen3_moe"))


@pytest.fixture(scope="session")
def qwen3(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="session")
def qwen3_backend(qwen3: Path) -> TransformersBackend:
    """Shared by tests that change neither its weights nor its state."""
    return make_backend(qwen3)
