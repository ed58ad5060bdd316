"""Compare what a trainer and a generator compute of a model with transformers and with each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore import spi
from rlcore_fsdp2.families.reference import LENGTHS, LOSS, OPTIMIZER, Reference, make_batch

MAX_LENGTH = 48
TOLERANCE = 2e-5
"""Largest distance of log-probabilities in float32."""
TOLERANCES: Mapping[str, float] = {"nemotron_h": 1e-3, "qwen3_5_moe": 2e-4, "zamba2": 1e-3}
"""Largest distances, by model_type, of families whose states many products round."""
GRADIENT_TOLERANCE = 2e-3
"""Largest distance of a tensor's step, as a share of the step."""
RESPONSES = (14, 3, 9, 1, 6)
"""Tokens that are sampled after each prompt."""
SPECIAL = 16
"""The last tokens of a vocabulary, which may stand for images and the like."""


class WrongError(Exception):
    """Numbers that are not those of the reference."""


def trainer_context(model: spi.ModelSpec) -> spi.TrainerContext:
    """Return the context of a trainer of this model for one step."""
    return spi.TrainerContext(
        model=model,
        rank_info=spi.RankInfo(),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=MAX_LENGTH,
        optimizer=OPTIMIZER,
        schedule=spi.ScheduleSpec(),
    )


def check_step(trainer: Any, reference: Reference, scratch: Path) -> None:
    """Compare the trainer's log-probabilities, and a step, with the reference's."""
    batch = reference.batch(reference.vocab_size - SPECIAL)
    alone = [batch.select(np.array([number])) for number in range(len(LENGTHS))]
    with torch.no_grad():
        expected = reference.logprobs(batch).numpy()
    before = reference.saved(scratch / "before")
    tolerance = TOLERANCES.get(reference.model_type, TOLERANCE)
    _compare("log-probabilities of packed sequences", _logprobs(trainer, [batch], 0), expected, tolerance)
    _compare("log-probabilities of single sequences", _logprobs(trainer, alone, 0), expected, tolerance)
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


def _logprobs(trainer: Any, batches: Sequence[spi.TokenBatch], version: int) -> np.ndarray:
    request = spi.LogprobsRequest(
        microbatches=tuple(batches), model="policy", temperature=1.0, entropy=False, weight_version=version
    )
    return np.concatenate(trainer.get_logprobs(request).logprobs)


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


def generator_context(model: spi.ModelSpec, *, has_trainer: bool) -> spi.GeneratorContext:
    """Return the context of a generator of this model, whose weights come from a trainer where there is one."""
    channel = "in_process" if has_trainer else None
    return spi.GeneratorContext(model=model, rank_info=spi.RankInfo(), seed=0, max_sequence_length=MAX_LENGTH, channel=channel)


def check_samples(generator: Any, trainer: Any | None, model: spi.ModelSpec) -> None:
    """Compare samples' log-probabilities with those of the trainer, which has made a step; without one with the reference's."""
    version = 0 if trainer is None else 1
    if trainer is not None:
        export = trainer.export_weights(spi.ExportWeightsRequest(weight_version=1, dtype="float32", max_bucket_bytes=2**20))
        generator.refit(spi.RefitRequest(weight_version=1, channel="in_process", weights=export, may_alias=False))
    reference = Reference(model)
    batch = make_batch(reference.vocab_size - SPECIAL)
    prompts = np.split(batch.tokens, batch.offsets[1:-1])
    request = spi.GenerateRequest(
        prompts=spi.RaggedTokens.from_lists([prompt.tolist() for prompt in prompts]),
        num_samples=1,
        seeds=np.arange(len(prompts)),
        max_tokens=np.array(RESPONSES, np.int32),
        sampling=spi.SamplingParams(temperature=1.0),
        weight_version=version,
    )
    result = generator.generate(request)
    responses = np.split(result.tokens, result.offsets[1:-1])
    sequences = [np.concatenate([prompt, response]) for prompt, response in zip(prompts, responses, strict=True)]
    expected = _expected(trainer, sequences, reference, version)
    starts = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    rows = [expected[start + len(prompt) : stop] for start, stop, prompt in zip(starts, starts[1:], prompts, strict=False)]
    tolerance = TOLERANCES.get(reference.model_type, TOLERANCE)
    _compare("log-probabilities of samples", result.logprobs, np.concatenate(rows), tolerance)


def _expected(trainer: Any | None, sequences: Sequence[np.ndarray], reference: Reference, version: int) -> np.ndarray:
    offsets = np.cumsum([0, *(len(sequence) for sequence in sequences)]).astype(np.int64)
    tokens = np.concatenate(sequences).astype(np.int32)
    batch = spi.TokenBatch(tokens=tokens, offsets=offsets, loss_mask=np.zeros(len(tokens), np.bool_))
    if trainer is not None:
        return _logprobs(trainer, [batch], version)
    with torch.no_grad():
        return reference.logprobs(batch).numpy()
