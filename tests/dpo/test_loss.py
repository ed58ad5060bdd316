"""The losses of pairs against float64 numpy written from the papers, TRL's numbers, and any cut into microbatches."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import REFERENCE_LOGPROBS, ContractError, LossInputs, TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore_dpo.config import DpoConfig, OrpoConfig
from rlcore_dpo.loss import dpo_loss

NUMBERS = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())
ODDS = json.loads(Path(__file__).with_name("trl_unpaired_numbers.json").read_text())
NAMES = {"sigmoid_norm": "sigmoid"}
"""TRL's names of what is another option here."""
ANSWERS = [(2, 4), (1, 3), (5, 5), (3, 1), (2, 6), (4, 2)]
"""Tokens of the prompt and of the answer, the chosen and the rejected one in turn."""
CONFIGS = [
    DpoConfig(),
    DpoConfig(beta=0.5, label_smoothing=0.2),
    DpoConfig(beta=2.5, reference="none", length_normalised=True, margin=1.4),
    DpoConfig(loss="robust", label_smoothing=0.1, beta=0.4),
    DpoConfig(loss="hinge", beta=0.3, sft_coefficient=0.7),
    DpoConfig(loss="ipo", beta=0.2),
    DpoConfig(loss="ipo", beta=0.2, length_normalised=True, reference="none"),
    DpoConfig(loss="apo_zero", beta=0.6),
    DpoConfig(loss="apo_down", beta=0.6, sft_coefficient=1.0),
    OrpoConfig(beta=0.4),
]


def make_batch(seed, answers=ANSWERS):
    """Random log-probabilities, of the policy and of the reference, float64 [T]."""
    random = np.random.default_rng(seed)
    offsets = offsets_of([prompt + answer for prompt, answer in answers])
    mask = np.concatenate([np.arange(prompt + answer) >= prompt for prompt, answer in answers])
    logprobs = -random.exponential(1.0, offsets[-1])
    batch = TokenBatch(
        tokens=np.zeros(offsets[-1], np.int32),
        offsets=offsets,
        loss_mask=mask,
        sequence_columns={"number": np.arange(len(answers))},
    )
    return batch, logprobs, logprobs + random.normal(0.0, 1.0, offsets[-1])


def run(batch, logprobs, reference, config, counts=None):
    leaf = torch.tensor(logprobs, requires_grad=True)
    inputs = LossInputs(
        logprobs=leaf,
        entropy=None,
        loss_mask=torch.tensor(batch.loss_mask),
        offsets=torch.tensor(batch.offsets),
        token_columns={} if config.reference == "none" else {REFERENCE_LOGPROBS: torch.tensor(reference)},
        sequence_columns={},
        counts=counts or batch.counts(),
    )
    output = dpo_loss(inputs, config)
    output.loss.backward()
    return output, leaf.grad.numpy()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_odds(log):
    return log - np.log(1 - np.exp(log))


def expected(batch, logprobs, reference, config):
    """The loss and the metrics, pair by pair."""
    losses, metrics = [], []
    for pair in range(batch.num_sequences // 2):
        scores, sums, means = [], [], []
        for sequence in (2 * pair, 2 * pair + 1):
            tokens = np.arange(batch.offsets[sequence], batch.offsets[sequence + 1])
            tokens = tokens[batch.loss_mask[tokens]]
            policy = logprobs[tokens].sum()
            score = policy - (reference[tokens].sum() if config.reference == "initial" else 0.0)
            scores.append(score / len(tokens) if config.length_normalised else score)
            sums.append(policy)
            means.append(policy / len(tokens))
        chosen, rejected = scores
        h, beta, epsilon = chosen - rejected, config.beta, config.label_smoothing
        loss = {
            "sigmoid": -(1 - epsilon) * np.log(sigmoid(beta * h - config.margin)) - epsilon * np.log(sigmoid(-beta * h)),
            "robust": (-(1 - epsilon) * np.log(sigmoid(beta * h)) + epsilon * np.log(sigmoid(-beta * h))) / (1 - 2 * epsilon),
            "hinge": max(0.0, 1 - beta * h),
            "ipo": (h - 1 / (2 * beta)) ** 2,
            "apo_zero": 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected),
            "apo_down": sigmoid(beta * chosen) + 1 - sigmoid(beta * h),
            "odds_ratio": -beta * np.log(sigmoid(log_odds(chosen) - log_odds(rejected)))
            if config.loss == "odds_ratio"
            else 0.0,
        }[config.loss]
        losses.append(loss - config.sft_coefficient * means[0])
        metrics.append([beta * chosen, beta * rejected, beta * h, h > 0, *sums, -means[0]])
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")
    found = dict(zip((*names, "nll_loss"), np.mean(metrics, 0), strict=True))
    if not config.sft_coefficient:
        del found["nll_loss"]
    return np.mean(losses), found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.reference}-{config.beta}")
def test_loss_gradient_and_metrics_are_those_of_the_papers(config):
    batch, logprobs, reference = make_batch(3)
    output, gradient = run(batch, logprobs, reference, config)
    loss, metrics = expected(batch, logprobs, reference, config)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    assert {name: value.item() for name, value in output.sums.items()} == pytest.approx(metrics, rel=1e-12)
    steps = 1e-6 * np.eye(len(logprobs))
    differences = [
        expected(batch, logprobs + step, reference, config)[0] - expected(batch, logprobs - step, reference, config)[0]
        for step in steps
    ]
    np.testing.assert_allclose(gradient, np.asarray(differences) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: "-".join(map(str, chain(*case["options"].items()))))
