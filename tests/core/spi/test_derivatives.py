"""Derivatives of losses are asked for without torch, and those of microbatches add up."""

import sys

import numpy as np
import pytest

from rlcore.spi import ContractError, GlobalCounts, LossGradients, LossSpec, PluginError, TokenBatch, loss_gradients, total_loss


def part(loss=1.0, **metrics):
    return LossGradients(loss=loss, logprobs=None, entropy=None, values=None, **{"sums": {}, "maxima": {}, **metrics})


def test_sums_are_added_and_of_maxima_the_greatest_counts():
    parts = [part(1.5, sums={"a": 1.0}, maxima={"b": 3.0}), part(0.5, sums={"a": 2.0}, maxima={"b": -1.0})]
    assert total_loss(parts) == (2.0, {"a": 3.0, "b": 3.0})


def test_microbatches_with_other_metrics_are_refused():
    with pytest.raises(ContractError, match=r"metrics \['b'\] after \['a'\]"):
        total_loss([part(sums={"a": 1.0}), part(sums={"b": 1.0})])


def test_without_the_code_that_evaluates_losses_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rlcore_torchkit", None)
    monkeypatch.setitem(sys.modules, "rlcore_torchkit.trainer", None)
    monkeypatch.delitem(sys.modules, "rlcore_torchkit.trainer.loss_gradients", raising=False)
    batch = TokenBatch(tokens=np.zeros(2, np.int32), offsets=np.array([0, 2]), loss_mask=np.array([False, True]))
    with pytest.raises(PluginError, match="pip install rlcore-torchkit"):
        loss_gradients(
            LossSpec(path="a:b", config=None),
            batch,
            GlobalCounts(num_loss_tokens=1, num_loss_sequences=1),
            logprobs=np.zeros(2, np.float32),
        )
