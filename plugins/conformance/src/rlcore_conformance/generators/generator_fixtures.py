"""How the kit builds a generator and talks to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from attrs import evolve, frozen
from numpy.typing import NDArray

from rlcore.registry.binding import build_generator
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import (
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    ModelSpec,
    Provider,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    SetResidencyRequest,
    TokenReader,
    WeightExport,
    capabilities,
)
from rlcore.spi.arrays import Int32Array
from rlcore.spi.lifecycle import Place
from rlcore_conformance.references.fixtures import BackendFixtures, Device, entry_of, require, tiny_model
from rlcore_conformance.references.reference import (
    Float64Array,
    Reference,
    ReferencePolicy,
    sampling_distribution,
)
from rlcore_conformance.references.tensors import make_export, values_of

WeightSets: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]
OnFinished: TypeAlias = Callable[[int, GenerateResult], None]
OpenGenerator: TypeAlias = Callable[[], "GeneratorUnderTest"]
MAX_SEQUENCE_LENGTH = 96
PROMPT_LENGTHS = (3, 1, 17, 40, 6)
MAX_TOKENS = (7, 12, 1, 9, 16)
LONG = 80
"""Tokens of the samples that show what changes as a sample grows."""
SEED_BITS = 63
PLAIN = SamplingParams()
EDGE = 1e-4
"""A distribution truncated where two candidates are closer than this or the tolerance is not compared: rounding decides."""


@frozen(kw_only=True, eq=False)
class Question:
    """A request of the kit; it can be asked in parts and in another order."""

    prompts: RaggedTokens
    num_samples: int
    seeds: NDArray[np.int64]
    max_tokens: NDArray[np.int32]

    def request(
        self,
        sampling: SamplingParams,
        weight_version: int,
        on_finished: "OnFinished | None" = None,
        *,
        routed_experts: bool = False,
        sampling_mask: bool = False,
        adapter: str = "",
        readers: Sequence[TokenReader | None] | None = None,
    ) -> GenerateRequest:
        """The generator's request."""
        return GenerateRequest(
            prompts=self.prompts,
            num_samples=self.num_samples,
            seeds=self.seeds,
            max_tokens=self.max_tokens,
            sampling=sampling,
            weight_version=weight_version,
            on_finished=on_finished,
            routed_experts=routed_experts,
            sampling_mask=sampling_mask,
            adapter=adapter,
            readers=readers,
        )

    def ungrouped(self, order: Sequence[int]) -> "Question":
        """The samples `order`, each with its prompt, seed and limit, one sample a prompt."""
        return Question(
            prompts=RaggedTokens.from_lists([self.prompts.sequence(index // self.num_samples).tolist() for index in order]),
            num_samples=1,
            seeds=self.seeds[list(order)],
            max_tokens=self.max_tokens[list(order)],
        )


@frozen(kw_only=True, eq=False)
class GeneratorUnderTest:
    """A generator's handle, with the calls that the checks repeat."""

    handle: GeneratorHandle
    provider: Provider
    channel: str
    """How weights reach it; empty where it begins with those of its model."""
    tolerance: float
    """Most that a log-probability may be off, in nats."""

    @property
    def edge(self) -> float:
        """Return how close to its edge a candidate of a truncation may be taken for another."""
        return max(EDGE, self.tolerance)

    def require(self, capability: str) -> None:
        """Skip the test unless the generator declares the capability."""
        require(self.provider, capability)

    def refit(
        self, weights: Mapping[str, Any], weight_version: int, *, adapter: str = "", drops: Sequence[str] = (), **options: Any
    ) -> None:
        """Bring it to copies of `weights`."""
        self.refit_export(make_export(weights, weight_version, **options), adapter=adapter, drops=drops)

    def refit_export(
        self, export: WeightExport, *, may_alias: bool = False, adapter: str = "", drops: Sequence[str] = ()
    ) -> None:
        """Bring it to an export's weights."""
        self.handle.refit(
            RefitRequest(
                weight_version=export.weight_version,
                channel=self.channel,
                weights=export,
                may_alias=may_alias,
                adapter=adapter,
                drops=tuple(drops),
            )
        )

    def generate(
        self,
        question: Question,
        weight_version: int = 0,
        sampling: SamplingParams | None = None,
        on_finished: OnFinished | None = None,
        *,
        adapter: str = "",
    ) -> GenerateResult:
        """Let the generator sample for a request."""
        return self.handle.generate(question.request(sampling or PLAIN, weight_version, on_finished, adapter=adapter))

    def assert_logprobs(
        self,
        policy: ReferencePolicy,
        question: Question,
        result: GenerateResult,
        sampling: SamplingParams = PLAIN,
        *,
        when: str = "",
    ) -> None:
        """The sampled tokens' log-probabilities are the reference's; `when` begins the message."""
        greatest = logprob_errors(policy, question, result, sampling, self.edge).max(initial=0.0)
        assert greatest <= self.tolerance, f"{when}log-probabilities are off by up to {greatest:.3g} nats"

    def move(self, weights: Place, state: Place, *, discard_weights: bool = False) -> int:
        """Move weights and cache to "device" or "host"; the bytes that it then holds on the device."""
        request = SetResidencyRequest(weights=weights, state=state, discard_weights=discard_weights)
        return self.handle.set_residency(request).device_bytes

    def wake_and_refit(self, weights: Mapping[str, Any], weight_version: int) -> None:
        """Wake a generator that takes turns with a trainer on a device: a refit comes before its cache."""
        self.move("device", "host")
        self.refit(weights, weight_version)
        self.move("device", "device")


def samples_of(result: GenerateResult) -> list[Int32Array]:
    """The tokens of each sample."""
    return np.split(result.tokens, result.offsets[1:-1])


def assert_same_samples(found: GenerateResult, expected: GenerateResult, order: Sequence[int], tolerance: float) -> None:
    """Sample i of `found` is sample order[i] of `expected`: tokens and finish reason equal, log-probabilities nearly so."""
    tokens, logprobs = samples_of(expected), np.split(expected.logprobs, expected.offsets[1:-1])
    found_logprobs = np.split(found.logprobs, found.offsets[1:-1])
    for index, (other, sample) in enumerate(zip(order, samples_of(found), strict=True)):
        assert sample.tolist() == tokens[other].tolist(), f"sample {index} is not the one expected"
        assert found.finish_reasons[index] == expected.finish_reasons[other]
        np.testing.assert_allclose(found_logprobs[index], logprobs[other], rtol=0, atol=tolerance)


def logprob_errors(
    policy: ReferencePolicy, question: Question, result: GenerateResult, sampling: SamplingParams = PLAIN, edge: float = EDGE
) -> Float64Array:
    """float64 [T]: how far each sampled token's log-probability is from the reference's; infinite for a token that cannot
    be sampled, 0.0 where rounding decides what the truncation keeps."""
    errors = []
    logprobs = np.split(result.logprobs.astype(np.float64), result.offsets[1:-1])
    for index, response in enumerate(samples_of(result)):
        prompt = question.prompts.sequence(index // question.num_samples)
        logits = policy.logits(np.concatenate([prompt, response]))[len(prompt) - 1 : -1]
        table, margin = sampling_distribution(logits, sampling)
        error = np.abs(table[np.arange(len(response)), response] - logprobs[index])
        errors.append(np.where(margin < edge, 0.0, error))
    return np.concatenate(errors)


class GeneratorFixtures(BackendFixtures):
    """The fixtures of a generator's checks; each can be overridden."""

    @pytest.fixture
    def other_model(self, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
        """A model of the same architecture with other weights."""
        return tiny_model(tmp_path_factory, seed=1)

    @pytest.fixture
    def weights(self, model: ModelSpec, other_model: ModelSpec, device: Device) -> WeightSets:
        """Two sets of weights of the model, by Hugging Face name: torch tensors on the device, the model's own first."""
        from safetensors.torch import load_file

        first, second = (load_file(Path(spec.path) / "model.safetensors", device=device) for spec in (model, other_model))
        return first, second

    @pytest.fixture
    def decode(self, model: ModelSpec) -> Callable[[Int32Array], str]:
        """Text of tokens, without special ones."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    @pytest.fixture
    def channel(self) -> str:
        """The refit channel by which weights reach the generator."""
        return "in_process"

    @pytest.fixture
    def generator_context(self, model: ModelSpec, device: Device, channel: str) -> GeneratorContext:
        """The context from which it is built."""
        return GeneratorContext(
            model=model, rank_info=RankInfo(device=device), seed=0, max_sequence_length=MAX_SEQUENCE_LENGTH, channel=channel
        )

    @pytest.fixture
    def open_generator(
        self, provider: Provider, config: Any, generator_context: GeneratorContext, tolerance: float
    ) -> Iterator[OpenGenerator]:
        """Opens a fresh generator, without weights that count; the one before is closed."""
        yield from opening(provider, config, generator_context, tolerance)

    @pytest.fixture
    def open_routed(
        self,
        provider: Provider,
        config: Any,
        generator_context: GeneratorContext,
        routed_model: ModelSpec,
        tolerance: float,
    ) -> Iterator[OpenGenerator]:
        """Opens a fresh generator of a mixture-of-experts model, which can be asked to report the experts used."""
        context = evolve(generator_context, model=routed_model, routed_experts=True)
        yield from opening(provider, config, context, tolerance)

    @pytest.fixture
    def open_with_own_weights(
        self, provider: Provider, config: Any, generator_context: GeneratorContext, tolerance: float
    ) -> Iterator[OpenGenerator]:
        """Opens a fresh generator that reads the weights of its model."""
        require(provider, capabilities.OWN_WEIGHTS)
        yield from opening(provider, config, evolve(generator_context, channel=None), tolerance)

    @pytest.fixture
    def fresh(self, open_generator: OpenGenerator) -> GeneratorUnderTest:
        """A generator that has not been refitted."""
        return open_generator()

    @pytest.fixture
    def generator(self, fresh: GeneratorUnderTest, weights: WeightSets) -> GeneratorUnderTest:
        """A generator that holds the first weights as version 0."""
        fresh.refit(weights[0], 0)
        return fresh

    @pytest.fixture
    def policy(self, reference: Reference, weights: WeightSets) -> ReferencePolicy:
        """The reference with the first weights."""
        return load_reference(reference, weights[0])

    @pytest.fixture
    def question(self, reference: Reference) -> Question:
        """Prompts from 1 to 40 tokens, two samples each, limits from 1 to 16 tokens."""
        return make_question(reference.vocab_size)


def opening(provider: Provider, config: Any, context: GeneratorContext, tolerance: float) -> Iterator[OpenGenerator]:
    """Opens a fresh generator each time, and closes the one before."""
    opened: list[GeneratorHandle] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def build() -> GeneratorUnderTest:
        close()
        opened.append(build_generator(entry_of("generator", provider, context.rank_info.device), context, config))
        return GeneratorUnderTest(handle=opened[-1], provider=provider, channel=context.channel or "", tolerance=tolerance)

    yield build
    close()


def make_question(vocab_size: int, num_samples: int = 2) -> Question:
    """Prompts from 1 to 40 tokens, `num_samples` each, limits from 1 to 16 tokens."""
    random = np.random.default_rng(4)
    prompts = [random.integers(0, vocab_size, length).tolist() for length in PROMPT_LENGTHS]
    num_seeds = len(prompts) * num_samples
    return Question(
        prompts=RaggedTokens.from_lists(prompts),
        num_samples=num_samples,
        seeds=random.integers(0, 2**62, num_seeds),
        max_tokens=np.array([MAX_TOKENS[index % len(MAX_TOKENS)] for index in range(num_seeds)], np.int32),
    )


def make_long_question(vocab_size: int, num_samples: int, number: int = 0) -> Question:
    """Samples of LONG tokens, of ten prompts, `num_samples` each; another `number` has other prompts and seeds.

    The seeds of a prompt differ from its first one in one bit each, and so from each other in two: in other bits for each
    prompt, so that a seed of which any part is dropped comes twice.
    """
    random, num_prompts = np.random.default_rng([11, number]), 10
    prompts = random.integers(0, vocab_size, (num_prompts, 6))
    seeds = np.tile(random.integers(0, 2**SEED_BITS - 1, (num_prompts, 1)), num_samples)
    seeds[:, 1:] ^= 1 << np.arange(num_prompts * (num_samples - 1)).reshape(num_prompts, num_samples - 1) % SEED_BITS
    return Question(
        prompts=RaggedTokens.from_lists(prompts.tolist()),
        num_samples=num_samples,
        seeds=seeds.reshape(-1),
        max_tokens=np.full(num_prompts * num_samples, LONG, np.int32),
    )


def load_reference(reference: Reference, weights: Mapping[str, Any]) -> ReferencePolicy:
    """The reference with given weights."""
    return reference.load({name: values_of(value) for name, value in weights.items()})
