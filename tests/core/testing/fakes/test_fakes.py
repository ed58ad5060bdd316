"""What the conformance kit does not see of the fakes: their losses, algorithm, environment, tokenizer and instant modes."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    AlgorithmContext,
    ContractError,
    EnvironmentContext,
    ExportWeightsRequest,
    FinishReason,
    GenerateRequest,
    GeneratorContext,
    GlobalCounts,
    LogprobsRequest,
    LossInputs,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    RolloutBatch,
    SamplingParams,
    SetResidencyRequest,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
    Turn,
    tensor_digest,
)
from rlcore.testing.fakes.algorithm import FakeAlgorithm, FakeAlgorithmConfig
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.generator import FakeGenerator, FakeGeneratorConfig
from rlcore.testing.fakes.loss import FakeLikelihoodConfig, FakePolicyGradientConfig, fake_likelihood, fake_policy_gradient
from rlcore.testing.fakes.policy import log_softmax, make_weights
from rlcore.testing.fakes.tokenizer import ALPHABET, VOCABULARY_SIZE, FakeTokenizer
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig

COUNTS = GlobalCounts(num_loss_tokens=7, num_loss_sequences=3)


def open_trainer(config, device="cpu"):
    rank_info = RankInfo(device=device)
    model = ModelSpec(path="fake")
    context = TrainerContext(
        model=model, rank_info=rank_info, seed=0, num_train_steps=1, needs_reference=True, max_sequence_length=100
    )
    return FakeTrainer(context, config)


def loss_inputs(seed, columns):
    random = np.random.default_rng(seed)
    mask = np.array([False, True, True, False, True, False, True])
    return LossInputs(
        logprobs=-random.random(7),
        entropy=random.random(7),
        loss_mask=mask,
        offsets=np.array([0, 3, 7]),
        token_columns={name: random.standard_normal(7).astype(np.float32) for name in columns if name != PREVIOUS_LOGPROBS},
        sequence_columns={},
        counts=COUNTS,
        previous_logprobs=random.standard_normal(7).astype(np.float32) if PREVIOUS_LOGPROBS in columns else None,
    )


@pytest.mark.parametrize(
    ("loss", "config", "columns"),
    [
        (fake_likelihood, FakeLikelihoodConfig(), ()),
        (fake_policy_gradient, FakePolicyGradientConfig(), (ADVANTAGES,)),
        (
            fake_policy_gradient,
            FakePolicyGradientConfig(importance_ratio=True, entropy_coefficient=0.3, kl_coefficient=0.2),
            (ADVANTAGES, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS),
        ),
    ],
)
def test_the_derivatives_of_the_losses_are_those_of_their_values(loss, config, columns):
    inputs = loss_inputs(0, columns)
    output = loss(inputs, config).loss
    for field, grads in (("logprobs", output.logprob_grads), ("entropy", output.entropy_grads)):
        for index in range(7):
            values = []
            for step in (1e-6, -1e-6):
                moved = getattr(inputs, field).copy()
                moved[index] += step
                values.append(loss(evolve(inputs, **{field: moved}), config).loss.value)
            expected = (values[0] - values[1]) / 2e-6
            assert (0.0 if grads is None else grads[index]) == pytest.approx(expected, abs=1e-6)


def test_a_ratio_to_unchanged_weights_is_one():
    inputs = loss_inputs(1, (ADVANTAGES,))
    plain = fake_policy_gradient(inputs, FakePolicyGradientConfig()).loss.logprob_grads
    np.testing.assert_allclose(plain, inputs.loss_mask * -inputs.token_columns[ADVANTAGES] / 7)
    unchanged = evolve(inputs, previous_logprobs=inputs.logprobs)
    output = fake_policy_gradient(unchanged, FakePolicyGradientConfig(importance_ratio=True))
    np.testing.assert_allclose(output.loss.logprob_grads, plain)
    assert output.sums["ratio"] == pytest.approx(inputs.loss_mask.sum() / 7)


def test_a_ratio_to_log_probabilities_that_nobody_knows_is_refused():
    with pytest.raises(ContractError, match="previous_logprobs"):
        fake_policy_gradient(loss_inputs(1, (ADVANTAGES,)), FakePolicyGradientConfig(importance_ratio=True))


def rollouts(rewards, group_ids, valid):
    lengths = [2 + index for index in range(len(rewards))]
    batch = TokenBatch(
        tokens=np.ones(sum(lengths), np.int32),
        offsets=np.cumsum([0, *lengths]),
        loss_mask=np.concatenate([np.arange(length) > 0 for length in lengths]),
        sequence_columns={"group_ids": np.array(group_ids, np.int32)},
    )
    return RolloutBatch(
        batch=batch,
        rewards=np.array(rewards, np.float32),
        valid=np.array(valid),
        finish_reasons=np.zeros(len(rewards), np.uint8),
    )


def algorithm(**options):
    context = AlgorithmContext(
        seed=0, samples_per_prompt=2, updates_per_step=1, temperature=1.0, generation_logprobs_exact=True
    )
    return FakeAlgorithm(context, FakeAlgorithmConfig(**options))


def test_advantages_are_rewards_against_the_groups_valid_samples():
    training = algorithm().build_batch(rollouts([1.0, 0.0, 5.0, 0.5, 1.5], [0, 0, 0, 1, 1], [True, True, False, True, True]))
    firsts = training.batch.offsets[:-1]
    np.testing.assert_allclose(training.batch.token_columns[ADVANTAGES][firsts + 1], [0.5, -0.5, 0.0, -0.5, 0.5])
    assert not training.batch.token_columns[ADVANTAGES][firsts].any()
    assert training.no_signal is None
    assert set(training.loss.token_columns) == {ADVANTAGES}


def test_equal_rewards_are_no_signal():
    assert "equal" in algorithm().build_batch(rollouts([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [True] * 4)).no_signal


def test_the_algorithm_asks_for_what_its_options_need():
    needs = algorithm(kl_coefficient=0.1, previous_logprobs=True).needs
    assert (needs.reference_logprobs, needs.previous_logprobs, needs.entropy) == (True, True, True)
    needs = algorithm(source="demonstrations").needs
    assert (needs.source, needs.reference_logprobs, needs.entropy, needs.min_samples_per_prompt) == (
        "demonstrations",
        False,
        False,
        1,
    )
    assert algorithm(entropy_coefficient=0.1).loss().entropy == "loss"


def turn(text):
    tokens = np.array(FakeTokenizer().encode(text), np.int32)
    return Turn(text=text, tokens=tokens, finish_reason=FinishReason.STOP)


def test_the_environment_rewards_the_share_of_its_letter_over_turns():
    environment = FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig(target="e", num_turns=2))

    async def play():
        begun = await environment.reset(environment.rows("train")[0], 0)
        first = await environment.step(begun.state, turn("eeab"))
        return begun, first, await environment.step(first.state, turn("eeee"))

    begun, first, second = asyncio.run(play())
    assert begun.observation.text == environment.rows("train")[0]["prompt"]
    assert (first.reward, first.done, first.success) == (0.5, False, False)
    assert first.observation is not None
    assert (second.reward, second.done, second.success, second.observation) == (1.0, True, True, None)


def test_the_environments_rows_are_distinct_and_follow_the_seed():
    config = FakeEnvironmentConfig(num_train_rows=900, num_evaluation_rows=100)
    one, same, other = (FakeEnvironment(EnvironmentContext(seed=seed), config) for seed in (0, 0, 1))
    prompts = [row["prompt"] for split in ("train", "evaluation") for row in one.rows(split)]
    assert len(set(prompts)) == 1000
    assert one.rows("train") == same.rows("train")
    assert one.rows("train") != other.rows("train")
    assert one.rows("validation") is None
    assert all(FakeTokenizer().decode(FakeTokenizer().encode(prompt)) == prompt for prompt in prompts)


@given(st.text(ALPHABET))
def test_the_tokenizer_brings_text_back(text):
    tokenizer = FakeTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id]) == text
    assert all(0 < token < VOCABULARY_SIZE for token in tokens)


def test_the_tokenizer_knows_no_other_characters():
    tokenizer = FakeTokenizer()
    assert tokenizer.decode(tokenizer.encode("Aé1漢")) == "a???"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat) == "user: hi\nassistant: "


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
        TrainStepRequest(
            microbatches=(batch,), counts=batch.counts(), loss=algorithm().loss(), temperature=1.0, weight_version=0
        )
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


def test_weights_follow_the_seed_and_softmax_is_one():
    assert all((make_weights(5, 1, 1.0)[name] == value).all() for name, value in make_weights(5, 1, 1.0).items())
    assert any((make_weights(5, 2, 1.0)[name] != value).any() for name, value in make_weights(5, 1, 1.0).items())
    table = log_softmax(np.array([[1e3, 0.0, -1e3], [0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(np.exp(table).sum(axis=1), 1.0)


def test_the_fakes_need_neither_torch_nor_pytest():
    build = "import sys, rlcore.testing; from rlcore.testing.fakes import fake_registry; fake_registry()"
    code = f"{build}; assert not {{'torch', 'transformers', 'pytest', 'ray'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
