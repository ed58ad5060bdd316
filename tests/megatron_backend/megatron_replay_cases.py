"""What each of two ranks does to compare replayed routing with plain transformers whose routers are told the same."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron_layout_cases import FLOAT32, SPEC, Layout, Place, assert_elements
from megatron_support import GradientsSeen, Reference, in_files
from rank_launch import run_rows
from routing_reference import check_step, expected_of, make_mixed_model

from rlcore.spi import CloseRequest

NAME = "mixed"


@frozen(kw_only=True)
class Case:
    """A layout of two ranks, and how its sequences are packed."""

    layout: Layout
    form: str


def _case(name: str, form: str, **options: Any) -> Case:
    return Case(layout=Layout(name=name, num_ranks=2, options=options), form=form)


CASES = (
    _case("tp2+sp+recompute", "packed", tensor_parallel=2, recompute="full"),
    _case("cp2", "packed", context_parallel=2),
    _case("dp2", "packed"),
    _case("ep2", "packed", expert_parallel=2),
    # A stage computes other microbatches between one's forward pass and its backward pass.
    _case("pp2+recompute", "unpacked", pipeline_parallel=2, recompute="full"),
    _case("pp2xvpp2", "packed", pipeline_parallel=2, virtual_pipeline_parallel=2),
    _case("pp2xvpp2+recompute", "unpacked", pipeline_parallel=2, virtual_pipeline_parallel=2, recompute="full"),
)


def prepare(root: Path) -> None:
    """The model, and what plain transformers makes of routed sequences."""
    reference = Reference(make_mixed_model(root / "models" / NAME), SPEC)
    expected = expected_of(reference)
    expected["gradients"] = in_files(reference.model, reference.gradients())
    torch.save(expected, root / f"{NAME}-weighted.pt")


def check(place: Place, case: Case) -> None:
    expected = place.expected(NAME, "unpacked")
    backend = place.backend(case.layout, NAME)
    seen = GradientsSeen(backend)
    check_step(backend, expected, case.form)
    assert_elements(seen.tensors, expected["gradients"], FLOAT32)
    backend.close(CloseRequest())


def run_all(rank: int, root: Path) -> None:
    """Run the cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    place = Place(rank=rank, num_ranks=2, root=root)
    run_rows({case.layout.name: partial(check, place, case) for case in CASES}, root / f"results-{rank}.json")
    dist.destroy_process_group()
