"""What the conformance kit does not see of the fake trainer: its instant mode, its memory, and what its exports share."""

import numpy as np

from rlcore.spi import (
    ExportWeightsRequest,
    GenerateRequest,
    GeneratorContext,
    LogprobsRequest,
    LossSpec,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    SetResidencyRequest,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
    tensor_digest,
)
from rlcore.testing.fakes.algorithm import FakePolicyGradientConfig
from rlcore.testing.fakes.generator import FakeGenerator, FakeGeneratorConfig
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig

LOSS = LossSpec(path="rlcore.testing.fakes.algorithm:fake_policy_gradient", config=FakePolicyGradientConfig())


def open_trainer(config, device="cpu"):
    rank_info = RankInfo(device=device)
    model = ModelSpec(path="fake")
    context = TrainerContext(
        model=model, rank_info=rank_info, seed=0, num_train_steps=1, needs_reference=True, max_sequence_length=100
    )
    return FakeTrainer(context, config)


def test_instant_fakes_agree_on_the_uniform_distribution():
    trainer = open_trainer(FakeTrainerConfig(instant=True, initial_scale=1.0))
    context = GeneratorContext(model=ModelSpec(path="fake"), rank_info=RankInfo(), seed=0, max_sequence_length=20)
    generator = FakeGenerator(context, FakeGeneratorConfig(instant=True))
    export = trainer.export_weights(ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=1 << 20))
    generator.refit(RefitRequest(weight_version=0, channel="in_process", weights=export, may_alias=True))
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([[1, 2], [3]]),
        num_samples=2,
        seeds=np.arange(4),
        max_tokens=np.array([3, 9, 30, 1], np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )
    result = generator.generate(request)
    assert np.diff(result.offsets).tolist() == [3, 9, 19, 1]
    assert generator.generate(request).tokens.tolist() == result.tokens.tolist()
    responses = [
        np.concatenate([[1], result.tokens[start:end]]).tolist()
        for start, end in zip(result.offsets[:-1], result.offsets[1:], strict=True)
    ]
    packed = RaggedTokens.from_lists(responses)
    mask = ~np.isin(np.arange(len(packed.tokens)), packed.offsets[:-1])
    batch = TokenBatch(tokens=packed.tokens, offsets=packed.offsets, loss_mask=mask)
    logprobs = trainer.get_logprobs(
        LogprobsRequest(microbatches=(batch,), model="policy", temperature=1.0, entropy=True, weight_version=0)
    )
    np.testing.assert_array_equal(logprobs.logprobs[0][mask], result.logprobs)
    np.testing.assert_allclose(logprobs.entropy[0], np.log(VOCABULARY_SIZE) * mask, rtol=1e-6)
    step = trainer.train_step(
        TrainStepRequest(microbatches=(batch,), counts=batch.counts(), loss=LOSS, temperature=1.0, weight_version=0)
    )
    assert (step.weight_version, step.loss, step.grad_norm) == (1, 0.0, 0.0)
    assert not any(value.any() for value in trainer.weights.values())


def test_bytes_on_a_device_are_those_not_moved_to_the_host():
    trainer = open_trainer(FakeTrainerConfig(), device="cuda")
    held = {
        (weights, state): trainer.set_residency(SetResidencyRequest(weights=weights, state=state)).device_bytes
        for weights in ("device", "host")
        for state in ("device", "host")
    }
    num_weights = sum(value.size for value in trainer.weights.values())
    assert held[("device", "device")] == num_weights * (2 * 4 + 2 * 8)
    assert held[("device", "host")] == num_weights * 2 * 4
    assert held[("host", "device")] == num_weights * 2 * 8
    assert held[("host", "host")] == 0
    on_cpu = open_trainer(FakeTrainerConfig())
    assert on_cpu.set_residency(SetResidencyRequest(weights="host", state="host")).device_bytes == num_weights * 24


def test_float32_exports_share_memory_and_others_do_not():
    trainer = open_trainer(FakeTrainerConfig(initial_scale=1.0))
    for dtype, shared in (("float32", True), ("float16", False)):
        export = trainer.export_weights(ExportWeightsRequest(weight_version=0, dtype=dtype, max_bucket_bytes=1))
        assert export.persistent is shared
        for bucket in export.buckets:
            (named,) = bucket.tensors
            assert np.shares_memory(named.tensor, trainer.weights[named.name]) is shared
            assert named.digest == tensor_digest(named.tensor)
