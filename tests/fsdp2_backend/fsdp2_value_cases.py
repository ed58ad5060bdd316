"""The layouts that a head of values is compared in."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fsdp2_support import make_config
from lora_cases import Layout
from value_cases import run_layouts

from rlcore.spi import TrainerContext
from rlcore_fsdp2.backend import Fsdp2Backend

TENSOR, CONTEXT = {"tensor_parallel": 2}, {"context_parallel": 2}
LAYOUTS = (
    Layout(name="dp2", num_ranks=2, architectures=("qwen3", "from_tokens")),
    Layout(name="tp2", num_ranks=2, options=TENSOR | {"sequence_parallel": False}, architectures=("qwen2",)),
    Layout(name="tp2+sp", num_ranks=2, options=TENSOR, architectures=("qwen3", "qwen3_moe", "from_tokens")),
    Layout(name="cp2", num_ranks=2, options=CONTEXT, architectures=("qwen3",)),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="tp2xcp2", num_ranks=4, options=TENSOR | CONTEXT, architectures=("qwen2",)),
    Layout(
        name="hsdp2x2+checkpointing+offload",
        num_ranks=4,
        options={"replicate": 2, "activation_checkpointing": True, "cpu_offload": True},
        architectures=("qwen3",),
    ),
    Layout(name="dp2xtp2", num_ranks=4, options=TENSOR, architectures=("qwen3_moe",)),
)


def make(context: TrainerContext, options: Mapping[str, Any]) -> Fsdp2Backend:
    return Fsdp2Backend(context, make_config(**options))


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    run_layouts(rank, num_ranks, root, names, LAYOUTS, make)
