"""Backends of the Megatron trainer, and the same steps by plain transformers and torch in one process."""

import sys
from collections.abc import Callable, Mapping, Sequence
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
from megatron_families import FIXED, FROZEN
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, ExportWeightsRequest, LossSpec, TokenBatch
from rlcore_grpo.config import GrpoConfig
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.modules.model import unwrapped
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_torchkit.trainer.losses import evaluate
from rlcore_torchkit.trainer.microbatch import move

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
    "saved",
    "split",
    "step_request",
]

GRPO = LossSpec(
    path="rlcore_torchkit.rl.policy_gradient:policy_gradient_loss",
    config=GrpoConfig(previous_logprobs="generation", importance_correction="none"),
    token_columns=(ADVANTAGES, GENERATION_LOGPROBS),
    entropy="metric",
)


def make_backend(directory: Path, *, config: MegatronConfig | None = None, **context: Any) -> MegatronBackend:
    return MegatronBackend(make_context(directory, **context), config or MegatronConfig(collective_timeout_s=600.0))


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


def auxiliary_backward(
    reference: Reference, rounds: Sequence[Sequence[TokenBatch]], coefficients: Mapping[str, float]
) -> dict[str, float]:
    """Add up the gradients of Σ coefficient · loss over the metrics of the router's losses; returns their means over layers.

    A round is the microbatches that data-parallel ranks compute at a time. With f_e expert e's share of the choices of some
    tokens, and p_e(t) a token's probability of it, a loss is the mean over all tokens of E Σ_e f_e p_e(t)
    (arXiv:2101.03961, equation 4), where f_e is of the microbatch, of the sequence, or of all rounds so far
    (arXiv:2501.11873); and of logsumexp(logits)² (arXiv:2202.08906, equation 5).
    """
    config, seen = reference.model.config, 0.0
    total = sum(batch.num_tokens for microbatches in rounds for batch in microbatches)
    sums = dict.fromkeys(coefficients, torch.zeros(()))
    for microbatches in rounds:
        found = [router_logits(reference, batch) for batch in microbatches]
        counts = [[_choices(logits, config.num_experts_per_tok) for logits in sequences] for sequences in found]
        seen = seen + sum(chosen for batch in counts for chosen in batch)
        for sequences, choices in zip(found, counts, strict=True):
            for logits, own in zip(sequences, choices, strict=True):
                frequencies = {"load_balancing_loss": sum(choices), "seq_load_balancing_loss": own}
                frequencies["global_load_balancing_loss"] = seen
                for name, chosen in frequencies.items():
                    shares = (chosen / chosen.sum(-1, keepdim=True))[:, None]
                    sums[name] = sums[name] + config.num_experts * (shares * logits.softmax(-1)).sum() / total
                sums["z_loss"] = sums["z_loss"] + logits.logsumexp(-1).square().sum() / total
    torch.stack([coefficients[name] * value for name, value in sums.items()]).sum().backward()
    return {name: value.item() / len(found[0][0]) for name, value in sums.items()}


def router_logits(reference: Reference, batch: TokenBatch) -> list[torch.Tensor]:
    """float32 [layers, tokens, experts] of each sequence."""
    sequences = np.split(batch.tokens, batch.offsets[1:-1])
    inputs = [torch.from_numpy(tokens).long()[None] for tokens in sequences]
    outputs = [reference.model(input_ids=tokens, use_cache=False, output_router_logits=True) for tokens in inputs]
    return [torch.stack([logits.view(-1, logits.shape[-1]) for logits in output.router_logits]) for output in outputs]


def _choices(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """float64 [layers, experts]: how often each is chosen."""
    chosen = logits.topk(top_k).indices
    return torch.nn.functional.one_hot(chosen, logits.shape[-1]).sum((1, 2)).double()


def in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names, and in the shapes, of the model's files: transformers fuses experts when it loads them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found |= revert_weight_conversion(model, {name: tensor})
    return found


class GradientsSeen:
    """The whole gradients of a backend's last step, before clipping, by Hugging Face names."""

    def __init__(self, backend: MegatronBackend, read: Callable[..., dict[str, torch.Tensor]] = exported) -> None:
        """`read` takes backend and version: `exported`, or `saved`."""
        self.tensors: dict[str, torch.Tensor] = {}
        update = backend.update

        def see(*arguments: Any) -> float:
            with cuda_or_cpu():
                self.tensors = gradients(backend, read)
            return update(*arguments)

        backend.update = see


def saved(backend: MegatronBackend, weight_version: int = 0) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the files that the backend saves."""
    request = ExportWeightsRequest(weight_version=weight_version, dtype="float32", max_bucket_bytes=2**14)
    return {named.name: named.tensor.clone() for bucket in backend.export_whole(request).buckets for named in bucket.tensors}


def gradients(backend: MegatronBackend, read: Callable[..., dict[str, torch.Tensor]] = exported) -> dict[str, torch.Tensor]:
    """Exported as weights are: each parameter is lent its gradient for as long as that takes."""
    for model in backend.models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            for bucket in buffer.buckets:
                gather_reduced(bucket, buffer.data_parallel_group)
    lent: Mapping[Any, torch.Tensor] = {
        parameter: parameter.data
        for model in unwrapped(backend.models)
        for parameter in model.parameters()
        if parameter.requires_grad
    }
    for parameter in lent:
        parameter.data = parameter.main_grad.to(parameter.dtype)
    try:
        found = read(backend, backend.weight_version).items()
        return {name: tensor for name, tensor in found if not name.endswith(FIXED) and FROZEN not in name}
    finally:
        for parameter, data in lent.items():
            parameter.data = data


def gather_reduced(bucket: Any, group: dist.ProcessGroup) -> None:
    """Each rank of the group holds its part of a bucket's reduced gradients; give every rank all of them."""
    if group.size() > 1:
        parts = list(bucket.grad_data.chunk(group.size()))
        dist.all_gather(parts, parts[group.rank()].clone(), group=group)
