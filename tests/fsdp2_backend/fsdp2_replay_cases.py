"""What each of two ranks does to compare replayed routing with plain transformers whose routers are told the same."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_layout_cases import FLOAT32, OPTIMIZER, GradientsSeen, Layout, Place, assert_gradients
from fsdp2_support import Reference
from rank_launch import run_rows
from routing_reference import check_step, expected_of, make_mixed_model

from rlcore.spi import CloseRequest

NAME = "mixed"
LAYOUTS = (
    Layout(name="dp2", num_ranks=2),
    Layout(name="tp2", num_ranks=2, options={"tensor_parallel": 2, "sequence_parallel": False}),
    Layout(name="tp2+sp+checkpointing", num_ranks=2, options={"tensor_parallel": 2, "activation_checkpointing": True}),
    Layout(name="cp2", num_ranks=2, options={"context_parallel": 2}),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}),
)


def prepare(root: Path) -> None:
    """The model, and what plain transformers makes of routed sequences."""
    reference = Reference(make_mixed_model(root / "models" / NAME), OPTIMIZER)
    expected = expected_of(reference)
    expected["gradients"] = reference.gradients()
    torch.save(expected, root / f"{NAME}.pt")


def check(place: Place, layout: Layout) -> None:
    backend, expected = place.backend(layout, NAME), place.expected(NAME)
    seen = GradientsSeen(backend)
    check_step(backend, expected, "packed")
    assert_gradients(seen.tensors, expected["gradients"], FLOAT32)
    backend.close(CloseRequest())


def run_all(rank: int, root: Path) -> None:
    """Run the layouts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    place = Place(rank=rank, num_ranks=2, root=root)
    run_rows({layout.name: partial(check, place, layout) for layout in LAYOUTS}, root / f"results-{rank}.json")
    dist.destroy_process_group()
