"""Passes of microbatches through a model on one rank, against plain transformers; layouts are compared in test_layout."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_support import TEMPERATURE, WEIGHTED, Reference, make_batch, split
from megatron_weights_cases import opened

from rlcore.spi import LogprobsRequest
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.training.train import Passes, reduce_totals
from rlcore_torchkit.testing.models import make_model
from rlcore_torchkit.trainer.losses import DeferredErrors, Totals, total
from rlcore_torchkit.trainer.microbatch import move

CPU = torch.device("cpu")
GROUPS = [[3, 0, 1], [5], [2, 4]]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("passes") / "model", request.param, tied=False)


@pytest.fixture
def passes(directory: Path) -> Iterator[Passes]:
    with opened(directory, ParallelLayout()) as model:
        model.load()
        device = next(model.parts[0].parameters()).device
        yield Passes(models=model.parts, layout=model.layout, groups=model.groups, device=device)


def request(microbatches: tuple, **changes: object) -> LogprobsRequest:
    options = {"model": "policy", "temperature": TEMPERATURE, "entropy": True, "weight_version": 0}
    return LogprobsRequest(microbatches=microbatches, **options | changes)


def test_log_probabilities_and_entropies_come_by_microbatch(passes: Passes, directory: Path) -> None:
    batch = make_batch()
    parts = split(batch, GROUPS)
    with torch.no_grad():
        expected = [Reference(directory).logprobs(part) for part in parts]
    logprobs, entropies = passes.logprobs(request(parts))
    for found, entropy, right in zip(logprobs, entropies, expected, strict=True):
        np.testing.assert_allclose(found, right[0], atol=1e-5)
        np.testing.assert_allclose(entropy, right[1], atol=1e-5)
    alone, nothing = passes.logprobs(request(parts, entropy=False))
    assert nothing is None
    for found, again in zip(alone, logprobs, strict=True):
        np.testing.assert_array_equal(found, again)


def test_without_a_microbatch_there_is_no_result(passes: Passes) -> None:
    assert passes.logprobs(request(())) == ((), ())
    assert passes.logprobs(request((), entropy=False)) == ((), None)


def test_loss_and_gradients_are_those_of_plain_torch(passes: Passes, directory: Path) -> None:
    batch, reference, logprobs = make_batch(), Reference(directory), []
    expected_loss = reference.backward(batch)
    expected = reference.gradients()
    microbatches = [move(part, passes.device, WEIGHTED.token_columns) for part in split(batch, GROUPS)]
    totals = total(passes.train(microbatches, WEIGHTED, batch.counts(), TEMPERATURE, DeferredErrors(), logprobs))
    assert totals.loss.item() == pytest.approx(expected_loss, abs=1e-5)
    assert totals.sums["tokens"].item() == pytest.approx(1.0)
    assert [found.shape for found in logprobs] == [(1, one.packed.num_tokens) for one in microbatches]
    found = {name: parameter.grad.cpu() for name, parameter in passes.models[0].named_parameters()}
    for ours, theirs in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        torch.testing.assert_close(found[ours], expected[theirs], atol=1e-5, rtol=0.0)
    norms = [torch.stack([one.double().square().sum() for one in gradients.values()]).sum() for gradients in (found, expected)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("maxima", [{}, {"longest": torch.tensor(7)}])
def test_totals_of_one_rank_are_the_steps(maxima: dict, passes: Passes) -> None:
    totals = Totals(loss=torch.tensor(1.5).double(), sums={"b": torch.tensor(2), "a": torch.tensor(-0.25)}, maxima=maxima)
    found = reduce_totals(totals, passes.layout, passes.groups)
    assert found == (1.5, {"b": 2.0, "a": -0.25}, dict.fromkeys(maxima, 7.0))
