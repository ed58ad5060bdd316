"""What each rank does to compare adapters in a layout with one process."""

import json
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from fsdp2_support import TEMPERATURE, exported, make_config, split, step_request
from lora_support import BATCHES, NUM_SEQUENCES, NUM_STEPS, SPEC, assert_adapters, lora_context
from safetensors.torch import load_file
from torch import Tensor

from rlcore.spi import CloseRequest, LogprobsRequest, SaveStateRequest, TokenBatch
from rlcore_fsdp2.backend import Fsdp2Backend

SAVE_AFTER = 2
DROPOUT = 0.25


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(factory=dict)
    """Of `[trainer.fsdp2]`."""
    architectures: tuple[str, ...]
    dropout: float = 0.0
    """Where it is not 0, the microbatches are those of one process."""


LAYOUTS = (
    Layout(name="dp2", num_ranks=2, architectures=("qwen3", "qwen3_moe")),
    Layout(
        name="tp2",
        num_ranks=2,
        options={"tensor_parallel": 2, "sequence_parallel": False},
        architectures=("qwen2", "qwen3_moe"),
    ),
    Layout(name="tp2+sp", num_ranks=2, options={"tensor_parallel": 2}, architectures=("qwen2", "qwen3")),
    Layout(
        name="tp2+sp+checkpointing+dropout",
        num_ranks=2,
        options={"tensor_parallel": 2, "activation_checkpointing": True},
        architectures=("qwen3",),
        dropout=DROPOUT,
    ),
    Layout(name="cp2", num_ranks=2, options={"context_parallel": 2}, architectures=("qwen3",)),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="dp2xtp2", num_ranks=4, options={"tensor_parallel": 2}, architectures=("qwen3", "qwen3_moe")),
    Layout(
        name="hsdp2xcp2+checkpointing+offload",
        num_ranks=4,
        options={"replicate": 2, "context_parallel": 2, "activation_checkpointing": True, "cpu_offload": True},
        architectures=("qwen2",),
    ),
)


def cases(num_ranks: int) -> list[str]:
    return [f"{layout.name}/{name}" for layout in LAYOUTS if layout.num_ranks == num_ranks for name in layout.architectures]


@cache
def expected(root: Path, name: str) -> Mapping[str, Tensor]:
    return load_file(root / f"{name}.safetensors")


def run_all(rank: int, num_ranks: int, root: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    results = {}
    for layout in LAYOUTS:
        for architecture in layout.architectures if layout.num_ranks == num_ranks else ():
            try:
                _check(rank, root, layout, architecture)
                results[f"{layout.name}/{architecture}"] = ""
            except Exception:
                results[f"{layout.name}/{architecture}"] = traceback.format_exc()
            dist.barrier()
    (root / f"results-{num_ranks}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _check(rank: int, root: Path, layout: Layout, architecture: str) -> None:
    """Nothing is asserted before the last collective: a rank that left would leave the others waiting."""
    spec = evolve(SPEC, init_from=str(root / f"{architecture}-adapter"), dropout=layout.dropout)
    place = {"rank": rank, "world_size": layout.num_ranks, "local_rank": rank, "rendezvous": "env://"}
    context = lora_context(root / "models" / architecture, spec, needs_reference=True, **place)
    backend = Fsdp2Backend(context, make_config(**layout.options))
    directory = root / f"{layout.name}-{architecture}"
    before = [_logprobs(backend, model, 0) for model in ("policy", "reference")]
    for version in range(NUM_STEPS):
        if version == SAVE_AFTER:
            _save(backend, directory / "resume", "resume")
        batch = BATCHES[version]
        backend.train_step(step_request(_share(batch, backend), batch.counts(), version))
    reference = _logprobs(backend, "reference", NUM_STEPS)
    merged = exported(backend, NUM_STEPS)
    _save(backend, directory / "peft", "peft")
    backend.close(CloseRequest())
    key = f"{architecture}-dropout" if layout.dropout else architecture
    assert_adapters(load_file(directory / "peft" / "adapter_model.safetensors"), expected(root, key))
    if not layout.dropout:
        weights = expected(root, f"{architecture}-merged")
        assert_adapters({name: merged[name] for name in weights}, weights)
    assert max(float(np.abs(after - initial).max()) for after, initial in zip(reference, before[1], strict=True)) == 0.0
    assert max(float(np.abs(policy - base).max()) for policy, base in zip(*before, strict=True)) > 0.01


def _share(batch: TokenBatch, backend: Fsdp2Backend) -> tuple[TokenBatch, ...]:
    """Two packed microbatches of the data-parallel rank's sequences; of one that is alone, those of one process."""
    rank, size = backend.layout.data_parallel_rank, backend.layout.data_parallel_size
    mine = list(range(rank, NUM_SEQUENCES, size))
    return split(batch, [mine[:1], mine[1:]])


def _logprobs(backend: Fsdp2Backend, model: str, version: int) -> tuple[np.ndarray, ...]:
    request = LogprobsRequest(
        microbatches=_share(BATCHES[0], backend), model=model, temperature=TEMPERATURE, entropy=False, weight_version=version
    )
    return backend.get_logprobs(request).logprobs


def _save(backend: Fsdp2Backend, directory: Path, kind: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(SaveStateRequest(directory=directory, kind=kind))
    dist.barrier()
