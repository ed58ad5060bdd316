"""A real engine beside what the conformance kit asks: requests that are interrupted, and an engine that dies."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlcore_sglang.requirements import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

import psutil
from safetensors.torch import load_file

from rlcore.spi import (
    CloseRequest,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    WorkerError,
)
from rlcore_conformance.references.tensors import make_export
from rlcore_sglang.backend import SglangBackend
from rlcore_sglang.config import SglangConfig
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def backend(model: Path) -> Iterator[SglangBackend]:
    context = GeneratorContext(
        model=ModelSpec(path=str(model), dtype="float32"),
        rank_info=RankInfo(),
        seed=0,
        max_sequence_length=96,
        channel="directory",
    )
    one = SglangBackend(context, SglangConfig(max_total_tokens=4096))
    yield one
    one.close(CloseRequest())


def refit(backend: SglangBackend, model: Path, version: int) -> None:
    weights = make_export(load_file(model / "model.safetensors"), version)
    backend.refit(RefitRequest(weight_version=version, channel="directory", weights=weights, may_alias=False))


def request(version: int, **options: object) -> GenerateRequest:
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[1, 2, 3]]),
        num_samples=4,
        seeds=np.arange(4),
        max_tokens=np.array([1, 90, 90, 90], np.int32),
        weight_version=version,
        **{"sampling": SamplingParams(), **options},
    )


class Interrupt(Exception):
    """What a caller raises under way."""


def test_an_interrupted_request_leaves_the_engine_free(backend: SglangBackend, model: Path) -> None:
    """The refit after it waits for what still runs, and later samples are whole."""
    refit(backend, model, 0)

    def interrupt(_sample: int, _one: GenerateResult) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        backend.generate(request(0, on_finished=interrupt))
    refit(backend, model, 1)
    result = backend.generate(request(1))
    assert np.diff(result.offsets).tolist() == [1, 90, 90, 90]
    assert (result.finish_reasons == FinishReason.LENGTH).all()


def test_the_models_own_end_token_stops_nothing(backend: SglangBackend, model: Path) -> None:
    """A request names what stops a sample; the model's own end token is a token as any other."""
    refit(backend, model, 0)
    found = backend.generate(request(0))
    stop = int(found.tokens[1])
    result = backend.generate(request(0, sampling=SamplingParams(stop_token_ids=(stop,))))
    for sample, reason in zip(np.split(result.tokens, result.offsets[1:-1]), result.finish_reasons, strict=True):
        assert (reason == FinishReason.STOP) == (sample[-1] == stop)
        assert stop not in sample[:-1]


def test_an_engine_that_died_is_started_anew_by_the_next_refit(backend: SglangBackend, model: Path) -> None:
    refit(backend, model, 0)
    (engine,) = [child for child in psutil.Process().children() if "rlcore_sglang.host" in child.cmdline()]
    engine.kill()
    with pytest.raises(WorkerError, match="SIGKILL"):
        backend.generate(request(0))
    refit(backend, model, 1)
    assert len(backend.generate(request(1)).offsets) == 5
