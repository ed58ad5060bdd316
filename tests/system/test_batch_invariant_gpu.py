"""Log-probabilities of `vllm` are those of `fsdp2` and of `megatron`, to the bit, by batch-invariant kernels on both sides:
engines of one GPU and of two, and tensor ranks of the trainer."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlcore.spi import (
    GENERATION_LOGPROBS,
    CloseRequest,
    ExportWeightsRequest,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    LogprobsRequest,
    LossInputs,
    LossOutput,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
)
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_tokenizer
from rlcore_torchkit.testing.ranks import launch
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.setup.config import VllmConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCABULARY, HEAD_DIM, MAX_LENGTH, BUCKET_BYTES = 4096, 128, 1024, 2**24
NUM_SAMPLES, MOST_AT_ONCE = 80, 48
"""Sequences, and how many of them the engine decodes at a time: batches change all along."""
MICROBATCHES = (7, 30, 1, 42)
"""Sequences of each."""
Trainer: TypeAlias = Fsdp2Backend | MegatronBackend


def ratio_loss(inputs: LossInputs, _config: None) -> LossOutput:
    """Mean log-probability, and the extremes of the ratio of trainer and generator."""
    ratio = torch.exp(inputs.logprobs.detach() - inputs.token_columns[GENERATION_LOGPROBS])[inputs.loss_mask]
    loss = -(inputs.logprobs * inputs.loss_mask).sum() / inputs.counts.num_loss_tokens
    return LossOutput(loss=loss, maxima={"greatest": ratio.max(), "least": -ratio.min()})


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Random weights, drawn wide, so that a wrong log-probability shows."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=0,
    )
    directory = tmp_path_factory.mktemp("batch-invariant") / "model"
    make_tokenizer(directory)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return ModelSpec(path=str(directory), dtype="bfloat16")


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> int:
    """The engine's."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    found: int = request.param
    return found


def trainer_context(spec: ModelSpec, place: RankInfo) -> TrainerContext:
    return TrainerContext(
        model=spec,
        rank_info=place,
        seed=0,
        num_train_steps=10,
        needs_reference=False,
        max_sequence_length=MAX_LENGTH,
        optimizer=OptimizerSpec(learning_rate=1e-3),
    )


def megatron_config(parts: int, tensor: int = 1) -> MegatronConfig:
    sizes: dict[str, Any] = {"tensor_parallel": tensor, "context_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}
    return MegatronConfig(batch_invariant=True, batch_invariant_parts=parts, sequence_parallel=False, **sizes)


@pytest.fixture(scope="module", params=["fsdp2", "megatron"])
def trainer(request: pytest.FixtureRequest, spec: ModelSpec, ranks: int) -> Iterator[Trainer]:
    context = trainer_context(spec, RankInfo(device="cuda"))
    backend = (
        Fsdp2Backend(context, Fsdp2Config(batch_invariant=True, batch_invariant_parts=ranks))
        if request.param == "fsdp2"
        else MegatronBackend(context, megatron_config(ranks))
    )
    yield backend
    backend.close(CloseRequest())


@pytest.fixture(scope="module")
def generator(spec: ModelSpec, ranks: int) -> Iterator[VllmBackend]:
    context = GeneratorContext(
        model=spec, rank_info=RankInfo(device="cuda"), seed=0, max_sequence_length=MAX_LENGTH, channel="cuda_ipc"
    )
    config = VllmConfig(
        batch_invariant=True,
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        gpu_memory_utilization=0.2,
        max_num_seqs=MOST_AT_ONCE,
        max_num_batched_tokens=512,
    )
    backend = VllmBackend(context, config)
    yield backend
    backend.close(CloseRequest())


def refit(generator: VllmBackend, trainer: Trainer, version: int) -> None:
    export = trainer.export_weights(
        ExportWeightsRequest(weight_version=version, dtype="bfloat16", max_bucket_bytes=BUCKET_BYTES)
    )
    generator.refit(RefitRequest(weight_version=version, channel="cuda_ipc", weights=export, may_alias=True))


def sample(generator: VllmBackend, prompts: list[list[int]], sampling: SamplingParams, version: int) -> GenerateResult:
    random = np.random.default_rng(version)
    return generator.generate(
        GenerateRequest(
            prompts=RaggedTokens.from_lists(prompts),
            num_samples=1,
            seeds=np.arange(NUM_SAMPLES),
            max_tokens=random.integers(1, 400, NUM_SAMPLES).astype(np.int32),
            sampling=sampling,
            weight_version=version,
        )
    )


def packed(prompts: list[list[int]], result: GenerateResult) -> list[TokenBatch]:
    """The microbatches, with what the generator recorded."""
    batches, first = [], 0
    for size in MICROBATCHES:
        columns: dict[str, list[Any]] = {"tokens": [], "mask": [], "recorded": []}
        ends = [0]
        for index in range(first, first + size):
            own = slice(result.offsets[index], result.offsets[index + 1])
            before, count = len(prompts[index]), result.offsets[index + 1] - result.offsets[index]
            columns["tokens"] += [*prompts[index], *result.tokens[own].tolist()]
            columns["mask"] += [False] * before + [True] * count
            columns["recorded"] += [0.0] * before + result.logprobs[own].tolist()
            ends.append(len(columns["tokens"]))
        batches.append(
            TokenBatch(
                tokens=np.array(columns["tokens"], np.int32),
                offsets=np.array(ends, np.int64),
                loss_mask=np.array(columns["mask"]),
                token_columns={GENERATION_LOGPROBS: np.array(columns["recorded"], np.float32)},
            )
        )
        first += size
    return batches


def assert_same_bits(found: tuple[Any, ...], batches: list[TokenBatch]) -> None:
    """Of every token of every response. Where some differ, those that a prompt's computation gave are told from the others."""
    own, recorded, first = [], [], []
    for column, batch in zip(found, batches, strict=True):
        mask = batch.loss_mask
        own.append(column[mask])
        recorded.append(batch.token_columns[GENERATION_LOGPROBS][mask])
        first.append(~np.roll(mask, 1)[mask])
    ours, theirs, begins = map(np.concatenate, (own, recorded, first))
    same = ours == theirs
    assert torch.equal(torch.from_numpy(ours), torch.from_numpy(theirs)), (
        f"{same.mean():.2%} of {len(same)} tokens agree, {same[begins].mean():.2%} of the {begins.sum()} first ones; "
        f"differences up to {np.abs(ours - theirs).max():.3g}"
    )


def make_prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(2, VOCABULARY, length).tolist() for length in random.integers(1, 600, NUM_SAMPLES)]


