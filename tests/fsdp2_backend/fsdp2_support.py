"""Losses, batches and the plain transformers + torch reference that the FSDP2 trainer is compared with."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from transformers import AutoModelForCausalLM

from rlcore.spi import (
    ExportWeightsRequest,
    GlobalCounts,
    LossInputs,
    LossOutput,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    RankInfo,
    ScheduleSpec,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
)
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config

VOCABULARY = 100
TEMPERATURE = 1.3


@frozen(kw_only=True)
class WeightedConfig:
    entropy_weight: float = 0.1
    scale: float = 1.0


def weighted_loss(inputs: LossInputs, config: WeightedConfig) -> LossOutput:
    """-Σ advantage·logp·weight - entropy_weight·Σ H over loss tokens, each divided by the global count."""
    counts = inputs.counts.num_loss_tokens
    lengths = inputs.offsets.diff()
    weights = torch.repeat_interleave(inputs.sequence_columns["weights"], lengths)
    mask = inputs.loss_mask.float()
    objective = (inputs.token_columns["advantages"] * weights * inputs.logprobs + config.entropy_weight * inputs.entropy) * mask
    return LossOutput(
        loss=-config.scale * objective.sum() / counts,
        sums={"tokens": mask.sum() / counts, "entropy": (inputs.entropy.detach() * mask).sum() / counts},
        maxima={"longest": lengths.max().float()},
    )


WEIGHTED = LossSpec(path="fsdp2_support:weighted_loss", config=WeightedConfig(), token_columns=("advantages",), entropy="loss")


def nan_loss(inputs: LossInputs, config: float) -> LossOutput:
    """NaN where the first token id of the batch equals `config`, so that one rank alone may be hit."""
    bad = inputs.token_columns["advantages"].max() > config
    return LossOutput(loss=inputs.logprobs.sum() * torch.where(bad, torch.nan, 1.0))


def steep_loss(inputs: LossInputs, config: None) -> LossOutput:
    """A finite loss with an infinite gradient: √x at x = 0."""
    return LossOutput(loss=(inputs.logprobs - inputs.logprobs.detach()).abs().sum().sqrt())


def raising_loss(inputs: LossInputs, config: None) -> LossOutput:
    raise ZeroDivisionError("no loss here")


class WrongOnceLater:
    """A loss that breaks its contract at its second microbatch, when the first one's gradient is held."""

    def __init__(self, returned: object) -> None:
        self.num_calls, self.returned = 0, returned


def breaking_loss(inputs: LossInputs, config: WrongOnceLater) -> LossOutput:
    config.num_calls += 1
    loss = inputs.logprobs.sum()
    return LossOutput(loss=loss) if config.num_calls == 1 else config.returned  # type: ignore[return-value]


