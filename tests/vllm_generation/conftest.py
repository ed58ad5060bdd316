"""Two small models of one architecture, and engines that several tests share."""

import json
import os
import string
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen
from safetensors.torch import load_file

from rlcore.spi import (
    CloseRequest,
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
)
from rlcore_conformance.references.tensors import make_export
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.setup.config import VllmConfig

from .vllm_checked import Problems, section_problems

MAX_SEQUENCE_LENGTH = 300
ANOTHER_WAY_TO_SAMPLE = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 2,
    "top_p": 0.5,
    "repetition_penalty": 3.0,
    "max_new_tokens": 4,
    "eos_token_id": list(range(50)),
    "bad_words_ids": [[token] for token in range(50, 80)],
}
"""A model's own defaults, which are not what the core asks for."""
CONFIG = VllmConfig(cpu_kv_cache_gib=0.1, refit_timeout_s=600.0)


@frozen(kw_only=True)
class TwoModels:
    """Directories of models that differ in their weights alone, and the weights."""

    directories: tuple[Path, Path]

    def context(self, channel="in_process", **options):
        model = ModelSpec(path=str(self.directories[0]))
        return GeneratorContext(
            model=model, rank_info=RankInfo(), seed=0, max_sequence_length=MAX_SEQUENCE_LENGTH, channel=channel, **options
        )

    def refit(self, backend, which, version, channel="in_process"):
        weights = make_export(load_file(self.directories[which] / "model.safetensors"), version)
        return backend.refit(RefitRequest(weight_version=version, channel=channel, weights=weights, may_alias=False))


@pytest.fixture(scope="session")
def two_models(tmp_path_factory):
    base = tmp_path_factory.mktemp("vllm-models")
    # vLLM's attention on CPU takes heads of at least 32.
    alphabet = string.printable + "é"  # a character of two tokens
    first, second = (make_model(base / str(seed), hidden_size=64, num_heads=2, alphabet=alphabet, seed=seed) for seed in (0, 1))
    for directory in (first, second):
        (directory / "generation_config.json").write_text(json.dumps(ANOTHER_WAY_TO_SAMPLE))
    return TwoModels(directories=(first, second))


@pytest.fixture(scope="module")
def open_backends():
    """The engine in this process that a module's tests share, while there is one."""
    backends = []
    yield backends
    for backend in backends:
        backend.close(CloseRequest())


@pytest.fixture
def local_backend(two_models, open_backends):
    """An engine in this process."""
    if not open_backends:
        open_backends.append(VllmBackend(two_models.context(), CONFIG))
    return open_backends[0]


@pytest.fixture
def free_process(open_backends):
    """No engine in this process, where there can be one alone."""
    while open_backends:
        open_backends.pop().close(CloseRequest())


def look_at(model: Path, torchao: Path) -> None:
    """Let vLLM look at a model's architecture without the torchao that makes this file."""
    from vllm import ModelRegistry  # for the tests that need it alone: it takes seconds

    with pytest.MonkeyPatch.context() as patch:
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path != str(torchao.parent)))
        for name in ModelRegistry.models.keys() & json.loads((model / "config.json").read_text())["architectures"]:
            ModelRegistry.models[name].inspect_model_cls()


@pytest.fixture(scope="module")
def torchao_imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that a torchao makes when it is imported, in processes that are started while this fixture is.

    What is to be started beside it is to be `look_at`ed before: vLLM looks at each architecture in a process of its own, which
    imports all that transformers finds, and keeps what it learns in the user's cache.
    """
    folder = tmp_path_factory.mktemp("site")
    (folder / "torchao-9.0.dist-info").mkdir()
    (folder / "torchao-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 9.0\n")
    (folder / "torchao.py").write_text("open(__file__ + '.imported', 'w').close()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder / "torchao.py.imported"


@pytest.fixture(scope="module")
def hosted_backend(two_models, tmp_path_factory, torchao_imported):
    """Two engines in processes of their own."""
    look_at(two_models.directories[0], torchao_imported)
    context = two_models.context("shared_memory", log_directory=tmp_path_factory.mktemp("vllm-logs"))
    backend = VllmBackend(context, VllmConfig(replicas=2, cpu_kv_cache_gib=0.1, refit_timeout_s=600.0))
    yield backend
    backend.close(CloseRequest())


def request_of(lengths: list[int], num_samples: int, max_tokens: int = 8) -> GenerateRequest:
    num = len(lengths) * num_samples
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[index] * length for index, length in enumerate(lengths)]),
        num_samples=num_samples,
        seeds=np.arange(num) + 100,
        max_tokens=np.full(num, max_tokens, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two of them for keys and values."""
    return make_model(tmp_path_factory.mktemp("check") / "model", "qwen3", max_length=128, hidden_size=128)


@pytest.fixture
def problems(checked: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """`section_problems` of that model."""
    return partial(section_problems, monkeypatch, checked)
