"""Training in float8 under each recipe of TransformerEngine for Hopper, against bfloat16."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from megatron_support import TEMPERATURE, Reference, exported, make_backend, make_batch, split, step_request

from rlcore.spi import CloseRequest, LogprobsRequest, OptimizerSpec
from rlcore.spi.lifecycle import RESIDENT
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs TransformerEngine"),
]
FLOAT8 = {name: MegatronConfig(fp8=True, transformer={"fp8_recipe": name}) for name in ("delayed", "tensorwise", "blockwise")}
NUM_STEPS = 24
CURVE_BOUND = 0.5
"""Most nats between two curves, of a loss that falls by 5."""
LOGPROBS_BOUND = 0.2
"""Most nats on average between float8 and float32 with the same weights."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("float8") / "model", "qwen3", hidden_size=128, num_heads=4, num_kv_heads=4)


def trained(directory: Path, config: MegatronConfig) -> tuple[list[float], float, float]:
    """The loss of each step, and how far log-probabilities by the last weights are from those of plain transformers with these
    weights, and with those at the beginning, on average."""
    batch = make_batch(num_sequences=16, max_length=48)
    batch = evolve(batch, token_columns={"advantages": np.ones(batch.num_tokens, np.float32)})
    parts = split(batch, [range(8), range(8, 16)])  # of which the second takes the weights that the first has quantised
    trainer = make_backend(
        directory, config=config, dtype="bfloat16", device="cuda", optimizer=OptimizerSpec(learning_rate=1e-3)
    )
    losses = [trainer.train_step(step_request(parts, batch.counts(), version)).loss for version in range(NUM_STEPS)]
    request = LogprobsRequest(
        microbatches=parts, model="policy", temperature=TEMPERATURE, entropy=False, weight_version=NUM_STEPS
    )
    found = np.concatenate(trainer.get_logprobs(request).logprobs)
    distances = []
    with torch.no_grad():
        for weights in (exported(trainer, NUM_STEPS), {}):
            reference = Reference(directory)
            reference.model.load_state_dict(weights, strict=False)
            expected = np.concatenate([reference.logprobs(part)[0].numpy() for part in parts])
            distances.append(float(np.abs(found - expected).mean()))
    trainer.close(CloseRequest())
    return losses, distances[0], distances[1]


@pytest.fixture(scope="module")
def plain(directory: Path) -> list[float]:
    losses, own, first = trained(directory, MegatronConfig())
    assert own < LOGPROBS_BOUND / 2 < LOGPROBS_BOUND < first
    assert losses[-1] < losses[0] - 2.0
    return losses


@pytest.mark.parametrize("recipe", FLOAT8)
def test_the_curve_is_that_of_bfloat16(recipe: str, directory: Path, plain: list[float]) -> None:
    losses, own, first = trained(directory, FLOAT8[recipe])
    print(f"{recipe}: curves differ by {np.abs(np.subtract(losses, plain)).max():.3f}, log-probabilities by {own:.3f}")
    assert losses != plain
    assert own < LOGPROBS_BOUND < first
    assert np.abs(np.subtract(losses, plain)).max() < CURVE_BOUND


def test_copies_of_weights_take_no_memory_while_another_has_the_device(directory: Path) -> None:
    batch = make_batch(num_sequences=8, max_length=48)
    batch = evolve(batch, token_columns={"advantages": np.ones(batch.num_tokens, np.float32)})
    request = LogprobsRequest(microbatches=[batch], model="reference", temperature=TEMPERATURE, entropy=False, weight_version=0)
    taken = {}
    for name, config in {"bfloat16": MegatronConfig(), **FLOAT8}.items():
        before = torch.cuda.memory_allocated()
        trainer = make_backend(directory, config=config, dtype="bfloat16", device="cuda", needs_reference=True)
        first = trainer.get_logprobs(request).logprobs
        trainer.set_residency(RESIDENT)
        np.testing.assert_array_equal(np.concatenate(trainer.get_logprobs(request).logprobs), np.concatenate(first))
        trainer.train_step(step_request([batch], batch.counts(), 0))
        busy = torch.cuda.memory_allocated() - before
        trainer.set_residency(RESIDENT)
        taken[name] = torch.cuda.memory_allocated() - before
        print(f"{name}: {busy} bytes after a step, {taken[name]} with the device given away")
        assert taken[name] < busy
        trainer.close(CloseRequest())
    small = 2**20  # scales and their history
    assert max(taken.values()) < taken["bfloat16"] + small, taken