def test_trl_has_the_same_loss_gradient_and_metrics(case):
    """TRL divides IPO's scores by their lengths, as the paper's authors do; its rewards are of scores as they were."""
    options = dict(case["options"])
    (name,) = options.pop("loss_types")
    normalised = name in ("ipo", "sigmoid_norm")
    config = DpoConfig(loss=NAMES.get(name, name), length_normalised=normalised, **options)
    answers = [(prompt, answer) for prompt, *both in NUMBERS["lengths"] for answer in both]
    batch, *_ = make_batch(0, answers)
    columns = []
    for key in ("logprobs", "reference_logprobs"):
        column = np.zeros(batch.num_tokens)
        column[batch.loss_mask] = list(chain(*NUMBERS[key]))
        columns.append(column)
    output, gradient = run(batch, *columns, config)
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    np.testing.assert_allclose(gradient[batch.loss_mask], list(chain(*case["gradient"])), rtol=1e-6, atol=1e-12)
    found, _ = run(batch, *columns, evolve(config, length_normalised=False))
    assert {name: value.item() for name, value in found.sums.items()} == pytest.approx(case["metrics"], rel=1e-6)


@pytest.mark.parametrize("case", ODDS["orpo"], ids=lambda case: str(case["beta"]))
def test_trl_has_the_same_loss_of_the_odds_ratio(case):
    """TRL computes it in float32."""
    batch, _, _ = make_batch(0, ODDS["lengths"][:4])
    logprobs = np.zeros(batch.num_tokens)
    logprobs[batch.loss_mask] = list(chain(*ODDS["own"]["policy"][:4]))
    output, gradient = run(batch, logprobs, logprobs, OrpoConfig(beta=case["beta"], sft_coefficient=0.0))
    assert output.loss.item() == pytest.approx(np.mean(case["losses"]), rel=1e-5)
    np.testing.assert_allclose(gradient[batch.loss_mask], list(chain(*case["gradient"])), rtol=1e-4, atol=1e-8)


def test_an_answer_that_is_certain_has_a_finite_loss():
    batch, logprobs, reference = make_batch(6)
    output, gradient = run(batch, np.zeros_like(logprobs), reference, OrpoConfig())
    assert np.isfinite(output.loss.item())
    assert np.isfinite(gradient).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 10**6), config=st.sampled_from(CONFIGS))
def test_loss_and_gradient_do_not_depend_on_cut_or_order(data, seed, config):
    batch, logprobs, reference = make_batch(seed)
    whole, whole_gradient = run(batch, logprobs, reference, config)
    order = np.array(data.draw(st.permutations(range(len(ANSWERS) // 2))), np.int64)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1))))
    loss, gradient, sums = 0.0, np.zeros_like(whole_gradient), dict.fromkeys(whole.sums, 0.0)
    for pairs in np.split(order, cuts):
        part = (2 * pairs[:, None] + np.arange(2)).reshape(-1)
        where = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in part])
        output, gradient[where] = run(batch.select(part), logprobs[where], reference[where], config, batch.counts())
        loss += output.loss.item()
        sums = {name: total + output.sums[name].item() for name, total in sums.items()}
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in whole.sums.items()}, rel=1e-12)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.reference}-{config.beta}")
def test_a_pair_without_loss_tokens_counts_nothing(config):
    """What fills a microbatch that would be empty."""
    batch, logprobs, reference = make_batch(4)
    empty = evolve(batch, loss_mask=np.zeros_like(batch.loss_mask))
    output, gradient = run(empty, logprobs, reference, config, batch.counts())
    assert output.loss.item() == 0.0
    assert not gradient.any()
    assert not any(value.item() for value in output.sums.values())


def test_what_stands_outside_the_answers_reaches_nothing_and_a_nan_inside_is_not_hidden():
    batch, logprobs, reference = make_batch(1)
    plain, gradient = run(batch, logprobs, reference, DpoConfig())
    spoilt, spoilt_gradient = run(batch, np.where(batch.loss_mask, logprobs, np.nan), reference, DpoConfig())
    assert torch.equal(plain.loss, spoilt.loss)
    np.testing.assert_array_equal(gradient, spoilt_gradient)
    logprobs[batch.loss_mask.argmax()] = np.nan
    assert torch.isnan(run(batch, logprobs, reference, DpoConfig())[0].loss)


def test_answers_of_thousands_of_tokens_keep_small_differences_in_float32():
    """A score of 1e-3 beside log-probabilities that sum to tens of thousands."""
    batch, logprobs, _ = make_batch(2, [(1, 20_000), (1, 20_000)])
    reference = logprobs.astype(np.float32)
    policy = (reference + np.where(np.arange(batch.num_tokens) < batch.offsets[1], 5e-8, 0.0)).astype(np.float32)
    true = (policy.astype(np.float64) - reference)[batch.loss_mask].sum()
    output, _ = run(batch, policy, reference, DpoConfig(beta=1.0))
    assert output.sums["rewards/margins"].item() == pytest.approx(true, rel=1e-3)


def test_sequences_that_are_no_pairs_are_refused():
    batch, logprobs, reference = make_batch(5)
    one = batch.select(np.arange(1))
    with pytest.raises(ContractError, match="found 1 sequences"):
        run(one, logprobs[: one.num_tokens], reference[: one.num_tokens], DpoConfig())
