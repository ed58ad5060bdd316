"""Backends of the Megatron trainer, and the same steps by plain transformers and torch in one process."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "fsdp2_backend"))  # spawned workers import this file first

import numpy as np
import torch
import torch.distributed as dist
from fsdp2_support import (
    OPTIMIZER,
    TEMPERATURE,
    VOCABULARY,
    WEIGHTED,
    Reference,
    exported,
    make_batch,
    make_context,
    split,
    step_request,
)
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, LossSpec, TokenBatch
from rlcore.torchkit.losses import evaluate
from rlcore.torchkit.microbatch import move
from rlcore_grpo.config import GrpoConfig
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.cpu_shim import cuda_or_cpu
from rlcore_megatron.model import unwrapped

__all__ = [
    "GRPO",
    "OPTIMIZER",
    "TEMPERATURE",
    "WEIGHTED",
    "GradientsSeen",
    "Reference",
    "auxiliary_backward",
    "even_batch",
    "exported",
    "grpo_batch",
    "in_files",
    "make_backend",
    "make_batch",
    "make_context",
    "reference_backward",
    "split",
    "step_request",
]

GRPO = LossSpec(
    path="rlcore_grpo.loss:grpo_loss",
    config=GrpoConfig(previous_logprobs="generation", importance_correction="none"),
    token_columns=(ADVANTAGES, GENERATION_LOGPROBS),
    entropy="metric",
)


def make_backend(directory: Path, *, config: MegatronConfig | None = None, **context: Any) -> MegatronBackend:
    return MegatronBackend(make_context(directory, **context), config or MegatronConfig(collective_timeout_s=180.0))


def grpo_batch(batch: TokenBatch, seed: int = 0) -> TokenBatch:
    """With log-probabilities of generation that are near any model's of this size, so that the objective clips some."""
    rng = np.random.default_rng(seed)
    logprobs = (-4.6 + 0.5 * rng.normal(size=batch.num_tokens)).astype(np.float32)
    return batch.with_token_column(GENERATION_LOGPROBS, np.where(batch.loss_mask, logprobs, np.float32(0.0)))


def reference_backward(reference: Reference, batch: TokenBatch, loss: LossSpec) -> float:
    """Add up the gradients of the whole batch's loss, with log-probabilities by plain transformers; returns the loss."""
    logprobs, entropies = reference.logprobs(batch)
    if loss.entropy == "metric":
        entropies = entropies.detach()
    microbatch = move(batch, torch.device("cpu"), loss.token_columns)
    output = evaluate(loss, microbatch, logprobs, entropies, batch.counts())
    output.loss.backward()
    return output.loss.item()


def even_batch(seed: int) -> TokenBatch:
    """Eight sequences of eight tokens: nothing is padded, whatever ranks share it."""
    rng = np.random.default_rng(seed)
    loss_mask = np.ones((8, 8), np.bool_)
    loss_mask[:, 0] = False
    return TokenBatch(
        tokens=rng.integers(0, VOCABULARY, 64).astype(np.int32),
        offsets=np.arange(0, 65, 8),
        loss_mask=loss_mask.reshape(-1),
        token_columns={ADVANTAGES: rng.normal(size=64).astype(np.float32)},
        sequence_columns={"weights": rng.uniform(0.5, 2.0, 8).astype(np.float32)},
    )


def auxiliary_backward(reference: Reference, microbatches: Sequence[TokenBatch], balancing: float, z: float) -> float:
    """Add up the gradients of Σ_microbatches share · Σ_layers (balancing · E Σ_e f_e p_e + z · mean logsumexp²), and return the
    mean of E Σ_e f_e p_e over layers and microbatches.

    f_e is expert e's share of the tokens' choices, p_e its mean probability, `share` the microbatch's share of all tokens
    (arXiv:2101.03961, equation 4; arXiv:2202.08906, equation 5).
    """
    config = reference.model.config
    total, losses, balances = sum(batch.num_tokens for batch in microbatches), [], []
    for batch in microbatches:
        tokens = torch.from_numpy(batch.tokens).long().view(batch.num_sequences, -1)
        output = reference.model(input_ids=tokens, use_cache=False, output_router_logits=True)
        for logits in output.router_logits:
            chosen = logits.topk(config.num_experts_per_tok).indices
            frequencies = torch.nn.functional.one_hot(chosen, config.num_experts).float().mean((0, 1))
            balance = config.num_experts * (frequencies * logits.softmax(-1).mean(0)).sum()
            share = batch.num_tokens / total
            losses.append(share * (balancing * balance + z * logits.logsumexp(-1).square().mean()))
            balances.append(balance.item())
    torch.stack(losses).sum().backward()
    return sum(balances) / len(balances)


def in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names, and in the shapes, of the model's files: transformers fuses experts when it loads them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found |= revert_weight_conversion(model, {name: tensor})
    return found


class GradientsSeen:
    """The whole gradients of a backend's last step, before clipping, by Hugging Face names."""

    def __init__(self, backend: MegatronBackend) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        update = backend._update

        def see(norm: float) -> float:
            with cuda_or_cpu():
                self.tensors = gradients(backend)
            return update(norm)

        backend._update = see


def gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Exported as weights are: each parameter is lent its gradient for as long as that takes."""
    for model in backend._models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            for bucket in buffer.buckets:
                gather_reduced(bucket, buffer.data_parallel_group)
    lent: Mapping[Any, torch.Tensor] = {
        parameter: parameter.data for model in unwrapped(backend._models) for parameter in model.parameters()
    }
    for parameter in lent:
        parameter.data = parameter.main_grad.to(parameter.dtype)
    try:
        return exported(backend, backend._weight_version)
    finally:
        for parameter, data in lent.items():
            parameter.data = data


def gather_reduced(bucket: Any, group: dist.ProcessGroup) -> None:
    """Each rank of the group holds its part of a bucket's reduced gradients; give every rank all of them."""
    if group.size() > 1:
        parts = list(bucket.grad_data.chunk(group.size()))
        dist.all_gather(parts, parts[group.rank()].clone(), group=group)
