"""Observer of a run that the oracle judges: writes down each training step that a trainer has made, as the backend saw it."""

import os
import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rlcore.spi import TrainStepRequest, hookimpl

FOLDER = "train-steps"
"""In the working directory, which ranks share with their driver."""


class Recorder:
    """One file for each rank and training step: what was asked, in numpy, and what came of it."""

    @hookimpl(wrapper=True)
    def train_step(self, request: TrainStepRequest) -> Generator[None, Any, Any]:
        result = yield
        step = {
            "weight_version": request.weight_version,
            "temperature": request.temperature,
            "num_loss_tokens": request.counts.num_loss_tokens,
            "num_loss_sequences": request.counts.num_loss_sequences,
            "microbatches": [
                {
                    "tokens": batch.tokens,
                    "offsets": batch.offsets,
                    "loss_mask": batch.loss_mask,
                    "token_columns": dict(batch.token_columns),
                    "sequence_columns": dict(batch.sequence_columns),
                }
                for batch in request.microbatches
            ],
            "figures": {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                **result.metrics,
            },
        }
        folder = Path(FOLDER)
        folder.mkdir(exist_ok=True)
        (folder / f"{request.weight_version:06d}-{os.getpid()}.pickle").write_bytes(pickle.dumps(step))
        return result


OBSERVER = Recorder()
