"""The trainer `fsdp2` beside the generator `transformers` on a CPU: each gives its own bits again, and close to the other's."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rlcore.spi import (
    GenerateRequest,
    GeneratorContext,
    LogprobsRequest,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    SamplingParams,
    TokenBatch,
    TrainerContext,
)
from rlcore.spi.arrays import Float32Array
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.backend import TransformersBackend
from rlcore_transformers.config import TransformersConfig

PROMPTS = [[5, 9, 4], [7] * 11, [3, 8, 6, 2, 9, 5, 4]]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("agreement") / "model", "qwen3")


def generate(spec: ModelSpec, max_batch_size: int) -> tuple[list[list[int]], Float32Array]:
    """Sequences of prompt and response, and the log-probabilities of the responses, by an engine of its own."""
    context = GeneratorContext(model=spec, rank_info=RankInfo(), seed=0, max_sequence_length=64, channel=None)
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists(PROMPTS),
        num_samples=1,
        seeds=np.arange(len(PROMPTS)),
        max_tokens=np.full(len(PROMPTS), NUM_TOKENS, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )
    result = TransformersBackend(context, TransformersConfig(max_batch_size=max_batch_size)).generate(request)
    parts = np.split(result.tokens, result.offsets[1:-1])
    return [[*prompt, *part.tolist()] for prompt, part in zip(PROMPTS, parts, strict=True)], result.logprobs


def responses(trainer: Fsdp2Backend, sequences: list[list[int]], *, alone: bool) -> Float32Array:
    """The trainer's log-probabilities of the responses, with all sequences in one microbatch, or each in its own."""
    groups = [[sequence] for sequence in sequences] if alone else [sequences]
    batches = tuple(map(packed, groups))
    request = LogprobsRequest(microbatches=batches, temperature=1.0, weight_version=0, model="policy", entropy=False)
    columns = np.concatenate(trainer.get_logprobs(request).logprobs)
    bounds = np.cumsum([0, *map(len, sequences)])
    return np.concatenate([columns[last - NUM_TOKENS : last] for _, last in pairwise(bounds)])


def packed(sequences: list[list[int]]) -> TokenBatch:
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    return TokenBatch(tokens=np.concatenate(sequences).astype(np.int32), offsets=offsets, loss_mask=mask)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-6), ("bfloat16", 0.05)])
def test_bits_come_again_and_the_other_side_is_near(directory: Path, dtype: str, bound: float) -> None:
    spec = ModelSpec(path=str(directory), dtype=dtype)  # type: ignore[arg-type]
    context = TrainerContext(
        model=spec, rank_info=RankInfo(), seed=0, num_train_steps=1, needs_reference=False, max_sequence_length=64
    )
    trainer = Fsdp2Backend(context, Fsdp2Config())
    for max_batch_size in (8, 1):
        sequences, generated = generate(spec, max_batch_size)
        again, generated_again = generate(spec, max_batch_size)
        assert again == sequences
        np.testing.assert_array_equal(generated_again.view(np.int32), generated.view(np.int32))
        for alone in (False, True):
            computed = responses(trainer, sequences, alone=alone)
            np.testing.assert_array_equal(responses(trainer, sequences, alone=alone).view(np.int32), computed.view(np.int32))
            np.testing.assert_allclose(computed, generated, rtol=0, atol=bound)
