"""What the conformance kit does not ask of the trainer: bfloat16, a state of another model, a run without torch."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_support import make_trainer

from rlcore.spi import (
    ADVANTAGES,
    CheckpointError,
    LoadStateRequest,
    LogprobsRequest,
    LossSpec,
    SaveStateRequest,
    TrainStepRequest,
)
from rlcore_conformance.references.probe import ProbeConfig
from rlcore_conformance.trainers.batches import make_batch

LOSS = LossSpec(path="rlcore_conformance.references.torch_losses:probe_loss", config=ProbeConfig(), token_columns=(ADVANTAGES,))


def logprobs_of(trainer, batch, version=0):
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=1.0, entropy=False, weight_version=version)
    return trainer.get_logprobs(request).logprobs[0]


def test_in_bfloat16_weights_and_moments_stay_in_float32(model_directory):
    trainer, exact = make_trainer(model_directory(), "bfloat16"), make_trainer(model_directory())
    batch = make_batch(trainer.decoder.dims.vocab_size, seed=0)
    np.testing.assert_allclose(logprobs_of(trainer, batch), logprobs_of(exact, batch), atol=0.1)
    request = TrainStepRequest(microbatches=(batch,), counts=batch.counts(), loss=LOSS, temperature=1.0, weight_version=0)
    result, expected = trainer.train_step(request), exact.train_step(request)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert {tensor.dtype for tensor in trainer.state().values()} == {mx.float32}


def test_a_state_of_another_model_is_refused_and_changes_nothing(model_directory, tmp_path):
    make_trainer(model_directory("llama")).save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    trainer = make_trainer(model_directory("qwen3"))
    before = trainer.state()
    with pytest.raises(CheckpointError, match=r"another model\. .*k_norm.weight: absent there"):
        trainer.load_state(LoadStateRequest(directory=tmp_path))
    assert trainer.state() == before


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # whoever imports it fails
sys.path.insert(0, sys.argv[1])
from mlx_support import make_generator, make_trainer
import numpy as np
from rlcore import spi
trainer = make_trainer(sys.argv[2])
tokens = np.arange(6, dtype=np.int32)
batch = spi.TokenBatch(tokens=tokens, offsets=np.array([0, 6]), loss_mask=tokens > 0)
request = spi.LogprobsRequest(microbatches=(batch,), model="policy", temperature=1.0, entropy=True, weight_version=0)
result = trainer.get_logprobs(request)
generator = make_generator(sys.argv[2])
export = trainer.export_weights(spi.ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**20))
generator.refit(spi.RefitRequest(weight_version=0, channel="in_process", weights=export, may_alias=True))
sample = generator.generate(
    spi.GenerateRequest(
        prompts=spi.RaggedTokens.from_lists([[1, 2]]), num_samples=1, seeds=np.array([3]),
        max_tokens=np.array([4], np.int32), sampling=spi.SamplingParams(), weight_version=0,
    )
)
trainer.save_state(spi.SaveStateRequest(directory=Path(sys.argv[3]), kind="hf"))
print(len(result.logprobs[0]), len(sample.tokens))
"""


def test_all_but_a_loss_works_where_torch_cannot_be_imported(model_directory, tmp_path):
    arguments = [str(Path(__file__).parent), str(model_directory()), str(tmp_path)]
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "4"]
