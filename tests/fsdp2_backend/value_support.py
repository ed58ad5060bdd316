"""Models of values: a loss, and plain transformers in float64 with torch's AdamW, which both trainers are compared with."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from fsdp2_support import OPTIMIZER as COMMON
from fsdp2_support import make_batch
from lora_support import EAGER
from transformers import AutoModelForSequenceClassification

from rlcore.spi import LossInputs, LossOutput, LossSpec, ModelSpec, RankInfo, TokenBatch, TrainerContext, TrainStepRequest

NUM_STEPS = 3
NUM_SEQUENCES = 8
OPTIMIZER = evolve(COMMON, learning_rate=2e-4)
BATCHES = tuple(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=11) for seed in range(NUM_STEPS))
WEIGHT = 2e-5
"""Most difference of any element of a weight: Adam divides gradients of rounding alone by their own size."""
VALUE = 1e-5


def value_loss(inputs: LossInputs, config: None) -> LossOutput:
    """Σ w (value - advantage)² / 2 over loss tokens, and the sum of the last tokens' values, divided by the global counts."""
    lengths, mask = inputs.offsets.diff(), inputs.loss_mask.float()
    weights = torch.repeat_interleave(inputs.sequence_columns["weights"], lengths)
    errors = (inputs.values - inputs.token_columns["advantages"]) ** 2 / 2
    lasts = inputs.values[inputs.offsets[1:] - 1].sum() / inputs.counts.num_loss_sequences
    loss = (mask * weights * errors).sum() / inputs.counts.num_loss_tokens + lasts
    return LossOutput(loss=loss, sums={"value": (mask * inputs.values.detach()).sum() / inputs.counts.num_loss_tokens})


LOSS = LossSpec(path="value_support:value_loss", config=None, token_columns=("advantages",))


def value_context(directory: Path, **options: Any) -> TrainerContext:
    """`options` are fields of the context, and of the rank."""
    place = {name: options.pop(name) for name in ("rank", "world_size", "local_rank", "rendezvous") if name in options}
    return TrainerContext(
        model=ModelSpec(path=str(directory)),
        rank_info=RankInfo(**place),
        seed=0,
        num_train_steps=10,
        needs_reference=False,
        max_sequence_length=64,
        optimizer=OPTIMIZER,
        head="value",
        **options,
    )


def value_request(microbatches: Any, counts: Any, weight_version: int) -> TrainStepRequest:
    return TrainStepRequest(
        microbatches=tuple(microbatches), counts=counts, loss=LOSS, temperature=0.7, weight_version=weight_version
    )


class ValueReference:
    """Plain transformers, one sequence at a time, in float64."""

    def __init__(self, directory: Path) -> None:
        options: dict[str, Any] = {"num_labels": 1, "dtype": torch.float64, **EAGER}
        self.model, report = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True, **options)
        if "score.weight" in report["missing_keys"]:
            torch.nn.init.zeros_(self.model.score.weight)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, fused=False, foreach=False)

    def values(self, batch: TokenBatch) -> torch.Tensor:
        """float64 [T]"""
        found = []
        for n in range(batch.num_sequences):
            tokens = torch.from_numpy(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]]).long()
            found.append(self.model.score(self.model.model(input_ids=tokens[None]).last_hidden_state[0])[:, 0])
        return torch.cat(found)

    def backward(self, batch: TokenBatch) -> float:
        """Add the gradients of the whole batch's loss; returns the loss."""
        values, mask = self.values(batch), torch.from_numpy(batch.loss_mask)
        weights = torch.from_numpy(np.repeat(batch.sequence_columns["weights"], batch.lengths)).double()
        errors = weights * (values - torch.from_numpy(batch.token_columns["advantages"])) ** 2 / 2
        counts = batch.counts()
        lasts = values[torch.from_numpy(batch.offsets[1:] - 1)].sum() / counts.num_loss_sequences
        loss = errors[mask].sum() / counts.num_loss_tokens + lasts
        loss.backward()
        return loss.item()

    def step(self, batch: TokenBatch) -> tuple[float, float]:
        """One clipped step; returns loss and the gradient's norm before clipping."""
        loss = self.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def saved(self, directory: Path) -> dict[str, torch.Tensor]:
        """What save_pretrained writes now."""
        from safetensors.torch import load_file

        self.model.save_pretrained(directory)
        return load_file(directory / "model.safetensors")
