"""The whole loss against a float64 numpy reference, its gradient against finite differences, and its invariances."""

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss

from .reference_loss import Reference

TRAINER = GrpoConfig(previous_logprobs="trainer")
UNCORRECTED = evolve(TRAINER, importance_correction="none")
CONFIGS = {
    "plain": UNCORRECTED,
    "sampler's": GrpoConfig(previous_logprobs="generation"),
    "corrected": evolve(TRAINER, importance_maximum=1.2),
    "deepseek": evolve(TRAINER, loss_normalisation="sequence", kl_coefficient=0.04, kl_gradient="estimate"),
    "dr": evolve(TRAINER, loss_normalisation="constant", constant_length=13, dual_clip=1.3),
    "k1": evolve(TRAINER, kl_coefficient=0.3, kl_estimator="k1", clip_high=0.28),
    "k2": evolve(TRAINER, kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.1),
    "gspo": evolve(UNCORRECTED, ratio="sequence", loss_normalisation="sequence", clip_low=0.03, clip_high=0.04),
    "gspo-token": evolve(UNCORRECTED, ratio="sequence_token", loss_normalisation="sequence", clip_low=0.1, clip_high=0.2),
    "luspo": evolve(
        UNCORRECTED, ratio="sequence", loss_normalisation="constant", constant_length=1, clip_low=0.1, clip_high=0.2
    ),
    "rloo": evolve(UNCORRECTED, ratio="sequence_product", loss_normalisation="sequence"),
    "clip-cov": evolve(TRAINER, objective="clip_cov"),
    "kl-cov": evolve(UNCORRECTED, objective="kl_cov", covariance_penalty=0.7),
    "cispo": evolve(TRAINER, objective="cispo", clip_low=1.0, clip_high=0.3),
    "cispo, both bounds": evolve(UNCORRECTED, objective="cispo", ratio="sequence", clip_low=0.1, clip_high=0.1),
    "sapo": evolve(UNCORRECTED, objective="sapo", sapo_temperature_positive=2.0, sapo_temperature_negative=5.0),
    "gmpo": evolve(UNCORRECTED, objective="gmpo", loss_normalisation="sequence", clip_low=0.33, clip_high=0.49),
    "gmpo, one bound": evolve(UNCORRECTED, objective="gmpo", loss_normalisation="sequence", clip_low=1.0, clip_high=0.2),
    "vespo": evolve(TRAINER, objective="vespo", importance_maximum=1.5, importance_minimum=0.7),
    "vespo, sampler's": GrpoConfig(objective="vespo", previous_logprobs="generation", vespo_decay_negative=1.0),
    "policy gradient": evolve(TRAINER, objective="policy_gradient"),
    "icepop": evolve(TRAINER, importance_bound="mask", importance_minimum=0.6, importance_maximum=1.6),
    "truncated below": evolve(TRAINER, importance_minimum=0.7, importance_maximum=1.4),
    "sequence truncated": evolve(TRAINER, importance_correction="sequence", importance_minimum=0.4),
    "sequence masked": evolve(TRAINER, importance_correction="sequence", importance_bound="mask", importance_minimum=0.5),
    "geometric": evolve(TRAINER, geometric_minimum=0.9, geometric_maximum=1.3),
    "off policy": evolve(TRAINER, off_policy_maximum=0.05, kl_coefficient=0.1),
    "high entropy": evolve(TRAINER, entropy_minimum=0.9, kl_coefficient=0.1, entropy_coefficient=0.1),
    "kl by previous": evolve(TRAINER, kl_coefficient=0.3, kl_importance="previous"),
    "kl by ratio": evolve(
        UNCORRECTED, ratio="sequence", kl_coefficient=0.3, kl_importance="ratio", clip_low=0.1, clip_high=0.2
    ),
    "kl of at most 0.2": evolve(TRAINER, kl_coefficient=0.3, kl_importance="previous", kl_maximum=0.2),
    "cispo below 1": evolve(TRAINER, objective="cispo", clip_low=1.0, clip_high=-0.3),
    "likelihood": evolve(TRAINER, likelihood_coefficient=0.4, loss_normalisation="sequence"),
    "kl by generation": evolve(TRAINER, kl_coefficient=0.3, kl_importance="generation", kl_gradient="estimate"),
}
LENGTHS = [5, 2, 9, 1, 4, 12, 3]

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def without_previous(batch):
    return evolve(
        batch, token_columns={name: column for name, column in batch.token_columns.items() if name != PREVIOUS_LOGPROBS}
    )


