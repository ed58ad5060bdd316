"""Ranks in processes of their own, forked from one that has imported what they need."""

from collections.abc import Callable
from typing import Any

import torch

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama")
IMPORTED = (
    *(f"transformers.models.{architecture}.modeling_{architecture}" for architecture in ARCHITECTURES),
    "fsdp2_context_parallel_cases",
    "fsdp2_experts_cases",
    "fsdp2_layout_cases",
    "fsdp2_load_cases",
    "fsdp2_replay_cases",
    "fsdp2_two_rank_cases",
    "megatron_checkpoint_cases",
    "megatron_layout_cases",
    "megatron_replay_cases",
    "megatron_weights_cases",
    "rank_launch_frozen",
)
"""By the server that ranks are forked from; those that cannot be found there are left out. Nothing that imports vLLM, which
replaces parts of torch."""


def launch(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Call `function(rank, *arguments)` on each rank. What one raises ends the others, and is raised here.

    The server imports when it starts, once in a test process: what is needed later has to be in the list from the beginning.
    """
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    torch.multiprocessing.start_processes(function, arguments, nprocs=num_ranks, start_method="forkserver")
