"""What each rank does to compare `[optimizer]` in a layout with one process: LAYOUTS is the table, of two and of four ranks."""

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from comparing import Comparing
from fsdp2_support import ALPHABET, exported, make_backend, make_batch, make_config, split, step_request
from optimizer_reference import OptimizerReference, differences, use_exact_iterations
from rank_launch import run_rows
from torch import Tensor

from rlcore.spi import CloseRequest, LoadStateRequest, MuonSpec, OptimizerGroup, OptimizerSpec, SaveStateRequest
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_torchkit.testing.models import make_model

NUM_STEPS, SAVE_AFTER, NUM_SEQUENCES = 3, 2, 8
BASE = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
SPECS: Mapping[str, OptimizerSpec] = {
    "muon": OptimizerSpec(
        name="muon",
        groups=(
            OptimizerGroup(parameters=("*.mlp.gate.weight", "*.layers.0.*.k_proj.weight"), name="adamw", weight_decay=0.0),
            OptimizerGroup(parameters=("model.embed_tokens.weight",), learning_rate=5e-4, betas=(0.8, 0.9)),
            OptimizerGroup(parameters=("*.layers.1.*",), learning_rate=2e-3),
        ),
        **BASE,
    ),
    "muon+8bit": OptimizerSpec(name="muon", moments="8bit", muon=MuonSpec(scale="original", nesterov=False), **BASE),
    "8bit": OptimizerSpec(moments="8bit", **BASE),
}
DENSE = {**SPECS, "muon": OptimizerSpec(name="muon", groups=SPECS["muon"].groups[1:], **BASE)}
"""The same for models without routers."""
BOUNDS = {"muon": 2e-3, "muon+8bit": 0.04, "8bit": 0.04}
"""Largest root mean square that a tensor may be apart, as a share of what it has moved by. A moment of 8 bits that rounding
lifts to the next code changes by up to 12%."""


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(factory=dict)
    """Of `[trainer.fsdp2]`."""
    architectures: tuple[str, ...]


LAYOUTS = (
    Layout(name="dp2", num_ranks=2, architectures=("qwen3", "qwen3_moe")),
    Layout(name="tp2", num_ranks=2, options={"tensor_parallel": 2}, architectures=("qwen3", "qwen3_moe")),
    Layout(
        name="tp2+offload",
        num_ranks=2,
        options={"tensor_parallel": 2, "sequence_parallel": False, "cpu_offload": True},
        architectures=("qwen3",),
    ),
    Layout(name="cp2", num_ranks=2, options={"context_parallel": 2}, architectures=("qwen3",)),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="hsdp2x2", num_ranks=4, options={"replicate": 2}, architectures=("qwen3_moe",)),
    Layout(name="dp2xtp2", num_ranks=4, options={"tensor_parallel": 2}, architectures=("qwen3", "qwen3_moe")),
    Layout(name="tp4", num_ranks=4, options={"tensor_parallel": 4}, architectures=("qwen3",)),
    Layout(name="dp2xcp2", num_ranks=4, options={"context_parallel": 2}, architectures=("qwen3",)),
    Layout(name="dp2xep2", num_ranks=4, options={"expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="tp2xep2", num_ranks=4, options={"tensor_parallel": 2, "expert_parallel": 2}, architectures=("qwen3_moe",)),
    Layout(name="hsdp2xtp2", num_ranks=4, options={"replicate": 2, "tensor_parallel": 2}, architectures=("qwen3",)),
)
BATCHES = tuple(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=11) for seed in range(NUM_STEPS))
loaded = cache(torch.load)


def spec_of(name: str, architecture: str) -> OptimizerSpec:
    return (SPECS if architecture == "qwen3_moe" else DENSE)[name]


