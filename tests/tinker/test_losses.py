"""The losses of the protocol against float64 formulas, written apart from the project's: values and gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tinker_losses import FORMULAS

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, GlobalCounts, LossInputs
from rlcore_tinker.loss_table import CLIP_INPUTS, LOSS_SUM, LOSSES, RATIO_INPUT, TOKEN_WEIGHTS
from rlcore_torchkit.trainer.losses import load_loss

LENGTHS = (5, 9, 3)
OFFSETS = [0, 5, 14, 17]
CLIP = (0.8, 1.2)


def _case(seed: int) -> tuple[Any, dict[str, Any], Any]:
    """Log-probabilities [T], columns and loss mask, with ratios on both sides of the clip and advantages of both signs."""
    draw, total = np.random.default_rng(seed), sum(LENGTHS)
    p = -draw.exponential(2.0, total).astype(np.float32)
    mask = draw.random(total) < 0.7
    firsts = np.cumsum([0, *LENGTHS[:-1]])
    mask[firsts], p[firsts] = False, 0.0
    columns = {
        GENERATION_LOGPROBS: (p + draw.normal(0, 0.4, total)).astype(np.float32),
        ADVANTAGES: draw.normal(0, 1, total).astype(np.float32),
        TOKEN_WEIGHTS: draw.choice([0.5, 1.0, 2.0], total).astype(np.float32),
        CLIP_INPUTS[0]: np.full(total, CLIP[0], np.float32),
        CLIP_INPUTS[1]: np.full(total, CLIP[1], np.float32),
        RATIO_INPUT: np.where(np.isin(np.arange(total), firsts), 0, 1).astype(np.float32),
    }
    columns[CLIP_INPUTS[1]][-2:] = 3.0  # thresholds of their own
    return p, columns, mask


def _exact(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns in float64, with the offsets that the sequence-level formula reads."""
    return {"offsets": OFFSETS} | {name: values.astype(np.float64) for name, values in columns.items()}


def _computed(name: str, p: Any, columns: Mapping[str, Any], mask: Any) -> tuple[float, Any, dict[str, Any]]:
    logprobs = torch.tensor(p, requires_grad=True)
    loss = LOSSES[name]
    spec = loss.spec({"beta": 0.05} if name == "dro" else {})
    assert set(spec.token_columns) <= columns.keys()
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=None,
        loss_mask=torch.tensor(mask),
        offsets=torch.tensor(OFFSETS),
        token_columns={column: torch.tensor(columns[column]) for column in spec.token_columns},
        sequence_columns={},
        counts=GlobalCounts(num_loss_tokens=7, num_loss_sequences=2),
    )
    output = load_loss(spec.path)(inputs, spec.config)
    output.loss.backward()
    assert logprobs.grad is not None
    return float(output.loss.detach()), logprobs.grad.numpy(), dict(output.sums)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_formula(name: str, seed: int) -> None:
    p, columns, mask = _case(seed)
    loss, gradient, sums = _computed(name, p, columns, mask)
    exact = _exact(columns)
    terms, derivatives = FORMULAS[name](p.astype(np.float64), exact)
    weights = np.where(mask, exact[TOKEN_WEIGHTS], 0.0)
    np.testing.assert_allclose(loss, (weights * terms).sum(), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, weights * derivatives, rtol=2e-4, atol=1e-5)
    assert float(sums[LOSS_SUM]) == loss


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "gspo"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    p, columns, mask = _case(11)
    if name == "cispo":  # its ratio has no gradient: hold it at its value
        columns = {**columns, CLIP_INPUTS[0]: np.full_like(p, 0.9), CLIP_INPUTS[1]: np.full_like(p, 0.9)}
    _, gradient, _ = _computed(name, p, columns, mask)
    exact = _exact(columns)
    weights, step = np.where(mask, exact[TOKEN_WEIGHTS], 0.0), 1e-6
    above, below = (FORMULAS[name](p.astype(np.float64) + sign * step, exact)[0] for sign in (1, -1))
    np.testing.assert_allclose(gradient, weights * (above - below) / (2 * step), rtol=1e-3, atol=1e-4)


def test_tokens_outside_of_the_loss_have_no_gradient_however_far_off() -> None:
    p, columns, mask = _case(3)
    columns[GENERATION_LOGPROBS][~mask] = -500.0  # their ratio would be infinite
    columns[RATIO_INPUT][~mask] = 0.0
    for name in FORMULAS:
        loss, gradient, _ = _computed(name, p, columns, mask)
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()
        assert not gradient[~mask].any()


FAR = (-1000.0, -90.0, 90.0, 1000.0)
"""Log-probabilities of the sampler whose ratio to the model's is 0 or infinite in float32."""


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", FORMULAS)
def test_terms_that_the_formula_bounds_stay_finite_however_far_the_ratio(name: str, far: float) -> None:
    """A clip bounds ratios above 1 of positive advantages. Tokens without advantage, or of weight 0, have no term."""
    p, columns, mask = _case(5)
    columns[GENERATION_LOGPROBS][:] = far
    columns[ADVANTAGES] = np.abs(columns[ADVANTAGES])
    first, second = np.flatnonzero(mask)[:2]
    columns[ADVANTAGES][first], columns[TOKEN_WEIGHTS][second] = 0.0, 0.0
    if name == "importance_sampling" and far < 0:  # whose formula has no bound
        columns[ADVANTAGES][:] = 0.0
    loss, gradient, _ = _computed(name, p, columns, mask)
    exact = _exact(columns)
    with np.errstate(over="ignore", invalid="ignore"):
        terms, derivatives = (exact[TOKEN_WEIGHTS] * found for found in FORMULAS[name](p.astype(np.float64), exact))
    has_term = mask & (columns[TOKEN_WEIGHTS] != 0)
    if name not in ("cross_entropy", "dro"):  # a penalty needs no advantage
        has_term &= columns[ADVANTAGES] != 0
    np.testing.assert_allclose(loss, np.where(has_term, terms, 0.0).sum(), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, np.where(has_term, derivatives, 0.0), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_of_parts_add_up(name: str) -> None:
    """A sum is divided by nothing, so it depends on no microbatch."""
    p, columns, mask = _case(4)
    loss, _, _ = _computed(name, p, columns, mask)
    first = np.arange(len(p)) < LENGTHS[0]
    parts = [_computed(name, p, columns, mask & part)[0] for part in (first, ~first)]
    np.testing.assert_allclose(loss, sum(parts), rtol=1e-5)
