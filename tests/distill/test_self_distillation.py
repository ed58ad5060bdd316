"""Self-distillation: the teacher's prompts and the loss against TRL's numbers, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from rlcore.spi import (
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    CheckContext,
    ConfigError,
    ContractError,
    DataError,
    GlobalCounts,
    LossInputs,
    ModelSpec,
    PluginError,
    RolloutBatch,
    SamplingMask,
    TokenBatch,
)
from rlcore.spi.arrays import offsets_of
from rlcore_distill.loss import reverse_kl_loss
from rlcore_distill.self_check import check
from rlcore_distill.self_config import SdftConfig, SdpoConfig
from rlcore_distill.self_distillation import Sdft, Sdpo

NUMBERS = json.loads(Path(__file__).with_name("trl_self_numbers.json").read_text())
CONTEXT = AlgorithmContext(
    seed=0,
    samples_per_prompt=3,
    minibatches_per_step=1,
    temperature=1.0,
    generation_logprobs_exact=True,
    max_prompt_tokens=512,
    max_response_tokens=4,
)


class CodePoints:
    """A tokenizer whose tokens are the code points of a text; a chat has a line for each message."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    show = decode


def rollouts(rows, prompts, completions, rewards=None):
    """The samples of groups: a prompt, and completions of each. Generated tokens are at version 0."""
    sequences = [(prompt, text) for prompt, group in zip(prompts, completions, strict=True) for text in group]
    generated = np.concatenate([np.arange(len(prompt + text)) >= len(prompt) for prompt, text in sequences])
    count = len(sequences)
    batch = TokenBatch(
        tokens=np.array([ord(letter) for pair in sequences for letter in "".join(pair)], np.int32),
        offsets=offsets_of([len(prompt + text) for prompt, text in sequences]),
        loss_mask=generated,
        token_columns={
            GENERATION_LOGPROBS: np.where(generated, -1, 0).astype(np.float32),
            WEIGHT_VERSIONS: np.where(generated, 0, -1).astype(np.int32),
        },
        sequence_columns={
            GROUP_IDS: np.repeat(np.arange(len(prompts)), [len(group) for group in completions]).astype(np.int32)
        },
    )
    return RolloutBatch(
        batch=batch,
        rewards=np.zeros(count, np.float32) if rewards is None else np.concatenate(rewards).astype(np.float32),
        valid=np.ones(count, np.bool_),
        finish_reasons=np.zeros(count, np.uint8),
        rows=rows,
    )


def prompts_of(batch):
    """The text of each sequence before its first loss token."""
    masks = np.split(batch.loss_mask, batch.offsets[1:-1])
    return ["".join(map(chr, one[: mask.argmax()])) for one, mask in zip(batch.sequences(), masks, strict=True)]


def read(algorithm, rows):
    algorithm.read_rows(rows, CodePoints())
    return algorithm


def scored(samples, column=REFERENCE_LOGPROBS):
    values = np.where(samples.batch.loss_mask, -0.5, 0).astype(np.float32)
    return evolve(samples, batch=samples.batch.with_token_column(column, values))


def sdft_rows(field="privileged_context"):
    return tuple({"prompt": prompt, field: "like " + prompt} for prompt in NUMBERS["prompts"])


@pytest.mark.parametrize("teacher", ["policy", "reference"])
def test_the_teacher_is_the_policy_or_frozen(teacher):
    needs = Sdft(CONTEXT, SdftConfig(teacher=teacher)).needs
    frozen = teacher == "reference"
    assert (needs.reference_logprobs, needs.reference_logprobs_in_rollouts) == (frozen, frozen)
    assert needs.policy_logprobs_in_rollouts is not frozen
    assert not needs.reference_model
    assert not needs.rewards
    assert Sdpo(CONTEXT, SdpoConfig(teacher=teacher)).needs.rewards


def test_trl_has_the_same_prompts_of_sdft():
    config = SdftConfig(teacher_prompt_template="{prompt}\n\n{demonstration}")
    samples = rollouts(sdft_rows(), NUMBERS["prompts"], NUMBERS["completions"])
    batch = read(Sdft(CONTEXT, config), sdft_rows()).teacher_batch(samples)
    assert prompts_of(batch) == [prompt for prompt in NUMBERS["sdft"] for _ in range(3)]
    np.testing.assert_array_equal(batch.tokens[batch.loss_mask], samples.batch.tokens[samples.batch.loss_mask])