def run(inputs, config):
    output = policy_gradient_loss(inputs, config)
    output.loss.backward()
    return output


@each_config
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_value_matches_the_reference(make_batch, make_inputs, config, first, seed):
    batch, logprobs, entropy = make_batch(seed, LENGTHS)
    batch = without_previous(batch) if first else batch
    expected = Reference(batch, config, np.float64(logprobs))(np.float64(logprobs), np.float64(entropy))
    assert run(make_inputs(batch, logprobs, entropy), config).loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    single = run(make_inputs(batch, logprobs, entropy, dtype=torch.float32), config).loss
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@each_config
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_gradient_matches_finite_differences(make_batch, make_inputs, config, first):
    batch, logprobs, entropy = make_batch(11, LENGTHS)
    batch = without_previous(batch) if first else batch
    inputs = make_inputs(batch, logprobs, entropy)
    run(inputs, config)
    frozen, step = np.float64(logprobs), 1e-6
    reference = Reference(batch, config, frozen)
    for found, at in ((inputs.logprobs.grad, 0), (inputs.entropy.grad, 1)):
        expected = np.zeros(batch.num_tokens)
        for t in range(batch.num_tokens):
            values = []
            for sign in (1, -1):
                point = [frozen.copy(), np.float64(entropy)]
                point[at][t] += sign * step
                values.append(reference(*point))
            expected[t] = (values[0] - values[1]) / (2 * step)
        found = np.zeros(batch.num_tokens) if found is None else found.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


def parts_of(data, num_sequences):
    """A random order of the sequences, cut at random places."""
    order = np.array(data.draw(st.permutations(range(num_sequences))), np.int64)
    cuts = sorted(data.draw(st.sets(st.integers(1, num_sequences - 1))))
    return np.split(order, cuts)


def gather(batch, indices):
    return np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in indices])


@each_config
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_loss_gradient_and_metrics_do_not_depend_on_cut_or_order(make_batch, make_inputs, config, data, seed):
    """A loss that divides by a microbatch's own counts fails here."""
    batch, logprobs, entropy = make_batch(seed, LENGTHS)
    whole_inputs = make_inputs(batch, logprobs, entropy)
    whole = run(whole_inputs, config)
    loss, sums, maxima, gradient = (
        0.0,
        dict.fromkeys(whole.sums, 0.0),
        dict.fromkeys(whole.maxima, -np.inf),
        np.zeros(batch.num_tokens),
    )
    for part in parts_of(data, batch.num_sequences):
        where = gather(batch, part)
        inputs = make_inputs(batch.select(part), logprobs[where], entropy[where], batch.counts())
        output = run(inputs, config)
        loss += output.loss.item()
        gradient[where] = inputs.logprobs.grad.numpy()
        sums = {name: value + output.sums[name].item() for name, value in sums.items()}
        maxima = {name: max(value, output.maxima[name].item()) for name, value in maxima.items()}
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-13)
    np.testing.assert_allclose(gradient, whole_inputs.logprobs.grad.numpy(), rtol=1e-12, atol=1e-14)
    assert sums == pytest.approx({name: value.item() for name, value in whole.sums.items()}, rel=1e-6, abs=1e-7)
    assert maxima == pytest.approx({name: value.item() for name, value in whole.maxima.items()})


@each_config
def test_what_stands_outside_the_mask_reaches_nothing(make_batch, make_inputs, config):
    batch, logprobs, entropy = make_batch(5, LENGTHS)
    plain_inputs = make_inputs(batch, logprobs, entropy)
    plain = run(plain_inputs, config)
    spoil = {name: np.where(batch.loss_mask, column, np.float32(np.nan)) for name, column in batch.token_columns.items()}
    spoil[ADVANTAGES] = batch.token_columns[ADVANTAGES]
    spoilt = evolve(batch, token_columns=spoil)
    inputs = make_inputs(spoilt, np.where(batch.loss_mask, logprobs, np.nan), np.where(batch.loss_mask, entropy, np.nan))
    output = run(inputs, config)
    assert torch.equal(output.loss, plain.loss)
    assert torch.equal(inputs.logprobs.grad, plain_inputs.logprobs.grad)
    assert not inputs.logprobs.grad[~inputs.loss_mask].any()
    assert {name: value.item() for name, value in output.sums.items()} == {
        name: value.item() for name, value in plain.sums.items()
    }


