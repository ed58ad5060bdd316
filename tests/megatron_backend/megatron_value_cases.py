"""The layouts that a head of values is compared in."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import megatron_support  # noqa: F401 - which finds the modules of the other trainer's tests
from lora_cases import Layout
from value_cases import run_layouts

from rlcore.spi import TrainerContext
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig

TENSOR, PIPELINE, CONTEXT = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}
LAYOUTS = (
    Layout(name="one", num_ranks=1, architectures=("qwen3", "qwen3_moe", "from_tokens")),
    Layout(name="tp2", num_ranks=2, options=TENSOR | {"sequence_parallel": False}, architectures=("qwen2",)),
    Layout(name="tp2+sp", num_ranks=2, options=TENSOR, architectures=("qwen3", "qwen3_moe")),
    Layout(name="pp2", num_ranks=2, options=PIPELINE, architectures=("qwen3", "from_tokens")),
    Layout(name="pp2xvpp2", num_ranks=2, options=PIPELINE | {"virtual_pipeline_parallel": 2}, architectures=("qwen2",)),
    Layout(name="dp2", num_ranks=2, architectures=("qwen3",)),
    Layout(name="cp2", num_ranks=2, options=CONTEXT, architectures=("qwen3",)),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="tp2xpp2", num_ranks=4, options=TENSOR | PIPELINE, architectures=("qwen3",)),
    Layout(name="tp2xcp2", num_ranks=4, options=TENSOR | CONTEXT, architectures=("qwen2",)),
)


def make(context: TrainerContext, options: Mapping[str, Any]) -> MegatronBackend:
    return MegatronBackend(context, MegatronConfig(collective_timeout_s=600.0, **options))


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    run_layouts(rank, num_ranks, root, names, LAYOUTS, make)
