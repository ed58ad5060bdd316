"""The layouts that adapters are compared in."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve
from fsdp2_support import make_config, split, step_request
from lora_cases import Layout, run_layouts
from lora_support import BATCHES, NUM_STEPS, SPEC, lora_context

from rlcore.spi import TrainerContext
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config

DROPOUT = 0.25
ONE_PROCESS = [[0], [1, 2, 3, 4, 5, 6, 7]]
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
    Layout(name="tp4", num_ranks=4, options={"tensor_parallel": 4}, architectures=("qwen2",)),
    Layout(name="dp2xtp2", num_ranks=4, options={"tensor_parallel": 2}, architectures=("qwen3", "qwen3_moe")),
    Layout(
        name="hsdp2xcp2+checkpointing+offload",
        num_ranks=4,
        options={"replicate": 2, "context_parallel": 2, "activation_checkpointing": True, "cpu_offload": True},
        architectures=("qwen2",),
    ),
)


def make(context: TrainerContext, options: Mapping[str, Any]) -> Fsdp2Backend:
    return Fsdp2Backend(context, make_config(**options))


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    run_layouts(rank, num_ranks, root, names, LAYOUTS, make)


def backend_of(root: Path, name: str, config: Fsdp2Config | None = None, **options: Any) -> Fsdp2Backend:
    spec = evolve(SPEC, **{"init_from": str(root / f"{name}-adapter")} | options)
    return Fsdp2Backend(lora_context(root / "models" / name, spec, needs_reference=True), config or make_config())


def train(backend: Fsdp2Backend, first: int = 0, last: int = NUM_STEPS) -> None:
    for version in range(first, last):
        batch = BATCHES[version]
        backend.train_step(step_request(split(batch, ONE_PROCESS), batch.counts(), version))


def trained(root: Path, name: str, config: Fsdp2Config | None = None, **options: Any) -> Fsdp2Backend:
    backend = backend_of(root, name, config, **options)
    train(backend)
    return backend
