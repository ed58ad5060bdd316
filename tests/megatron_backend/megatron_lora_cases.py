"""The layouts that adapters are compared in."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import megatron_support  # noqa: F401 - which finds the modules of the other trainer's tests
from fsdp2_lora_cases import DROPOUT
from lora_cases import Layout, run_layouts
from megatron_families import WITH_ADAPTERS

from rlcore.spi import TrainerContext
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig

TENSOR, PIPELINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
DROPPING = ("qwen3", "deepseek_v3")
LAYOUTS = (
    Layout(
        name="one+recompute",
        num_ranks=1,
        options={"recompute": "full"},
        architectures=("qwen2", "qwen3", "qwen3_moe", *WITH_ADAPTERS),
    ),
    Layout(name="tp2", num_ranks=2, options=TENSOR | {"sequence_parallel": False}, architectures=("qwen2",)),
    Layout(name="tp2+sp", num_ranks=2, options=TENSOR, architectures=("qwen2", "qwen3", *WITH_ADAPTERS)),
    Layout(name="tp2+sp+recompute", num_ranks=2, options=TENSOR | {"recompute": "full"}, architectures=("qwen3_moe",)),
    Layout(name="pp2", num_ranks=2, options=PIPELINE, architectures=("qwen3", "qwen3_moe")),
    Layout(name="pp2xvpp2", num_ranks=2, options=PIPELINE | {"virtual_pipeline_parallel": 2}, architectures=("qwen2",)),
    Layout(name="dp2", num_ranks=2, architectures=("qwen3",)),
    Layout(name="cp2", num_ranks=2, options={"context_parallel": 2}, architectures=("qwen3",)),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="one+dropout", num_ranks=1, options={"recompute": "full"}, architectures=DROPPING, dropout=DROPOUT),
    Layout(name="tp2+sp+dropout", num_ranks=2, options=TENSOR | {"recompute": "full"}, architectures=DROPPING, dropout=DROPOUT),
    Layout(name="pp2+dropout", num_ranks=2, options=PIPELINE, architectures=("qwen3",), dropout=DROPOUT),
    Layout(name="tp4", num_ranks=4, options={"tensor_parallel": 4, "sequence_parallel": False}, architectures=("qwen2",)),
    Layout(name="tp4+sp", num_ranks=4, options={"tensor_parallel": 4}, architectures=("qwen3",)),
    Layout(name="tp2xpp2", num_ranks=4, options=TENSOR | PIPELINE, architectures=("qwen3",)),
)


def make(context: TrainerContext, options: Mapping[str, Any]) -> MegatronBackend:
    return MegatronBackend(context, MegatronConfig(collective_timeout_s=600.0, **options))


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    run_layouts(rank, num_ranks, root, names, LAYOUTS, make)
