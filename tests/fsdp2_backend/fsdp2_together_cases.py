"""The cases of several ranks that compare adapters together with those by turns, in one layout after another."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from fsdp2_support import WEIGHTED, make_config
from lora_support import OPTIMIZER, SPEC, lora_context
from rank_launch import run_rows
from together_support import LIKELIHOOD, Round, assert_close, assert_same_tensors, play, random_piece, saved

from rlcore.spi import CloseRequest
from rlcore_fsdp2.backend import Fsdp2Backend

CALM = evolve(OPTIMIZER, eps=1e-2)
"""An optimizer by which the rounding of a gradient next to nothing stays that small in weights."""
SEEDS = {"": 1, "a": 2, "b": 3}
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "sharded": ("qwen3", {}),
        "sharded+checkpointing": ("qwen3", {"activation_checkpointing": True}),
        "replicas+offload": ("qwen3", {"replicate": 2, "cpu_offload": True}),
        "experts": ("qwen3_moe", {"expert_parallel": 2}),
        "tensor": ("qwen3", {"tensor_parallel": 2}),
        "context": ("qwen3", {"context_parallel": 2}),
    },
}
"""Family and options of each layout, by its number of ranks."""


def run_all(rank: int, num_ranks: int, root: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    rows = {name: partial(compare, rank, root, name, *layout) for name, layout in LAYOUTS[num_ranks].items()}
    run_rows(rows, results_file(root, num_ranks, rank))
    dist.destroy_process_group()


def results_file(root: Path, num_ranks: int, rank: int) -> Path:
    return root / f"results-{num_ranks}-{rank}.json"


def compare(rank: int, root: Path, name: str, family: str, options: Mapping[str, Any]) -> None:
    """Each data-parallel rank has microbatches of other lengths, as many as the others."""
    found = {}
    for together in (True, False):
        place = {"rank": rank, "world_size": 2, "local_rank": rank, "rendezvous": "env://"}
        context = lora_context(root / "models" / family, evolve(SPEC, dropout=0.25), optimizer=CALM, **place)
        backend = Fsdp2Backend(evolve(context, max_microbatch_tokens=30), make_config(**options))
        figures = play(backend, rounds_of(backend.layout.data_parallel_rank), SEEDS, together=together)
        directory = root / f"{name}-{together}-{rank}"
        found[together] = figures, {one: saved(backend, one, directory / (one or "first")) for one in SEEDS}
        backend.close(CloseRequest())
    assert_close(found[True][0], found[False][0])
    for one in SEEDS:
        assert_same_tensors(found[True][1][one], found[False][1][one], 1e-6)


def rounds_of(data_rank: int) -> list[Round]:
    rounds = []
    for number in range(4):
        pieces = {}
        for place, name in enumerate(SEEDS):
            loss = LIKELIHOOD if name == "b" else WEIGHTED
            piece = random_piece(100 * data_rank + 10 * number + place, num_microbatches=1 + place, loss=loss)
            pieces[name] = evolve(piece, counts=random_piece(10 * number + place, num_microbatches=1 + place).counts)
        if number == 1:
            del pieces["a"]
        rounds.append(Round(pieces=pieces, updates=tuple(SEEDS) if number % 2 else ()))
    return rounds
