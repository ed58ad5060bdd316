"""A step's gradient, parameter by parameter, against torch."""

import numpy as np
import pytest
import torch
from mlx_support import loaded

from rlcore.spi import ADVANTAGES, LossSpec, TrainStepRequest
from rlcore_conformance.references.probe import ProbeConfig
from rlcore_conformance.trainers.batches import arrange, make_batch
from rlcore_mlx.gradients import StepGradients
from rlcore_torchkit.trainer.losses import evaluate
from rlcore_torchkit.trainer.microbatch import move
from rlcore_torchkit.transformers_import import import_transformers

TEMPERATURE = 0.8


def torch_gradients(directory, batch, loss):
    """The loss and its gradient, each sequence alone through transformers."""
    import_transformers()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logprobs, entropies = [], []
    for tokens in np.split(batch.tokens.astype(np.int64), batch.offsets[1:-1]):
        table = (model(torch.tensor(tokens)[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        first = torch.zeros(1)
        logprobs += [first, table.gather(1, torch.tensor(tokens)[1:, None])[:, 0]]
        entropies += [first, -(table.exp() * table).sum(-1)]
    moved = move(batch, torch.device("cpu"), loss.token_columns)
    entropy = torch.cat(entropies) if loss.entropy == "loss" else torch.cat(entropies).detach()
    output = evaluate(loss, moved, torch.cat(logprobs), entropy, batch.counts())
    output.loss.backward()
    return float(output.loss.detach()), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("entropy", ["metric", "loss"])
def test_gradients_are_those_of_torch(architecture, entropy, model_directory):
    directory = model_directory(architecture)
    decoder, weights = loaded(directory)
    batch = make_batch(decoder.dims.vocab_size, seed=5)
    loss = LossSpec(
        path="rlcore_conformance.references.torch_losses:probe_loss",
        config=ProbeConfig(entropy_coefficient=0.3),
        token_columns=(ADVANTAGES,),
        entropy=entropy,
    )
    expected_loss, expected = torch_gradients(directory, batch, loss)
    request = TrainStepRequest(
        microbatches=arrange(batch, "uneven"), counts=batch.counts(), loss=loss, temperature=TEMPERATURE, weight_version=0
    )
    step = StepGradients(request, decoder, "float32", 700)
    for microbatch in request.microbatches:
        step.add(weights, microbatch)
    assert sum(part.loss for part in step.losses) == pytest.approx(expected_loss, abs=1e-5)
    assert step.gradients.keys() == expected.keys()
    for name, gradient in step.gradients.items():
        np.testing.assert_allclose(np.array(gradient), expected[name], rtol=1e-3, atol=1e-6, err_msg=name)
