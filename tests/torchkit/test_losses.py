"""The results that a loss function may return. An error names the function."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from attrs import evolve

from rlcore.spi import (
    GENERATION_LOGPROBS,
    ContractError,
    GlobalCounts,
    LossOutput,
    LossSpec,
    PluginError,
    TokenBatch,
)
from rlcore_torchkit.trainer.losses import evaluate, load_loss
from rlcore_torchkit.trainer.microbatch import move

BATCH = TokenBatch(
    tokens=np.arange(3, dtype=np.int32), offsets=np.asarray([0, 3], np.int64), loss_mask=np.asarray([False, True, True])
)
COUNTS = GlobalCounts(num_loss_tokens=2, num_loss_sequences=1)


@pytest.fixture
def loss_of(monkeypatch):
    """Evaluates a function of the log-probabilities as the loss `acme_losses:loss`."""
    module = ModuleType("acme_losses")
    monkeypatch.setitem(sys.modules, "acme_losses", module)

    def evaluated(function, logprobs=(0.0, 0.0, 0.0), generation=None):
        load_loss.cache_clear()
        module.loss = lambda inputs, config: function(inputs.logprobs)
        columns = {} if generation is None else {GENERATION_LOGPROBS: np.asarray(generation, np.float32)}
        spec = LossSpec(path="acme_losses:loss", config=None, generation_mismatch=generation is not None)
        microbatch = move(evolve(BATCH, token_columns=columns), torch.device("cpu"), tuple(columns))
        return evaluate(spec, microbatch, torch.tensor(logprobs, requires_grad=True), None, COUNTS)

    yield evaluated
    load_loss.cache_clear()


def output(loss, **metrics):
    return LossOutput(loss=loss, **metrics)


def test_what_is_right_passes(loss_of):
    found = loss_of(lambda logprobs: output(logprobs.sum(), sums={"a": torch.ones(())}, maxima={"b": torch.tensor(3)}))
    assert found.loss == 0.0
    assert found.sums == {"a": 1.0}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda logprobs: logprobs.sum(), "found a Tensor; expected a LossOutput"),
        (lambda logprobs: None, "found a NoneType; expected a LossOutput"),
        (lambda logprobs: output(1.0), "found loss that is a float; expected a scalar tensor"),
        (lambda logprobs: output(logprobs), r"found loss of shape \[3\] and torch.float32; expected a scalar tensor"),
        (lambda logprobs: output(torch.ones((), dtype=torch.int64)), r"found loss of shape \[\] and torch.int64"),
        (lambda logprobs: output(logprobs.sum().detach()), "found a loss without a gradient; expected one that is computed"),
        (lambda logprobs: output(torch.zeros((), requires_grad=True)), "found a loss without a gradient; expected one that is"),
        (lambda logprobs: output(logprobs.sum(), sums=None), "found sums that is a NoneType; expected a mapping"),
        (lambda logprobs: output(logprobs.sum(), sums={"a": 1.0}), r"found sums\['a'\] that is a float; expected a scalar"),
        (
            lambda logprobs: output(logprobs.sum(), sums={"importance_ratio": logprobs.sum()}),
            r"found sums\['importance_ratio'\]; expected another name",
        ),
        (lambda logprobs: output(logprobs.sum(), maxima={"a": logprobs}), r"found maxima\['a'\] of shape \[3\]"),
    ],
)
def test_what_must_not_be_returned_names_the_loss(loss_of, function, text):
    with pytest.raises(ContractError, match=f"loss acme_losses:loss: {text}"):
        loss_of(function)


def test_the_mismatch_stands_beside_the_metrics_of_a_loss_that_knows_nothing_of_it(loss_of):
    """Its definition, in numpy; the first token, outside the loss mask, is as far off as can be."""
    logprobs, generation = np.array([0.0, -1.25, -0.5]), np.array([-np.inf, -1.0, -2.5])
    delta = (logprobs - generation)[1:]
    found = loss_of(
        lambda logprobs: output(logprobs.sum(), sums={"a": torch.ones(())}), logprobs.astype(np.float32), generation
    )
    assert {name: value.item() for name, value in found.sums.items()} == pytest.approx(
        {
            "a": 1.0,
            "token_mult_prob_error": np.exp(abs(delta)).mean(),
            "generation_kl_error": (np.exp(delta) - 1 - delta).mean(),
            "importance_ratio": np.exp(delta).mean(),
        },
        rel=1e-6,
    )
    assert not any(value.requires_grad for value in found.sums.values())


def test_what_it_raises_passes_with_a_note_of_what_it_was_given(loss_of):
    with pytest.raises(ZeroDivisionError) as raised:
        loss_of(lambda logprobs: 1 / 0)
    (note,) = raised.value.__notes__
    assert note == (
        "raised in the loss acme_losses:loss, which was given the token columns (none); no previous_logprobs "
        "(AlgorithmNeeds.previous_logprobs asks for them); no entropy (LossSpec.entropy asks for it)"
    )


@pytest.mark.parametrize("path", ["acme_losses:other", "acme_nowhere:loss"])
def test_a_path_that_leads_nowhere_is_named(loss_of, path):
    with pytest.raises(PluginError, match=f"loss '{path}' cannot be imported: "):
        load_loss(path)