def request_of(batches: list[TokenBatch], temperature: float, version: int, *, entropy: bool) -> LogprobsRequest:
    return LogprobsRequest(
        microbatches=tuple(batches), temperature=temperature, weight_version=version, model="policy", entropy=entropy
    )


def test_recorded_log_probabilities_are_the_trainers_to_the_bit(trainer: Trainer, generator: VllmBackend) -> None:
    prompts = make_prompts()
    for version, temperature in enumerate((1.0, 0.7)):
        refit(generator, trainer, version)
        result = sample(generator, prompts, SamplingParams(temperature=temperature), version)
        batches = packed(prompts, result)
        assert sum(int(batch.loss_mask.sum()) for batch in batches) == len(result.tokens) > 40 * NUM_SAMPLES
        for entropy in (False, True):
            request = request_of(batches, temperature, version, entropy=entropy)
            assert_same_bits(trainer.get_logprobs(request).logprobs, batches)
        counts = packed_counts(batches)
        loss = LossSpec(
            path=f"{__name__}:ratio_loss", config=None, token_columns=(GENERATION_LOGPROBS,), generation_mismatch=True
        )
        step = trainer.train_step(
            TrainStepRequest(
                microbatches=tuple(batches),
                counts=counts,
                loss=loss,
                temperature=temperature,
                weight_version=version,
                logprobs=True,
            )
        )
        assert step.logprobs is not None
        assert_same_bits(step.logprobs, batches)
        assert (step.metrics["greatest"], step.metrics["least"]) == (1.0, -1.0)
        assert step.metrics["generation_kl_error"] == 0.0
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6)


def test_tensor_ranks_of_megatron_have_the_bits_of_an_engines(
    spec: ModelSpec, generator: VllmBackend, ranks: int, tmp_path: Path
) -> None:
    """The weights are those of the files, which each rank reads."""
    if ranks == 1:
        pytest.skip("needs several ranks")
    prompts, first = make_prompts(), MegatronBackend(trainer_context(spec, RankInfo(device="cuda")), megatron_config(ranks))
    refit(generator, first, 0)
    first.close(CloseRequest())
    batches = packed(prompts, sample(generator, prompts, SamplingParams(temperature=1.0), 0))
    (tmp_path / "batches").write_bytes(pickle.dumps(batches))
    launch(check_rank, (ranks, spec, tmp_path), ranks, timeout_s=300)


def check_rank(rank: int, ranks: int, spec: ModelSpec, folder: Path) -> None:
    """On each of the trainer's tensor ranks."""
    place = RankInfo(rank=rank, world_size=ranks, local_rank=rank, device="cuda", rendezvous=f"file://{folder}/rendezvous")
    backend = MegatronBackend(trainer_context(spec, place), megatron_config(ranks, ranks))
    batches = pickle.loads((folder / "batches").read_bytes())
    assert_same_bits(backend.get_logprobs(request_of(batches, 1.0, 0, entropy=False)).logprobs, batches)
    backend.close(CloseRequest())


def packed_counts(batches: list[TokenBatch]) -> Any:
    """Of all microbatches together."""
    sizes = [length for batch in batches for length in batch.lengths.tolist()]
    return TokenBatch(
        tokens=np.concatenate([batch.tokens for batch in batches]),
        offsets=np.cumsum([0, *sizes]).astype(np.int64),
        loss_mask=np.concatenate([batch.loss_mask for batch in batches]),
    ).counts()