@pytest.mark.parametrize(("case", "field"), [("sdpo", None), ("sdpo_with_feedback", "privileged_context")])
def test_trl_has_the_same_prompts_of_sdpo_and_learns_from_the_same_samples(case, field):
    rows = tuple(
        {"prompt": prompt, "privileged_context": text}
        for prompt, text in zip(NUMBERS["prompts"], NUMBERS["feedbacks"], strict=True)
    )
    sdpo = read(Sdpo(CONTEXT, SdpoConfig(feedback_field=field)), rows)
    samples = rollouts(rows, NUMBERS["prompts"], NUMBERS["completions"], NUMBERS["rewards"])
    batch = sdpo.teacher_batch(samples)
    assert prompts_of(batch) == NUMBERS[case]["prompts"]
    np.testing.assert_array_equal(batch.loss_lengths, samples.batch.loss_lengths)
    training = sdpo.build_batch(scored(samples))
    assert (training.batch.loss_lengths > 0).tolist() == [bool(one) for one in NUMBERS[case]["mask"]]
    assert training.has_signal.tolist() == [bool(one) for one in NUMBERS[case]["mask"]]
    assert training.metrics == {
        "success_group_fraction": pytest.approx(2 / 3),
        "reprompt_sample_fraction": pytest.approx(np.mean(NUMBERS[case]["mask"])),
    }
    column = training.batch.token_columns[REFERENCE_LOGPROBS]
    np.testing.assert_array_equal(column, np.where(training.batch.loss_mask, np.float32(-0.5), np.float32(0)))


def test_the_policys_own_log_probabilities_stand_for_the_teachers():
    samples = scored(rollouts(sdft_rows(), NUMBERS["prompts"], NUMBERS["completions"]), PREVIOUS_LOGPROBS)
    columns = Sdft(CONTEXT, SdftConfig(teacher="policy")).build_batch(samples).batch.token_columns
    np.testing.assert_array_equal(columns[REFERENCE_LOGPROBS], samples.batch.token_columns[PREVIOUS_LOGPROBS])
    assert PREVIOUS_LOGPROBS not in columns


def test_trl_has_the_same_gradient():
    numbers = NUMBERS["loss"]
    logits = torch.tensor(numbers["student"], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor(numbers["tokens"])[:, None]
    own = logits.log_softmax(-1).gather(1, tokens)[:, 0]
    teacher = torch.tensor(numbers["teacher"], dtype=torch.float64).log_softmax(-1).gather(1, tokens)[:, 0]
    zero = torch.zeros(1, dtype=torch.float64)
    inputs = LossInputs(
        logprobs=torch.cat([zero, own]),
        entropy=None,
        loss_mask=torch.tensor([False] + [True] * len(own)),
        offsets=torch.tensor([0, len(own) + 1]),
        token_columns={
            REFERENCE_LOGPROBS: torch.cat([zero, teacher]),
            GENERATION_LOGPROBS: torch.cat([zero, torch.tensor(numbers["old"], dtype=torch.float64)]),
        },
        sequence_columns={},
        counts=GlobalCounts(num_loss_tokens=1, num_loss_sequences=1),
    )
    (gradient,) = torch.autograd.grad(reverse_kl_loss(inputs, SdftConfig()).loss, logits)
    np.testing.assert_allclose(gradient.numpy(), numbers["gradient"], rtol=1e-9, atol=1e-12)


def test_in_a_chat_the_last_user_message_is_replaced():
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "be"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": [{"type": "text", "text": " be "}]},
    ]
    rows = ({"prompt": messages, "privileged_context": "so"},)
    shown = "system: be brief\nuser: be\nassistant: ?\nuser: be\n: "
    batch = read(Sdft(CONTEXT, SdftConfig()), rows).teacher_batch(rollouts(rows, [shown], [["x", "y"]]))
    assert prompts_of(batch) == ["system: be brief\nuser: be\nassistant: ?\nuser: be\n\nso\n: "] * 2


def test_a_prompt_that_an_environment_makes_is_replaced_as_a_whole():
    rows = ({"operands": (1, 2), "privileged_context": "3"},)
    batch = read(Sdft(CONTEXT, SdftConfig()), rows).teacher_batch(rollouts(rows, ["1+2="], [["x"]]))
    assert prompts_of(batch) == ["1+2=\n\n3"]


def test_kept_tokens_of_truncated_sampling_follow_their_tokens():
    samples = rollouts(sdft_rows(), NUMBERS["prompts"], NUMBERS["completions"])
    rows = [
        np.array([token, 1], np.int32) if kept else np.zeros(0, np.int32)
        for token, kept in zip(samples.batch.tokens, samples.batch.loss_mask, strict=True)
    ]
    masked = evolve(samples, batch=evolve(samples.batch, sampling_mask=SamplingMask.of(rows)))
    batch = read(Sdft(CONTEXT, SdftConfig()), sdft_rows()).teacher_batch(masked)
    assert batch.sampling_mask.lengths.tolist() == np.where(batch.loss_mask, 2, 0).tolist()
    batch.sampling_mask.check(batch.tokens)