def make_batch(seed: int = 0, num_sequences: int = 6, max_length: int = 12) -> TokenBatch:
    """Random sequences of different lengths; one has no loss token at all."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, max_length + 1, num_sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    num_tokens = int(offsets[-1])
    loss_mask = rng.random(num_tokens) < 0.7
    loss_mask[offsets[:-1]] = False
    loss_mask[offsets[0] : offsets[1]] = False
    loss_mask[-1] = True
    return TokenBatch(
        tokens=rng.integers(0, VOCABULARY, num_tokens).astype(np.int32),
        offsets=offsets,
        loss_mask=loss_mask,
        token_columns={"advantages": rng.normal(size=num_tokens).astype(np.float32)},
        sequence_columns={"weights": rng.uniform(0.5, 2.0, num_sequences).astype(np.float32)},
    )


def split(batch: TokenBatch, groups: Sequence[Sequence[int]]) -> tuple[TokenBatch, ...]:
    """Microbatches of the given sequences."""
    return tuple(batch.select(np.asarray(group, np.int64)) for group in groups)


ALPHABET = string.printable + "é"
"""With which a model has 104 tokens, so that four ranks divide them."""
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def make_config(**options: Any) -> Fsdp2Config:
    return Fsdp2Config(collective_timeout_s=600.0, **options)


def make_context(
    directory: Path,
    *,
    dtype: str = "float32",
    needs_reference: bool = False,
    reference: Path | None = None,
    optimizer: OptimizerSpec = OPTIMIZER,
    schedule: ScheduleSpec | None = None,
    **place: Any,
) -> TrainerContext:
    return TrainerContext(
        model=ModelSpec(path=str(directory), dtype=dtype),
        rank_info=RankInfo(**place),
        seed=0,
        num_train_steps=10,
        needs_reference=needs_reference or reference is not None,
        reference=None if reference is None else ModelSpec(path=str(reference), dtype=dtype),
        max_sequence_length=64,
        optimizer=optimizer,
        schedule=schedule or ScheduleSpec(),
    )


def make_backend(directory: Path, *, config: Fsdp2Config | None = None, **context: Any) -> Fsdp2Backend:
    return Fsdp2Backend(make_context(directory, **context), config or make_config())


def step_request(
    microbatches: Sequence[TokenBatch], counts: GlobalCounts, weight_version: int = 0, loss: LossSpec = WEIGHTED
) -> TrainStepRequest:
    return TrainStepRequest(
        microbatches=tuple(microbatches), counts=counts, loss=loss, temperature=TEMPERATURE, weight_version=weight_version
    )


def exported(backend: Fsdp2Backend, weight_version: int = 0, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Copies of all exported tensors."""
    request = ExportWeightsRequest(weight_version=weight_version, dtype=dtype, max_bucket_bytes=2**14)
    export = backend.export_weights(request)
    return {named.name: named.tensor.clone() for bucket in export.buckets for named in bucket.tensors}


class Reference:
    """Plain transformers, one sequence at a time, and torch's AdamW."""

    def __init__(self, directory: Path, spec: OptimizerSpec = OPTIMIZER, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
        self.spec = spec
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.ndim > 1 and not name.endswith("bias")]
        vectors = [p for name, p in named if p.ndim <= 1 or name.endswith("bias")]
        groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, fused=False, foreach=False)

    def logprobs(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [T] log-probabilities and entropies, 0.0 at first tokens."""
        logprobs, entropies = [], []
        for n in range(batch.num_sequences):
            tokens = torch.from_numpy(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]]).long()
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / TEMPERATURE
            distribution = torch.distributions.Categorical(logits=logits)
            zero = torch.zeros(1)
            logprobs.append(torch.cat([zero, distribution.log_prob(tokens[1:])]))
            entropies.append(torch.cat([zero, distribution.entropy()]))
        return torch.cat(logprobs), torch.cat(entropies)

    def backward(self, batch: TokenBatch) -> float:
        """Add the gradients of the whole batch's loss; returns the loss."""
        logprobs, entropies = self.logprobs(batch)
        advantages = torch.from_numpy(batch.token_columns["advantages"])
        weights = torch.from_numpy(np.repeat(batch.sequence_columns["weights"], batch.lengths))
        mask = torch.from_numpy(batch.loss_mask)
        terms = advantages * weights * logprobs + WEIGHTED.config.entropy_weight * entropies
        loss = -terms[mask].sum() / batch.counts().num_loss_tokens
        loss.backward()
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self, batch: TokenBatch) -> tuple[float, float]:
        """One clipped step; returns loss and the gradient's norm before clipping."""
        loss = self.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def saved(self, directory: Path) -> dict[str, torch.Tensor]:
        """What save_pretrained writes now."""
        from safetensors.torch import load_file

        self.model.save_pretrained(directory)
        return load_file(directory / "model.safetensors")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def assert_stepped_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights behind the same optimizer steps: root mean squares of differences within 0.2% of a step. Single elements may lie
    farther apart, since AdamW makes a part of a step of the rounding of a gradient next to nothing."""
    assert found.keys() == expected.keys()
    distances = {name: (found[name] - tensor).square().mean().sqrt().item() for name, tensor in expected.items()}
    assert max(distances.values()) <= 2e-3 * OPTIMIZER.learning_rate, distances
