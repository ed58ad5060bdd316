"""Guessed tokens, with a model that repeats itself, so that guesses are accepted, and whose distribution has a closed form."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from vllm_drafters import make_draft_model, make_head, make_with_own_head

from rlcore.spi import (
    CloseRequest,
    DraftCounts,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    SetResidencyRequest,
    capabilities,
)
from rlcore_conformance.references.tensors import make_export
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.checks.drafter_check import speculation_problems
from rlcore_vllm.provider import disabled_capabilities
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import engine_settings

EPSILON = 1e-6
GUESSED = 3
METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
APART = "mtp-apart"
"""A multi-token head in another directory than the policy's, whose files have none."""
LENGTH = 32


@frozen(kw_only=True, eq=False)
class Repetitive:
    """Attention and MLPs add nothing, so that a token depends on the one before it alone."""

    directory: Path

    def weights(self, scale: float) -> dict[str, torch.Tensor]:
        """The weights that a trainer sends, with a last norm that makes a token follow itself, the more often the larger it
        is. A multi-token head is not among them."""
        found = without_head(self.directory)
        if "lm_head.weight" in found:
            found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
        for name, value in found.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
        found["model.norm.weight"].fill_(scale)
        return found

    def logprobs(self, scale: float, sampling: SamplingParams) -> Any:
        """float64 [V, V]: of each token behind each."""
        embedding = self.weights(scale)["model.embed_tokens.weight"].double().numpy()
        hidden = scale * embedding / np.sqrt(np.mean(embedding**2, axis=1, keepdims=True) + EPSILON)
        logits = hidden @ embedding.T / sampling.temperature
        ranked = np.argsort(-logits, axis=1)
        probabilities = np.take_along_axis(np.exp(logits - logits.max(axis=1, keepdims=True)), ranked, axis=1)
        if sampling.top_k:
            probabilities[:, sampling.top_k :] = 0.0
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        probabilities[np.cumsum(probabilities, axis=1) - probabilities >= sampling.top_p] = 0.0
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        table = np.empty_like(probabilities)
        np.put_along_axis(table, ranked, probabilities, axis=1)
        with np.errstate(divide="ignore"):
            return np.log(table)


def without_head(directory: Path) -> dict[str, torch.Tensor]:
    """The weights in a model's files but for those of a multi-token head."""
    num_layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    found = load_file(directory / "model.safetensors")
    return {name: value for name, value in found.items() if not name.startswith(f"model.layers.{num_layers}.")}


def make_repetitive(directory: Path, method: str = "ngram") -> Repetitive:
    """A model that drafters of this method guess for."""
    if method in ("mtp", APART):
        make_with_own_head(directory)
    else:
        make_model(directory, "qwen3", hidden_size=64, num_heads=2, tied=True, initializer_range=0.2, max_length=256)
    return Repetitive(directory=directory)


@pytest.fixture(scope="module", params=(*METHODS, APART))
def method(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, method: str) -> Repetitive:
    return make_repetitive(tmp_path_factory.mktemp("repetitive") / "model", method)


def context_of(model: Repetitive, **options: Any) -> GeneratorContext:
    spec = ModelSpec(path=str(model.directory))
    return GeneratorContext(model=spec, rank_info=RankInfo(**options), seed=0, max_sequence_length=96)


@pytest.fixture(scope="module")
def engine(model: Repetitive, method: str) -> Iterator[VllmBackend]:
    backend = VllmBackend(context_of(model), VllmConfig(cpu_kv_cache_gib=0.1, **guesses(method, model)))
    yield backend
    backend.close(CloseRequest())


def guesses(method: str, model: Repetitive) -> dict[str, Any]:
    """The options of a section that guesses in this way; a drafter is written beside the model."""
    if method == "ngram":
        return {"speculative_ngram": GUESSED}
    if method == "mtp":
        return {"speculative_method": "mtp", "speculative_tokens": GUESSED}
    if method == APART:
        head = model.directory.parent / "head"
        shutil.copytree(model.directory, head)
        save_file(without_head(head), model.directory / "model.safetensors", metadata={"format": "pt"})
        return {"speculative_method": "mtp", "speculative_model": str(head), "speculative_tokens": GUESSED}
    drafter = model.directory.parent / "drafters" / method
    if not drafter.exists():
        drafter.parent.mkdir(exist_ok=True)
        if method == "draft_model":
            make_draft_model(drafter, model.directory, model.weights(1.0))
        else:
            make_head(drafter, method, model.directory)
    return {"speculative_model": str(drafter), "speculative_method": method, "speculative_tokens": GUESSED}