def test_samples_without_a_lesson_leave_no_signal():
    rows = tuple({"prompt": prompt} for prompt in NUMBERS["prompts"])
    samples = rollouts(rows, NUMBERS["prompts"], NUMBERS["completions"], [[1.0, 0, 0], [0, 0, 0], [0, 0, 0]])
    alone = evolve(samples, valid=np.arange(9) == 0)
    training = read(Sdpo(CONTEXT, SdpoConfig()), rows).build_batch(scored(alone))
    assert training.has_signal.tolist() == [False, True, True] + [False] * 6
    nothing = read(Sdpo(CONTEXT, SdpoConfig(success_reward_threshold=2.0)), rows).build_batch(scored(samples))
    assert nothing.no_signal is not None
    assert nothing.metrics["success_group_fraction"] == 0.0


@pytest.mark.parametrize(
    ("algorithm", "rows", "told"),
    [
        (Sdft(CONTEXT, SdftConfig()), ({"prompt": "a"},), "demonstration_field"),
        (Sdft(CONTEXT, SdftConfig()), ({"prompt": "a", "privileged_context": " "},), "1 of 1 rows"),
        (Sdft(CONTEXT, SdftConfig(demonstration_field="hint")), sdft_rows(), "'hint'"),
        (Sdft(evolve(CONTEXT, max_prompt_tokens=8), SdftConfig()), sdft_rows(), "max_prompt_tokens"),
        (Sdpo(CONTEXT, SdpoConfig(feedback_field="hint")), ({"prompt": "a"},), "feedback_field"),
        (Sdpo(evolve(CONTEXT, max_prompt_tokens=64), SdpoConfig()), ({"prompt": "a"},), "max_prompt_tokens"),
    ],
)
def test_rows_that_the_teacher_cannot_read_are_refused_before_the_run(algorithm, rows, told):
    with pytest.raises(DataError, match=told):
        read(algorithm, rows)


def test_samples_that_have_no_other_prompt_are_refused():
    sdft = read(Sdft(CONTEXT, SdftConfig()), sdft_rows())
    samples = rollouts(sdft_rows(), NUMBERS["prompts"], NUMBERS["completions"])
    with pytest.raises(ContractError, match="0 rows"):
        sdft.teacher_batch(evolve(samples, rows=()))
    with pytest.raises(DataError, match="question"):
        sdft.teacher_batch(evolve(samples, rows=tuple({**row, "prompt": "other"} for row in sdft_rows())))
    with pytest.raises(DataError, match="max_prompt_tokens"):
        sdft.teacher_batch(evolve(samples, rows=tuple({**row, "privileged_context": "long" * 200} for row in sdft_rows())))
    with pytest.raises(PluginError, match="images"):
        sdft.teacher_batch(evolve(samples, batch=evolve(samples.batch, images=((b"",),) * 9)))
    columns = {**samples.batch.sequence_columns, EPISODE_IDS: np.zeros(9, np.int32)}
    with pytest.raises(ConfigError) as raised:
        sdft.teacher_batch(evolve(samples, batch=evolve(samples.batch, sequence_columns=columns)))
    assert [problem.path for problem in raised.value.problems] == ["environment.name"]
    with pytest.raises(ContractError, match="tokenizer"):
        Sdft(CONTEXT, SdftConfig()).teacher_batch(samples)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (SdftConfig(), []),
        (SdpoConfig(), []),
        (SdftConfig(teacher_prompt_template="{prompt}"), ["sdft.teacher_prompt_template"]),
        (SdftConfig(teacher_prompt_template="{prompt}{demonstration"), ["sdft.teacher_prompt_template"]),
        (SdftConfig(teacher_prompt_template="{prompt}{demonstration}{0}"), ["sdft.teacher_prompt_template"]),
        (SdpoConfig(solution_template="x", feedback_template="{y}"), ["sdpo.solution_template", "sdpo.feedback_template"]),
    ],
)
def test_templates_with_other_fields_are_named(config, paths):
    context = CheckContext(model=ModelSpec(path="none"), device="cpu", world_size=1, max_sequence_length=8)
    assert [problem.path for problem in check(context, config)] == [f"algorithm.{path}" for path in paths]
