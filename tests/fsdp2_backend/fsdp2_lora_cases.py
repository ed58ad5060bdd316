"""The layouts that adapters are compared in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2_support import make_config
from lora_cases import Layout, run_layouts

from rlcore.spi import TrainerContext
from rlcore_fsdp2.backend import Fsdp2Backend

DROPOUT = 0.25
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


def make(context: TrainerContext, options: Mapping[str, Any]) -> Fsdp2Backend:
    return Fsdp2Backend(context, make_config(**options))


def run_all(rank: int, num_ranks: int, root: Path) -> None:
    run_layouts(rank, num_ranks, root, LAYOUTS, make)
