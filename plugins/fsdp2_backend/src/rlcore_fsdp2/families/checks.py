"""Compare what a trainer and a generator compute of a model with transformers and with each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore import spi
from rlcore_fsdp2.families.reference import LOSS, TrainedReference
from rlcore_torchkit.testing.families.backends import logprobs_of, refit
from rlcore_torchkit.testing.families.reference import LENGTHS, SPECIAL, Reference
from rlcore_torchkit.testing.families.samples import Samples, WrongError

TOLERANCE = 2e-5
"""Largest distance of log-probabilities in float32."""
TOLERANCES: Mapping[str, float] = {
    "inkling2_loop_text": 2e-4,
    "nemotron_h": 1e-3,
    "qwen3_5": 1e-4,
    "qwen3_5_moe": 2e-4,
    "zamba2": 1e-3,
}
"""Largest distances, by model_type, of families whose states or repeated layers round in many products."""
GRADIENT_TOLERANCE = 2e-3
"""Largest distance of a tensor's step, as a share of the step."""


def check_step(trainer: Any, reference: TrainedReference, scratch: Path) -> None:
    """Compare the trainer's log-probabilities, and a step, with the reference's."""
    batch = reference.batch(reference.vocab_size - SPECIAL)
    alone = [batch.select(np.array([number])) for number in range(len(LENGTHS))]
    with torch.no_grad():
        expected = reference.logprobs(batch).numpy()
    before = reference.saved(scratch / "before")
    tolerance = TOLERANCES.get(reference.model_type, TOLERANCE)
    _compare("log-probabilities of packed sequences", logprobs_of(trainer, [batch], 0), expected, tolerance)
    _compare("log-probabilities of single sequences", logprobs_of(trainer, alone, 0), expected, tolerance)
    loss, norm = reference.step(batch)
    microbatches = tuple(batch.select(np.array(group)) for group in ([0, 4], [1, 2, 3]))
    request = spi.TrainStepRequest(
        microbatches=microbatches, counts=batch.counts(), loss=LOSS, temperature=1.0, weight_version=0
    )
    result = trainer.train_step(request)
    for name, found, wanted in (("loss", result.loss, loss), ("grad_norm", result.grad_norm, norm)):
        if not abs(found - wanted) <= 1e-3 * max(1.0, abs(wanted)):
            raise WrongError(f"{name} {found:.6g} where transformers has {wanted:.6g}")
    export = trainer.export_weights(spi.ExportWeightsRequest(weight_version=1, dtype="float32", max_bucket_bytes=2**20))
    found_weights = {named.name: named.tensor.clone() for bucket in export.buckets for named in bucket.tensors}
    _compare_steps(before, found_weights, reference.saved(scratch / "after"))


def _compare(what: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    distance = float(np.abs(found - expected).max())
    if not distance <= tolerance:
        raise WrongError(f"{what} {distance:.2g} from those of transformers")


def _compare_steps(before: Mapping[str, Tensor], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        different = sorted(found.keys() ^ expected.keys())
        raise WrongError(f"tensors {', '.join(different[:3])} of {len(different)} that one side alone has")
    steps = {name: (tensor - before[name]).float() for name, tensor in expected.items()}
    largest = max(step.norm().item() for step in steps.values())
    for name, tensor in expected.items():
        distance = (found[name].float() - tensor.float()).norm().item()
        if not distance <= GRADIENT_TOLERANCE * max(steps[name].norm().item(), 1e-3 * largest):
            raise WrongError(f"{name} {distance:.2g} from transformers' after a step of {steps[name].norm().item():.2g}")


def check_samples(generator: Any, trainer: Any | None, model: spi.ModelSpec) -> None:
    """Compare samples' log-probabilities with those of the trainer, which has made a step; without one with the reference's."""
    version = 0 if trainer is None else 1
    if trainer is not None:
        refit(generator, trainer, version)
    reference = Reference(model)

    def expected(batch: spi.TokenBatch) -> np.ndarray:
        if trainer is not None:
            return logprobs_of(trainer, [batch], version)
        with torch.no_grad():
            return reference.logprobs(batch).numpy()

    distance = float(Samples(generator, reference.vocab_size, version).distances(expected).max())
    tolerance = TOLERANCES.get(reference.model_type, TOLERANCE)
    if not distance <= tolerance:
        raise WrongError(f"log-probabilities of samples {distance:.2g} from those of transformers")
