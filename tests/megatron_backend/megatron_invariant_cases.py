"""Steps by batch-invariant kernels on one rank and on two, which the ranks write down for test_invariant_model."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from fsdp2_support import TEMPERATURE
from megatron_support import GradientsSeen, make_backend, make_batch, split, step_request

from rlcore.spi import CloseRequest, LogprobsRequest
from rlcore_megatron.setup.config import MegatronConfig

GROUPS = [[4, 0], [1, 5, 3], [2]]
ONE_RANK: dict[str, Any] = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "sequence_parallel": False}


def computed(directory: Path, dtype: str, place: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Log-probabilities as a request gives them, those of a step, its loss and gradients."""
    config = MegatronConfig(collective_timeout_s=600.0, **ONE_RANK | options)
    backend = make_backend(directory, config=config, dtype=dtype, **place or {})
    batch, seen = make_batch(max_length=40), GradientsSeen(backend)
    request = LogprobsRequest(
        microbatches=split(batch, GROUPS), model="policy", temperature=TEMPERATURE, entropy=True, weight_version=0
    )
    before = backend.get_logprobs(request).logprobs
    result = backend.train_step(evolve(step_request(split(batch, GROUPS), batch.counts()), logprobs=True))
    assert result.logprobs is not None
    found = {"before": before, "step": result.logprobs, "loss": result.loss, "gradients": seen.tensors}
    found["modules"] = {type(module).__name__ for module in backend.models[0].modules()}
    backend.close(CloseRequest())
    return found


def run_on_two(rank: int, directory: Path, root: Path) -> None:
    """Steps of two tensor ranks, of which each computes all log-probabilities."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    place = {"rank": rank, "world_size": 2, "local_rank": rank, "rendezvous": "env://"}
    options = {"batch_invariant": True, "batch_invariant_parts": 2, "tensor_parallel": 2}
    found = {dtype: computed(directory, dtype, place, **options) for dtype in ("float32", "bfloat16")}
    torch.save(found, root / f"found-{rank}.pt")
    dist.destroy_process_group()