def request_of(version: int, sampling: SamplingParams) -> GenerateRequest:
    """Eight prompts that end in the same token."""
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[5 + number, 9] for number in range(8)]),
        num_samples=1,
        seeds=np.arange(8, dtype=np.int64),
        max_tokens=np.full(8, LENGTH, np.int32),
        sampling=sampling,
        weight_version=version,
    )


def assert_of_the_models_distribution(result: GenerateResult, table: Any) -> None:
    """Log-probabilities are those in `table`, float64 [V, V] of each token behind each; tokens repeat as often as it says."""
    tokens = result.tokens.reshape(8, LENGTH)
    before = np.concatenate([np.full((8, 1), 9), tokens[:, :-1]], axis=1)
    np.testing.assert_allclose(result.logprobs.reshape(8, LENGTH), table[before, tokens], atol=1e-4)
    repeats = np.exp(table[before, before])
    surplus = ((tokens == before) - repeats).sum()
    assert abs(surplus) < 5 * np.sqrt((repeats * (1 - repeats)).sum()) + 1


@pytest.fixture
def accepted(engine: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of each sequence were sampled in each step that judged guesses."""
    from vllm.v1.sample import rejection_sampler

    judge, found = rejection_sampler.rejection_sample, []

    def judged(*args: Any, **kwargs: Any) -> torch.Tensor:
        sampled = judge(*args, **kwargs)
        found.extend((sampled >= 0).sum(dim=1).tolist())
        return sampled

    monkeypatch.setattr(rejection_sampler, "rejection_sample", judged)
    return found


@pytest.mark.wide(keep=["eagle3-plain", "mtp-apart-top_p"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.8),
    ],
    ids=["plain", "top_k", "top_p"],
)
def test_tokens_are_of_the_models_distribution_whatever_is_guessed(
    engine: VllmBackend, model: Repetitive, accepted: list[int], sampling: SamplingParams
) -> None:
    """Their log-probabilities are the closed form's, and tokens repeat as often as these say; after a refit, too, which tells
    what was guessed since the one before."""
    num_seen = 0
    for version, scale in enumerate((1.0, 0.6, 0.8)):
        weights = make_export(model.weights(scale), version)
        result = engine.refit(RefitRequest(weight_version=version, channel="in_process", weights=weights, may_alias=False))
        if version:
            drafts, seen, num_seen = result.drafts, accepted[num_seen:], len(accepted)
            assert drafts.num_accepted_tokens == sum(seen) - len(seen) > 0
            assert 0 < drafts.num_drafts <= len(seen)
            assert drafts.num_accepted_tokens <= drafts.num_draft_tokens <= GUESSED * drafts.num_drafts
        assert_of_the_models_distribution(engine.generate(request_of(version, sampling)), model.logprobs(scale, sampling))
    assert max(accepted) == 1 + GUESSED
    assert sum(accepted) > 1.3 * len(accepted)


@pytest.mark.wide(keep=["ngram", "eagle3"])
@pytest.mark.parametrize("method", METHODS, scope="module")
def test_steps_with_many_sequences_draft_nothing(model: Repetitive, method: str, tmp_path: Path) -> None:
    """At most three sequences are drafted for: those that are left of eight. All tokens are of the model's distribution."""
    table = model.logprobs(0.8, SamplingParams())
    context = evolve(context_of(model), channel="shared_memory", log_directory=tmp_path)
    config = VllmConfig(cpu_kv_cache_gib=0.1, speculative_most_sequences=3, **guesses(method, model))
    backend = VllmBackend(context, config)

    def refit(version: int) -> DraftCounts | None:
        weights = make_export(model.weights(0.8), version)
        request = RefitRequest(weight_version=version, channel="shared_memory", weights=weights, may_alias=False)
        return backend.refit(request).drafts

    def drafts(version: int, lengths: list[int]) -> DraftCounts | None:
        refit(version)
        request = evolve(request_of(version, SamplingParams()), max_tokens=np.array(lengths, np.int32))
        result = backend.generate(request)
        before = np.concatenate([[9], result.tokens[:-1]])
        before[result.offsets[:-1]] = 9
        np.testing.assert_allclose(result.logprobs, table[before, result.tokens], atol=1e-4)
        assert (np.diff(result.offsets) == lengths).all()
        return refit(version + 1)

    try:
        assert drafts(0, [LENGTH] * 8) == DraftCounts()
        some = drafts(2, [4] * 5 + [2 * LENGTH] * 3)
        assert some is not None
        assert some.num_accepted_tokens > 0
        assert some.num_drafts <= 3 * (2 * LENGTH - 4)
        assert some.num_draft_tokens <= GUESSED * some.num_drafts
    finally:
        backend.close(CloseRequest())


@pytest.mark.wide(keep=["draft_model"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS, scope="module")
def test_guesses_are_as_good_after_the_engine_has_slept(model: Repetitive, tmp_path: Path, method: str) -> None:
    """Before each refit the engine sleeps, as it does while a trainer has the device, and the drafter guesses as before."""
    context = evolve(context_of(model, device="cuda"), channel="cuda_ipc", log_directory=tmp_path)
    options = guesses(method, model)
    backend = VllmBackend(context, VllmConfig(gpu_memory_utilization=0.2, max_num_seqs=16, enforce_eager=True, **options))
    try:
        for version, scale in enumerate((1.0, 0.6, 0.8)):
            backend.set_residency(SetResidencyRequest(weights="host", state="host"))
            backend.set_residency(SetResidencyRequest(weights="device", state="device"))
            weights = make_export({name: value.cuda() for name, value in model.weights(scale).items()}, version)
            result = backend.refit(RefitRequest(weight_version=version, channel="cuda_ipc", weights=weights, may_alias=False))
            if version:
                assert result.drafts.num_accepted_tokens > 0.3 * result.drafts.num_drafts
            table = model.logprobs(scale, SamplingParams())
            assert_of_the_models_distribution(backend.generate(request_of(version, SamplingParams())), table)
    finally:
        backend.close(CloseRequest())


def test_what_goes_without_it() -> None:
    lost = disabled_capabilities(VllmConfig(speculative_ngram=1)) - disabled_capabilities(VllmConfig())
    assert lost >= {capabilities.SAMPLING_MASK, capabilities.PER_SAMPLE_SEEDS, capabilities.ROUTED_EXPERTS}
    assert capabilities.EXACT_LOGPROBS not in lost
    drafts = disabled_capabilities(VllmConfig(speculative_model="small"))
    assert drafts - disabled_capabilities(VllmConfig(speculative_ngram=1)) == {capabilities.DISCARD_WEIGHTS}
    assert disabled_capabilities(VllmConfig(speculative_method="mtp")) == drafts


def test_graphs_are_captured_for_the_tokens_of_a_step(tmp_path: Path) -> None:
    context = evolve(context_of(make_repetitive(tmp_path / "model")), rank_info=RankInfo(device="cuda"))
    arguments = engine_settings(context, VllmConfig(max_num_seqs=16, speculative_ngram=4)).arguments
    assert arguments["cudagraph_capture_sizes"] == [5, 10, 20, 40, 80, 100]
    assert arguments["speculative_config"]["num_speculative_tokens"] == 4
    assert arguments["speculative_config"]["method"] == "ngram_gpu"
    assert "speculative_config" not in engine_settings(context, VllmConfig()).arguments


def test_graphs_are_captured_with_and_without_drafts(tmp_path: Path) -> None:
    context = evolve(context_of(make_repetitive(tmp_path / "model")), rank_info=RankInfo(device="cuda"))
    config = VllmConfig(max_num_seqs=16, speculative_ngram=4, speculative_most_sequences=8)
    arguments = engine_settings(context, config).arguments
    # Without drafts prompts of 16 tokens beside all sequences have a graph too, of 32.
    assert arguments["cudagraph_capture_sizes"] == [1, 2, 4, 5, 8, 10, 16, 20, 32, 40]
    assert arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] == [(1, 8, 4), (9, 16, 0)]
    assert arguments["speculative_config"]["method"] == "ngram"
    wide = engine_settings(context, evolve(config, speculative_most_sequences=16)).arguments["speculative_config"]
    assert "num_speculative_tokens_per_batch_size" not in wide
    assert wide["method"] == "ngram_gpu"


def test_a_bound_without_drafts_is_refused() -> None:
    (problem,) = speculation_problems(VllmConfig(speculative_most_sequences=8), "model")
    assert problem.path == "generator.vllm.speculative_most_sequences"
    assert not list(speculation_problems(VllmConfig(speculative_most_sequences=8, speculative_ngram=2), "model"))