@each_config
def test_nothing_waits_for_the_device(make_batch, make_inputs, config):
    """Fake tensors have shapes and no values: a synchronisation with the host, or a shape that hangs on values, is an error."""
    inputs = make_inputs(*make_batch(5, LENGTHS))
    with FakeTensorMode() as mode:
        faked = {
            name: mode.from_tensor(value)
            for name in ("logprobs", "previous_logprobs", "entropy", "loss_mask", "offsets")
            if (value := getattr(inputs, name)) is not None
        }
        columns = {name: mode.from_tensor(column) for name, column in inputs.token_columns.items()}
        output = run(evolve(inputs, token_columns=columns, **faked), config)
        assert output.loss.shape == ()
        with pytest.raises(DataDependentOutputException):
            output.loss.item()


def test_a_nan_inside_the_mask_makes_the_loss_nan(make_batch, make_inputs):
    """The trainer refuses such a step; nothing here may hide it."""
    batch, logprobs, entropy = make_batch(5, LENGTHS)
    logprobs[batch.loss_mask.argmax()] = np.nan
    for config in CONFIGS.values():
        assert torch.isnan(policy_gradient_loss(make_inputs(batch, logprobs, entropy), config).loss)


def test_a_microbatch_without_loss_tokens_adds_nothing(make_batch, make_inputs):
    batch, logprobs, entropy = make_batch(5, LENGTHS)
    empty = evolve(batch, loss_mask=np.zeros_like(batch.loss_mask))
    for config in CONFIGS.values():
        for counts in (batch.counts(), empty.counts()):
            inputs = make_inputs(empty, logprobs, entropy, counts)
            output = run(inputs, config)
            assert output.loss.item() == 0.0
            assert not inputs.logprobs.grad.any()
            assert not any(value.item() for value in (*output.sums.values(), *output.maxima.values()))


def test_absent_previous_means_the_current_policy(make_batch, make_inputs):
    batch, logprobs, entropy = make_batch(6, LENGTHS)
    config = CONFIGS["corrected"]
    same = batch.with_token_column(PREVIOUS_LOGPROBS, np.where(batch.loss_mask, logprobs, np.float32(0)))
    given_inputs = make_inputs(same, logprobs, entropy)
    absent_inputs = make_inputs(batch, logprobs, entropy, without=(PREVIOUS_LOGPROBS,))
    given_output, absent_output = run(given_inputs, config), run(absent_inputs, config)
    assert torch.equal(given_output.loss, absent_output.loss)
    assert torch.equal(given_inputs.logprobs.grad, absent_inputs.logprobs.grad)
    assert absent_output.sums["ratio_mean"].item() == pytest.approx(1.0)
    assert absent_output.sums["clip_fraction"].item() == 0.0


def test_exact_generation_logprobs_need_no_correction(make_batch, make_inputs):
    batch, _, entropy = make_batch(6, LENGTHS)
    exact = batch.token_columns[GENERATION_LOGPROBS]
    outputs = [
        run(make_inputs(batch, exact, entropy, without=(PREVIOUS_LOGPROBS,)), CONFIGS[name])
        for name in ("plain", "sampler's", "corrected")
    ]
    assert len({output.loss.item() for output in outputs}) == 1


@pytest.mark.parametrize("nats", [200.0, -200.0])
def test_figures_of_weights_that_have_nothing_in_common_are_finite(make_batch, make_inputs, nats):
    """So that the step is told by its figure; an infinite one would hide what is wrong."""
    batch, logprobs, entropy = make_batch(6, LENGTHS)
    generation = np.where(batch.loss_mask, logprobs - nats, 0).astype(np.float32)
    batch = batch.with_token_column(GENERATION_LOGPROBS, generation)
    inputs = make_inputs(batch, logprobs, entropy, dtype=torch.float32, without=(PREVIOUS_LOGPROBS,))
    output = run(inputs, CONFIGS["plain"])
    assert not [name for name, value in output.sums.items() if not np.isfinite(value.item())]


