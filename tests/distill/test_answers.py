"""GKD's lambda: a step of the policy's samples and of the answers of their rows."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    CheckContext,
    ConfigError,
    ContractError,
    DataError,
    ModelSpec,
    RolloutBatch,
    SamplingMask,
    TokenBatch,
)
from rlcore.testing.fakes import FakeTokenizer
from rlcore_distill.algorithm import Distill
from rlcore_distill.check import check
from rlcore_distill.config import DistillConfig, TeacherConfig
from rlcore_distill.gkd import PART_WEIGHTS, TEACHER_TEXT

CONTEXT = AlgorithmContext(
    seed=0,
    samples_per_prompt=2,
    minibatches_per_step=1,
    temperature=1.0,
    generation_logprobs_exact=True,
    max_response_tokens=4,
)
ROWS = ({"prompt": "ab", "completion": "cde"}, {"prompt": "a", "completion": "b", "messages": "not read"})


def distill(rows=ROWS, **options):
    algorithm = Distill(CONTEXT, DistillConfig(beta=0.5, lmbda=0.25, **options))
    algorithm.read_rows(rows, FakeTokenizer())
    return algorithm


def rollouts(rows=ROWS):
    """Two samples of two tokens each behind the prompt of each row; the last one is masked."""
    encode = FakeTokenizer().encode
    prompts = [encode(row["prompt"]) for row in rows for _ in range(2)]
    tokens = [np.array([*prompt, 7, 8], np.int32) for prompt in prompts]
    generated = np.concatenate([np.arange(len(one)) >= len(prompt) for one, prompt in zip(tokens, prompts, strict=True)])
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in tokens])]).astype(np.int64)
    mask = generated.copy()
    mask[offsets[-2] :] = False
    batch = TokenBatch(
        tokens=np.concatenate(tokens),
        offsets=offsets,
        loss_mask=mask,
        token_columns={
            GENERATION_LOGPROBS: np.where(mask, -1, 0).astype(np.float32),
            WEIGHT_VERSIONS: np.where(generated, 3, -1).astype(np.int32),
        },
        sequence_columns={GROUP_IDS: np.array([0, 0, 1, 1], np.int32)},
    )
    ones = np.ones(4, np.float32)
    return RolloutBatch(batch=batch, rewards=ones, valid=ones > 0, finish_reasons=np.zeros(4, np.uint8), rows=rows)


def test_each_group_has_its_prompt_with_the_rows_answer_behind_its_samples():
    batch = distill().build_batch(rollouts()).batch
    encode, eos = FakeTokenizer().encode, FakeTokenizer().eos_token_id
    assert batch.sequence_columns[GROUP_IDS].tolist() == [0, 0, 0, 1, 1, 1]
    answers = [sequence.tolist() for sequence in batch.sequences()[2::3]]
    assert answers == [[*encode("ab"), *encode("cde"), eos], [*encode("a"), *encode("b"), eos]]
    written = batch.token_columns[TEACHER_TEXT]
    assert np.add.reduceat(written, batch.offsets[:-1]).tolist() == [0, 0, len(answers[0]), 0, 0, len(answers[1])]
    assert (batch.token_columns[WEIGHT_VERSIONS][written] == -1).all()
    assert batch.loss_lengths.tolist() == [2, 2, 4, 2, 0, 2]


def test_the_weights_make_the_mean_of_all_tokens_that_of_both_parts():
    batch = distill().build_batch(rollouts()).batch
    weights, written = batch.token_columns[PART_WEIGHTS], batch.token_columns[TEACHER_TEXT]
    shares = [weights[part].sum() / batch.loss_mask.sum() for part in (~written, written)]
    assert shares == pytest.approx([0.25, 0.75])
    for part in (~written, written):
        assert len(set(weights[part & batch.loss_mask].tolist())) == 1
    assert (weights[~batch.loss_mask] == 0).all()


def test_samples_of_truncated_sampling_keep_their_masks():
    samples = rollouts()
    kept = SamplingMask.of([np.array([token], np.int32) for token in samples.batch.tokens])
    batch = distill().build_batch(evolve(samples, batch=evolve(samples.batch, sampling_mask=kept))).batch
    expected = np.where(batch.token_columns[TEACHER_TEXT], 0, 1)
    assert batch.sampling_mask.lengths.tolist() == expected.tolist()


def test_the_loss_reads_the_columns_of_both_parts():
    training = distill().build_batch(rollouts())
    assert training.loss.path == "rlcore_distill.gkd:mixed_gkd_loss"
    assert training.loss.token_columns == (REFERENCE_LOGPROBS, GENERATION_LOGPROBS, TEACHER_TEXT, PART_WEIGHTS)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (({"prompt": "a"},), "'completion'"),
        (({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": " "}), "row 1"),
        (({"prompt": "a", "completion": "bcde"},), "max_response_tokens"),
        (({"question": "a", "completion": "b"},), "prompt"),
    ],
)
def test_rows_without_an_answer_are_refused_before_the_run(rows, told):
    with pytest.raises(DataError, match=told):
        distill(rows)


def test_samples_that_have_no_row_or_several_sequences_are_refused():
    with pytest.raises(ContractError, match="0 rows"):
        distill().build_batch(evolve(rollouts(), rows=()))
    samples = rollouts()
    columns = {**samples.batch.sequence_columns, EPISODE_IDS: np.array([0, 0, 1, 1], np.int32)}
    with pytest.raises(ConfigError) as raised:
        distill().build_batch(evolve(samples, batch=evolve(samples.batch, sequence_columns=columns)))
    assert [problem.path for problem in raised.value.problems] == ["algorithm.distill.lmbda"]


TWO = {name: TeacherConfig(base_url=f"http://{name}/v1") for name in "ab"}


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({"lmbda": 0.5}, []),
        ({"lmbda": 0.0}, ["lmbda"]),
        ({"lmbda": 0.5, "samples": "teacher"}, ["lmbda"]),
        ({"beta": 0.5, "samples": "teacher"}, []),
        ({"beta": 0.5, "lmbda": 0.5, "teachers": TWO}, ["beta", "lmbda"]),
        ({"beta": 0.5, "teachers": {"a": TWO["a"]}}, []),
    ],
)
def test_options_that_exclude_each_other_are_named(options, paths):
    context = CheckContext(model=ModelSpec(path="none"), device="cpu", world_size=1, max_sequence_length=8)
    found = check(context, DistillConfig(**options))
    assert [problem.path for problem in found] == [f"algorithm.distill.{path}" for path in paths]
