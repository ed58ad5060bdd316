"""Terms that are read off a loss by its derivatives are those that the formula has."""

from dataclasses import replace

import pytest
import torch

from rlcore_bundles.compared_batch import as_dtype
from rlcore_bundles.peer_comparison import terms_of
from rlcore_bundles.peers.terms import LossTerms

from .peer_cases import CASES, batch_of_case


def _terms(name: str, **options: object) -> tuple[LossTerms, object]:
    side = as_dtype(batch_of_case(name, **options).own, torch.float64)
    return terms_of(side), side.update


def test_the_terms_of_grpo_are_those_of_its_formula() -> None:
    terms, update = _terms("grpo with KL")
    mask = update.mask.double()
    ratio = (update.logprobs - update.previous).exp() * mask
    weights = (update.previous - update.generation).exp().clamp(max=2.0) * mask
    clipped = torch.minimum(ratio * update.advantages, ratio.clamp(0.8, 1.2) * update.advantages)
    delta = update.reference - update.logprobs
    kl = 0.1 * (delta.exp() - 1 - delta) * mask
    expected = {
        "loss mask": mask,
        "token weights": mask / mask.sum(),
        "importance weights": weights,
        "log ratio": (update.logprobs - update.previous) * mask,
        "policy loss": -clipped * weights * mask,
        "KL term": kl,
        "policy loss, sum": -(clipped * weights * mask).sum() / mask.sum(),
        "KL term, sum": kl.sum() / mask.sum(),
        "loss": (kl - clipped * weights * mask).sum() / mask.sum(),
    }
    assert (ratio > 3).any()
    for name, one in expected.items():
        torch.testing.assert_close(terms[name], one, msg=name, rtol=1e-9, atol=1e-12)
    assert {*terms.names} == {*expected, "gradient"}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_every_loss_add_up_to_it(name: str) -> None:
    terms, update = _terms(name)
    total = terms["policy loss, sum"] + (terms["KL term, sum"] if "KL term, sum" in terms.names else 0.0)
    torch.testing.assert_close(total, terms["loss"], rtol=1e-9, atol=1e-12)
    assert terms["loss mask"].bool().equal(update.mask)


def test_a_dual_clip_does_not_hide_the_ratio() -> None:
    with_clip, update = _terms("dapo", dual_clip=1.7)
    delta = torch.where(update.mask, update.logprobs - update.previous, 0.0)
    assert (delta.exp() > 3).any()
    torch.testing.assert_close(with_clip["log ratio"], delta, rtol=1e-9, atol=1e-12)


def test_the_weight_of_an_entropy_needs_no_entropies() -> None:
    terms, update = _terms("entropy")
    lengths = update.mask.sum(1, keepdim=True)
    expected = -0.01 * update.mask / lengths / len(update.mask)
    torch.testing.assert_close(terms["entropy weights"], expected.double())


def test_a_peer_that_reads_nothing_outside_of_its_mask_gets_no_derivative_there() -> None:
    terms, update = _terms("grpo")
    noisy = replace(update, advantages=torch.where(update.mask, update.advantages, 99.0))
    side = as_dtype(batch_of_case("grpo").own, torch.float64)
    again = LossTerms(side.loss, noisy, has_ratio=True, has_kl=False, has_entropy=False)
    torch.testing.assert_close(again["gradient"], terms["gradient"])