def test_metrics_match_their_definitions(make_batch, make_inputs):
    batch, logprobs, entropy = make_batch(8, [20, 15, 10, 25, 20, 30])
    config = evolve(
        CONFIGS["corrected"],
        kl_coefficient=0.1,
        dual_clip=1.5,
        geometric_minimum=0.99,
        off_policy_maximum=0.01,
        entropy_minimum=0.5,
    )
    output = run(make_inputs(batch, logprobs, entropy), config)
    mask = batch.loss_mask
    columns = {name: np.float64(column)[mask] for name, column in batch.token_columns.items()}
    current, previous, generation = np.float64(logprobs)[mask], columns[PREVIOUS_LOGPROBS], columns[GENERATION_LOGPROBS]
    ratio, delta, advantage = np.exp(current - previous), previous - generation, columns[ADVANTAGES]
    low, high = (advantage < 0) & (ratio < 0.8), (advantage > 0) & (ratio > 1.2)
    kl_delta = columns[REFERENCE_LOGPROBS] - current
    number = np.repeat(np.arange(batch.num_sequences), batch.lengths)[mask]
    deltas = [delta[number == i] for i in range(batch.num_sequences)]
    geometric = np.exp([each.mean() for each in deltas])
    drift = np.array([(generation - current)[number == i].mean() for i in range(batch.num_sequences)])
    expected = {
        "ratio_mean": ratio.mean(),
        "clip_fraction": (low | high).mean(),
        "clip_fraction_low": low.mean(),
        "clip_fraction_high": high.mean(),
        "dual_clip_fraction": ((advantage < 0) & (ratio > 1.5)).mean(),
        "importance_truncated": (np.exp(delta) > config.importance_maximum).mean(),
        "importance_weight": np.minimum(np.exp(delta), config.importance_maximum).mean(),
        "sequence_log_ratio": np.mean([abs(each.sum()) for each in deltas]),
        "geometric_masked": (geometric < 0.99)[number].mean(),
        "off_policy_masked": ((advantage < 0) & (drift > 0.01)[number]).mean(),
        "low_entropy_masked": (entropy[mask] < 0.5).mean(),
        "kl": np.minimum(np.exp(kl_delta) - 1 - kl_delta, 10).mean(),
        "entropy": entropy[mask].mean(),
    }
    assert {name: value.item() for name, value in output.sums.items()} == pytest.approx(expected, rel=1e-5)
    assert min(expected.values()) > 0, "each figure is put to the test"
    assert {name: value.item() for name, value in output.maxima.items()} == pytest.approx(
        {
            "ratio_max": ratio.max(),
            "importance_weight_max": np.exp(delta).max(),
            "sequence_ratio_max": geometric.max(),
            "sequence_inverse_ratio_max": (1 / geometric).max(),
        }
    )
    assert not any(value.requires_grad for value in (*output.sums.values(), *output.maxima.values()))


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("icepop", {"importance_masked"}),
        ("sapo", {"gate_mean"}),
        ("clip-cov", {"high_covariance", "clip_fraction"}),
        ("kl-cov", {"high_covariance"}),
        ("vespo", {"kernel_mean"}),
        ("cispo", {"clip_fraction_high"}),
    ],
)
def test_an_objective_tells_figures_of_its_own(make_batch, make_inputs, name, figures):
    batch, logprobs, entropy = make_batch(8, LENGTHS)
    sums = run(make_inputs(batch, logprobs, entropy), CONFIGS[name]).sums
    assert figures <= sums.keys()
    assert all(sums[figure].item() > 0 for figure in figures)


def test_entropy_is_estimated_from_the_samples_where_it_is_not_computed(make_inputs, make_batch):
    batch, logprobs, _ = make_batch(8, [40, 25, 60])
    sums = run(make_inputs(batch, logprobs, None), CONFIGS["plain"]).sums
    current = np.float64(logprobs)[batch.loss_mask]
    weight = np.exp(current - batch.token_columns[GENERATION_LOGPROBS][batch.loss_mask])
    assert sums["approx_entropy"].item() == pytest.approx(-(weight * current).mean(), rel=1e-5)
    assert "entropy" not in sums
