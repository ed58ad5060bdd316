"""Gradients and statistics of one step on one rank, against plain transformers and numpy."""

import numpy as np
import pytest
import torch
from fsdp2_support import TEMPERATURE, WEIGHTED, Reference, assert_same, make_batch, make_config, split
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ModelSpec
from rlcore_fsdp2.gradients import accumulate, non_finite_names, reduce
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.policy import make_policy
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.trainer.losses import DeferredErrors, Totals, total
from rlcore_torchkit.trainer.microbatch import move

ARCHITECTURES = installed_model_types()
CPU = torch.device("cpu")
NUM_SEQUENCES = 6


@st.composite
def groupings(draw) -> list[list[int]]:
    """Any order of the sequences, cut into any microbatches."""
    order = draw(st.permutations(range(NUM_SEQUENCES)))
    cuts = sorted(draw(st.sets(st.integers(1, NUM_SEQUENCES - 1))))
    return [list(group) for group in np.split(np.asarray(order), cuts)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_gradients_and_log_probabilities_equal_plain_torch(architecture, model_directory):
    directory = model_directory(architecture)
    batch = make_batch(num_sequences=NUM_SEQUENCES)
    model, _ = make_policy(ModelSpec(path=str(directory)), make_config(), None, CPU)
    reference = Reference(directory)
    expected_loss = reference.backward(batch)
    expected = reference.gradients()
    reference.optimizer.zero_grad()

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(groupings())
    def check_gradients(groups: list[list[int]]) -> None:
        microbatches = [move(part, CPU, WEIGHTED.token_columns) for part in split(batch, groups)]
        totals = total(
            accumulate(
                model, microbatches, WEIGHTED, batch.counts(), TEMPERATURE, DeferredErrors(), reduce_every_microbatch=False
            )
        )
        assert totals.loss.item() == pytest.approx(expected_loss, abs=1e-5)
        assert totals.sums["tokens"].item() == pytest.approx(1.0)
        assert totals.maxima["longest"].item() == batch.lengths.max()
        assert_same({name: p.grad for name, p in model.named_parameters()}, expected)
        model.zero_grad()

    check_gradients()


def test_each_microbatchs_log_probabilities_are_those_that_its_loss_was_given(model_directory):
    directory, batch = model_directory(), make_batch()
    model, _ = make_policy(ModelSpec(path=str(directory)), make_config(), None, CPU)
    parts, found = split(batch, [[0, 1, 2], [3, 4, 5]]), []
    microbatches = [move(part, CPU, WEIGHTED.token_columns) for part in parts]
    accumulate(
        model,
        microbatches,
        WEIGHTED,
        batch.counts(),
        TEMPERATURE,
        DeferredErrors(),
        reduce_every_microbatch=False,
        logprobs=found,
    )
    with torch.no_grad():
        expected = Reference(directory).logprobs(batch)[0]
    assert [len(one) for one in found] == [part.num_tokens for part in parts]
    assert not any(one.requires_grad for one in found)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("maxima", [{}, {"longest": torch.tensor(7.0)}])
def test_one_ranks_totals_are_the_steps(maxima):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (2, 2, 2))]
    totals = Totals(loss=torch.tensor(1.5).double(), sums={"b": torch.tensor(2), "a": torch.tensor(-0.25)}, maxima=maxima)
    stats = reduce(totals, gradients, ParallelLayout())
    assert stats.loss == 1.5
    assert stats.metrics == {"b": 2.0, "a": -0.25} | {name: value.item() for name, value in maxima.items()}
    expected = np.linalg.norm(np.concatenate([gradient.double().numpy().ravel() for gradient in gradients]))
    assert stats.grad_norm == pytest.approx(expected, rel=1e-6)


def test_parameters_with_nan_or_infinite_gradients_are_named():
    gradients = {name: torch.zeros(3) for name in ("a", "b", "c", "d")}
    gradients["b"][1], gradients["d"][0] = torch.nan, -torch.inf
    assert non_finite_names(gradients, 1) == ["b", "d"]
    assert non_finite_names({"a": torch.ones(2)}, 1) == []
