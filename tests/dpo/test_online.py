"""Online DPO: the pairs that rewards make of a policy's own answers, and TRL's numbers."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import (
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    AlgorithmNeeds,
    ConfigError,
    FinishReason,
    LossInputs,
    RolloutBatch,
    TokenBatch,
)
from rlcore.spi.arrays import offsets_of
from rlcore_dpo.config import OnlineDpoConfig
from rlcore_dpo.loss import dpo_loss
from rlcore_dpo.online import OnlineDpo

NUMBERS = json.loads(Path(__file__).with_name("trl_online_numbers.json").read_text())
CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=2, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
)


def make_rollouts(groups, lengths=None):
    """Samples of a step with the rewards of each group; each token is its own number. `lengths` holds the tokens of each
    sample's prompt and answer."""
    rewards = np.array(list(chain(*groups)), np.float32)
    lengths = [(2, 3)] * len(rewards) if lengths is None else lengths
    offsets = offsets_of([prompt + answer for prompt, answer in lengths])
    mask = np.concatenate([np.arange(prompt + answer) >= prompt for prompt, answer in lengths])
    return RolloutBatch(
        batch=TokenBatch(
            tokens=np.arange(offsets[-1], dtype=np.int32),
            offsets=offsets,
            loss_mask=mask,
            token_columns={
                GENERATION_LOGPROBS: np.where(mask, np.float32(-1), np.float32(0)),
                WEIGHT_VERSIONS: np.where(mask, 0, -1).astype(np.int32),
            },
            sequence_columns={GROUP_IDS: np.repeat(np.arange(len(groups)), [len(group) for group in groups]).astype(np.int32)},
        ),
        rewards=rewards,
        valid=np.ones(len(rewards), np.bool_),
        finish_reasons=np.full(len(rewards), FinishReason.STOP, np.uint8),
    )


def build(rollouts, **options):
    return OnlineDpo(CONTEXT, OnlineDpoConfig(**options)).build_batch(rollouts)


def sequences_of(training, rollouts):
    """The numbers of the trained sequences among the samples."""
    return np.searchsorted(rollouts.batch.offsets, [tokens[0] for tokens in training.batch.sequences()]).tolist()


@pytest.mark.parametrize("reference", ["initial", "none"])
def test_it_needs_two_rewarded_samples_and_a_reference_where_it_compares_with_one(reference):
    needs = OnlineDpo(CONTEXT, OnlineDpoConfig(reference=reference)).needs
    assert needs == AlgorithmNeeds(
        source="rollouts", whole_groups=True, min_samples_per_prompt=2, reference_logprobs=reference == "initial"
    )


def test_a_pair_is_the_best_and_the_worst_answer_and_a_tie_makes_none():
    rollouts = make_rollouts([(0.5, 1.0, 0.0), (0.3, 0.3, 0.3), (2.0, 0.0, 2.0, 0.0)])
    training = build(rollouts)
    assert sequences_of(training, rollouts) == [1, 2, 8, 7]
    assert training.batch.sequence_columns[GROUP_IDS].tolist() == [0, 0, 2, 2]
    assert training.batch.token_columns.keys() == rollouts.batch.token_columns.keys()
    assert training.metrics == {"score_margin": 1.5, "tied_groups": pytest.approx(1 / 3)}
    assert training.no_signal is None


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=5), min_size=1, max_size=5), st.randoms(use_true_random=False)
)
def test_pairs_are_those_of_each_group_alone(groups, random):
    rollouts = make_rollouts(groups)
    valid = np.array([random.random() > 0.2 for _ in rollouts.rewards])
    training = build(evolve(rollouts, valid=valid))
    found = iter(np.reshape(sequences_of(training, rollouts), (-1, 2)).tolist())
    start = 0
    for group in groups:
        kept = {start + number: reward for number, reward in enumerate(group) if valid[start + number]}
        start += len(group)
        if len(set(kept.values())) > 1:
            chosen, rejected = next(found)
            assert (kept[chosen], kept[rejected]) == (max(kept.values()), min(kept.values()))
    assert next(found, None) is None


def test_rewards_that_differ_by_rounding_are_a_tie():
    training = build(make_rollouts([(0.1 + 0.2, 0.3), (1000.0, 1000.0001)]))
    assert training.batch.num_sequences == 0
    assert "2 groups" in training.no_signal
    assert training.metrics == {"score_margin": 0.0, "tied_groups": 1.0}


def test_an_answer_without_tokens_is_in_no_pair():
    training = build(make_rollouts([(0.0, 1.0, 0.5)], [(2, 3), (2, 0), (3, 2)]))
    assert training.metrics["score_margin"] == 0.5


def test_numbers_of_episodes_are_left_out_and_one_in_two_sequences_is_refused():
    rollouts = make_rollouts([(0.0, 1.0)])

    def numbered(*episodes):
        columns = {**rollouts.batch.sequence_columns, EPISODE_IDS: np.array(episodes, np.int32)}
        return evolve(rollouts, batch=evolve(rollouts.batch, sequence_columns=columns))

    assert sequences_of(build(numbered(0, 1)), rollouts) == [1, 0]
    assert EPISODE_IDS not in build(numbered(0, 1)).batch.sequence_columns
    with pytest.raises(ConfigError, match="segments") as refused:
        build(numbered(0, 0))
    assert [problem.path for problem in refused.value.problems] == ["environment.name"]


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: "-".join(map(str, case["options"].values())))
def test_trl_has_the_same_pairs_loss_gradient_and_metrics(case):
    lengths = [(prompt, answer) for prompt, *both in NUMBERS["lengths"] for answer in both]
    rollouts = make_rollouts(NUMBERS["rewards"], lengths)
    options = dict(case["options"])
    config = OnlineDpoConfig(loss=options.pop("loss_type"), **options)
    training = OnlineDpo(CONTEXT, config).build_batch(rollouts)
    of_tokens = {}
    for key in ("logprobs", "reference_logprobs"):
        column = np.zeros(rollouts.batch.num_tokens)
        column[rollouts.batch.loss_mask] = list(chain(*NUMBERS[key]))
        of_tokens[key] = torch.tensor(column[training.batch.tokens])  # each token is its number
    leaf = of_tokens["logprobs"].requires_grad_()
    output = dpo_loss(
        LossInputs(
            logprobs=leaf,
            entropy=None,
            loss_mask=torch.tensor(training.batch.loss_mask),
            offsets=torch.tensor(training.batch.offsets),
            token_columns={REFERENCE_LOGPROBS: of_tokens["reference_logprobs"]},
            sequence_columns={},
            counts=training.batch.counts(),
        ),
        config,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-12)
    metrics = {name: value.item() for name, value in output.sums.items()} | {"score_margin": training.metrics["score_margin"]}
    assert metrics == pytest.approx(case["metrics"], rel=1e-6)
    gradient = np.zeros(rollouts.batch.num_tokens)
    gradient[training.batch.tokens] = leaf.grad.numpy()
    np.testing.assert_allclose(gradient[rollouts.batch.loss_mask], list(chain(*case["gradient"])), rtol=1e-12)