@frozen(kw_only=True)
class Place(Comparing):
    """Where a case runs, and what it is compared with."""

    rank: int
    num_ranks: int
    root: Path

    def backend(self, layout: Layout, architecture: str, spec: str) -> Fsdp2Backend:
        place = {"rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank, "rendezvous": "env://"}
        config, optimizer = make_config(**layout.options), spec_of(spec, architecture)
        return make_backend(self.root / "models" / architecture, config=config, optimizer=optimizer, **place)

    def compare(self, backend: Fsdp2Backend, architecture: str, spec: str) -> None:
        weights = exported(backend, NUM_STEPS)
        with self.comparing():
            assert_like_reference(weights, self.root, architecture, spec)


def assert_like_reference(found: Mapping[str, Tensor], root: Path, architecture: str, spec: str) -> None:
    before, expected = loaded(root / f"{architecture}-{spec}.pt")
    wrong = {name: share for name, share in differences(found, expected, before).items() if not share <= BOUNDS[spec]}
    assert wrong == {}


def step(backend: Fsdp2Backend, version: int) -> None:
    batch, size = BATCHES[version], backend.layout.data_parallel_size
    mine = list(range(backend.layout.data_parallel_rank, NUM_SEQUENCES, size))
    request = step_request(split(batch, [mine[:1], mine[1:]]), batch.counts(), version)
    step_in_pieces(backend, request) if version == 1 else backend.train_step(request)


def saved_at(root: Path, layout: str, architecture: str, spec: str) -> Path:
    return root / "saved" / f"{layout}-{architecture}-{spec}"


def save(backend: Fsdp2Backend, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(SaveStateRequest(directory=directory, kind="resume"))


def prepare(root: Path) -> None:
    """All that the ranks find in `root`."""
    for architecture, specs in (("qwen3", DENSE), ("qwen3_moe", SPECS)):
        directory = make_model(root / "models" / architecture, architecture, tied=architecture == "qwen3", alphabet=ALPHABET)
        for name, spec in specs.items():
            reference = OptimizerReference(directory, spec)
            before = reference.weights()
            for batch in BATCHES:
                reference.step(batch)
            torch.save((before, reference.weights()), root / f"{architecture}-{name}.pt")


def check_parity(place: Place, layout: Layout, architecture: str, spec: str) -> None:
    """Three steps end with the weights of the reference; saves on the way."""
    backend = place.backend(layout, architecture, spec)
    for version in range(NUM_STEPS):
        if version == SAVE_AFTER:
            save(backend, saved_at(place.root, layout.name, architecture, spec))
        step(backend, version)
    place.compare(backend, architecture, spec)
    backend.close(CloseRequest())


def check_resume(place: Place, layout: Layout, source: str, architecture: str, spec: str) -> None:
    """The last step, after what another layout has saved, ends with the weights of the reference."""
    backend = place.backend(layout, architecture, spec)
    directory = saved_at(place.root, source, architecture, spec)
    assert backend.load_state(LoadStateRequest(directory=directory)).weight_version == SAVE_AFTER
    step(backend, SAVE_AFTER)
    place.compare(backend, architecture, spec)
    backend.close(CloseRequest())


def cases(num_ranks: int) -> dict[str, Callable[[Place], None]]:
    """All that so many ranks do, in order. A layout resumes what the one before it in the table has saved."""
    found: dict[str, Callable[[Place], None]] = {}
    mine = [layout for layout in LAYOUTS if layout.num_ranks == num_ranks]
    for layout in mine:
        for architecture in layout.architectures:
            for spec in SPECS:
                found[f"parity/{layout.name}/{architecture}/{spec}"] = partial(
                    check_parity, layout=layout, architecture=architecture, spec=spec
                )
    for architecture, spec in (("qwen3", "muon+8bit"), ("qwen3_moe", "muon+8bit")):
        having = [layout for layout in mine if architecture in layout.architectures]
        for source, layout in pairwise(having):
            found[f"resume/{layout.name}-from-{source.name}/{architecture}/{spec}"] = partial(
                check_resume, layout=layout, source=source.name, architecture=architecture, spec=spec
            )
    return found


def with_sources(num_ranks: int, names: Collection[str]) -> set[str]:
    """Return the names of cases, and of those that save what the cases resume."""
    resumed = [name.split("/") for name in names if name in cases(num_ranks) and name.startswith("resume/")]
    sources = [f"parity/{pair.partition('-from-')[2]}/{architecture}/{spec}" for _, pair, architecture, spec in resumed]
    return {*names, *sources}


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    """Run the cases of these names."""
    torch.set_num_threads(1)
    use_exact_iterations()
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    ParallelLayout.meshes = cache(ParallelLayout.meshes)  # type: ignore[method-assign]

    def run(case: Callable[[Place], None]) -> str:
        place = Place(rank=rank, num_ranks=num_ranks, root=root)
        case(place)
        return "\n".join(place.wrong)

    rows = {name: partial(run, case) for name, case in cases(num_ranks).items() if name in names}
    run_rows(rows, root / f"results-{num_ranks}-{rank}.json")
    dist.destroy_process_group()
