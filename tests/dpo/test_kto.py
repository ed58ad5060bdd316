"""KTO against TRL's own code and the paper's formula in float64, and any cut into microbatches."""

import importlib
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.run.data.examples import Examples, example_batch
from rlcore.spi import (
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    AlgorithmContext,
    AlgorithmNeeds,
    LossInputs,
    RaggedTokens,
)
from rlcore.spi.arrays import offsets_of
from rlcore_dpo.kto import Kto
from rlcore_dpo.kto_config import KtoConfig
from rlcore_dpo.kto_loss import kto_loss
from rlcore_dpo.provider import KTO

NUMBERS = json.loads(Path(__file__).with_name("trl_unpaired_numbers.json").read_text())
CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=1, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
)
CONFIGS = [
    KtoConfig(),
    KtoConfig(beta=0.8, desirable_weight=1.25, undesirable_weight=0.5),
    KtoConfig(loss="apo_zero", beta=0.4),
]


def make_rollouts(lengths, labels):
    """Rows of a prompt and an answer, each beside its prompt with the answer of the row before."""
    pairs = [(prompt, answer) for number, (prompt, own) in enumerate(lengths) for answer in (own, lengths[number - 1][1])]
    offsets = offsets_of([prompt + answer for prompt, answer in pairs])
    examples = Examples.behind_prompts(
        RaggedTokens(tokens=np.zeros(offsets[-1], np.int32), offsets=offsets),
        np.asarray([prompt for prompt, _ in pairs]),
        answers=2,
        rows=np.arange(len(lengths)),
        num_dropped=0,
    )
    examples = evolve(examples, rewards=np.repeat(np.asarray(labels, np.float32), 2))
    return example_batch(examples, np.arange(len(lengths)))


def with_columns(rollouts, policy, reference):
    batch = rollouts.batch.with_token_column(PREVIOUS_LOGPROBS, policy.astype(np.float32))
    return evolve(rollouts, batch=batch.with_token_column(REFERENCE_LOGPROBS, reference.astype(np.float32)))


def run(batch, policy, reference, config, counts=None):
    leaf = torch.tensor(policy, requires_grad=True)
    inputs = LossInputs(
        logprobs=leaf,
        entropy=None,
        loss_mask=torch.tensor(batch.loss_mask),
        offsets=torch.tensor(batch.offsets),
        token_columns={REFERENCE_LOGPROBS: torch.tensor(reference)},
        sequence_columns={name: torch.tensor(column) for name, column in batch.sequence_columns.items()},
        counts=counts or batch.counts(),
    )
    output = kto_loss(inputs, config)
    output.loss.backward()
    return output, leaf.grad.numpy()


def drawn(seed, num_rows=6):
    random = np.random.default_rng(seed)
    lengths = [(int(prompt), int(answer)) for prompt, answer in random.integers(1, 7, (num_rows, 2))]
    rollouts = make_rollouts(lengths, random.random(num_rows) < 0.5)
    policy = -random.exponential(1.0, rollouts.batch.num_tokens)
    return rollouts, policy, policy + random.normal(-0.1, 0.7, len(policy))


def own(rollouts, column):
    """The values of the rows' own sequences."""
    return np.concatenate(
        [column[a:b] for a, b in zip(rollouts.batch.offsets[0:-1:2], rollouts.batch.offsets[1::2], strict=True)]
    )


def expected(rollouts, policy, reference, config, kl=None):
    """The loss, the metrics and the KL estimate, answer by answer; `kl` None is that of these log-probabilities."""
    batch, ratios = rollouts.batch, []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        inside = np.arange(start, end)[batch.loss_mask[start:end]]
        ratios.append(policy[inside].sum() - reference[inside].sum())
    if kl is None:
        kl = max(float(np.mean(ratios[1::2])), 0.0) if config.loss == "kto" else 0.0
    losses, margins = [], []
    for ratio, label in zip(ratios[0::2], rollouts.rewards[0::2], strict=True):
        margin = config.beta * (ratio - kl) * (1 if label else -1)
        weight = config.desirable_weight if label else config.undesirable_weight
        losses.append(weight * (1 - 1 / (1 + np.exp(-margin))))
        margins.append(margin)
    return np.mean(losses), {"rewards/margins": np.mean(margins), "rewards/accuracies": np.mean(np.array(margins) > 0)}, kl


@pytest.mark.parametrize("case", NUMBERS["kto"], ids=lambda case: "-".join(map(str, case["options"].values())))
def test_trl_has_the_same_loss_gradient_and_kl_estimate(case):
    rollouts, config = make_rollouts(NUMBERS["lengths"], NUMBERS["labels"]), KtoConfig(**case["options"])
    columns = {}
    for name in ("policy", "reference"):
        columns[name] = np.zeros(rollouts.batch.num_tokens)
        parts = chain.from_iterable(zip(NUMBERS["own"][name], NUMBERS["other"][name], strict=True))
        columns[name][rollouts.batch.loss_mask] = list(chain(*parts))
    training = Kto(CONTEXT, config).build_batch(with_columns(rollouts, **columns))
    assert training.metrics["kl"] == pytest.approx(case["kl"], rel=1e-6, abs=1e-9)
    output, gradient = run(training.batch, own(rollouts, columns["policy"]), own(rollouts, columns["reference"]), config)
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    np.testing.assert_allclose(gradient[training.batch.loss_mask], list(chain(*case["gradient"])), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.loss}-{config.beta}")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_gradient_and_metrics_are_those_of_the_paper(config, seed):
    rollouts, policy, reference = drawn(seed)
    training = Kto(CONTEXT, config).build_batch(with_columns(rollouts, policy, reference))
    kl = training.batch.sequence_columns["kl_estimate"][0].astype(np.float64)
    _, _, estimate = expected(rollouts, policy, reference, config)
    assert kl == pytest.approx(estimate, rel=1e-5, abs=1e-6)
    loss, metrics, _ = expected(rollouts, policy, reference, config, kl)
    output, gradient = run(training.batch, own(rollouts, policy), own(rollouts, reference), config)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    assert {name: output.sums[name].item() for name in metrics} == pytest.approx(metrics, rel=1e-12)
    steps = 1e-6 * np.eye(len(policy))
    differences = np.asarray(
        [
            expected(rollouts, policy + step, reference, config, kl)[0]
            - expected(rollouts, policy - step, reference, config, kl)[0]
            for step in steps
        ]
    )
    np.testing.assert_allclose(gradient, own(rollouts, differences / 2e-6), rtol=1e-6, atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 10**6), config=st.sampled_from(CONFIGS))
def test_loss_and_gradient_do_not_depend_on_cut_or_order(data, seed, config):
    rollouts, policy, reference = drawn(seed)
    batch = Kto(CONTEXT, config).build_batch(with_columns(rollouts, policy, reference)).batch
    policy, reference = own(rollouts, policy), own(rollouts, reference)
    whole, whole_gradient = run(batch, policy, reference, config)
    order = np.array(data.draw(st.permutations(range(batch.num_sequences))), np.int64)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1))))
    loss, gradient, sums = 0.0, np.zeros_like(whole_gradient), dict.fromkeys(whole.sums, 0.0)
    for part in np.split(order, cuts):
        where = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in part])
        output, gradient[where] = run(batch.select(part), policy[where], reference[where], config, batch.counts())
        loss += output.loss.item()
        sums = {name: total + output.sums[name].item() for name, total in sums.items()}
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in whole.sums.items()}, rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-10, atol=1e-15)


def test_an_answer_without_loss_tokens_counts_nothing():
    rollouts, policy, reference = drawn(4)
    batch = Kto(CONTEXT, KtoConfig()).build_batch(with_columns(rollouts, policy, reference)).batch
    empty = evolve(batch, loss_mask=np.zeros_like(batch.loss_mask))
    output, gradient = run(empty, own(rollouts, policy), own(rollouts, reference), KtoConfig(), batch.counts())
    assert output.loss.item() == 0.0
    assert not gradient.any()
    assert not any(value.item() for value in output.sums.values())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.loss)
def test_held_out_rows_are_measured_as_the_loss_does(config):
    rollouts, policy, reference = drawn(5)
    measured = Kto(CONTEXT, config).measure(rollouts, policy.astype(np.float32), reference.astype(np.float32))
    _, metrics, kl = expected(rollouts, policy, reference, config)
    assert measured == pytest.approx({**metrics, "kl": kl}, rel=1e-5, abs=1e-6)


def test_the_kl_estimate_alone_needs_the_policy_before_a_step():
    assert Kto(CONTEXT, KtoConfig()).needs == AlgorithmNeeds(
        source="labelled",
        reference_logprobs=True,
        reference_logprobs_in_rollouts=True,
        policy_logprobs_in_rollouts=True,
    )
    assert Kto(CONTEXT, KtoConfig(loss="apo_zero")).needs == AlgorithmNeeds(source="labelled", reference_logprobs=True)


def test_the_provider_names_what_exists():
    module, name = KTO.backend.split(":")
    assert getattr(importlib.import_module(module), name) is Kto
    assert KTO.config is KtoConfig
