"""What each rank does to show that a layout resumes what another has saved: LAYOUTS is the table, one launch for each size."""

import resource
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from fsdp2_support import ALPHABET
from image_support import image_batch
from megatron_families import make_own
from megatron_support import OPTIMIZER, make_backend, make_batch, saved, split, step_request
from multi_token_reference import make_with_head
from rank_launch import run_rows
from torch import Tensor

from rlcore.spi import CheckpointError, CloseRequest, LoadStateRequest, SaveStateRequest, StorageError, TrainStepResult
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_megatron.training.optimizer_shards import shards_of
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model

MOE, DENSE = "qwen3_moe", "qwen2"
"""Experts and norms of heads, an output layer of its own; biases, and an output layer that is the embedding."""
SINKS = "gpt_oss"
"""Sinks that tensor ranks divide, and experts and routers with biases."""
LATENT = "deepseek_v3"
"""Narrow projections that each tensor rank holds whole, an MLP before experts, biases of routers that do not train, and a
multi-token head."""
NORMS = "gemma3_text"
"""Norms behind attention and MLP, in the place of Megatron's additions."""
IMAGES = "qwen3_vl"
"""A vision tower, whole on each tensor rank of the first stage, and layers that add its features."""
SAVE_AFTER, NUM_SEQUENCES = 2, 4
SPEC = evolve(OPTIMIZER, learning_rate=2e-4)
BATCHES = tuple(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=9) for seed in range(SAVE_AFTER + 1))
ACROSS_LAYOUTS = 1e-6
"""Most difference of a weight after the next step, and relative difference of that step's figures."""


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    sizes: Mapping[str, int] = field(factory=dict)
    """Of `[trainer.megatron]`, without "_parallel"."""
    architecture: str
    sources: tuple[str, ...]
    """Layouts whose checkpoints of the same architecture it resumes; saves one itself from the first."""
    dtype: str = "float32"
    ddp: Mapping[str, Any] = field(factory=dict)

    @property
    def saved(self) -> str:
        return f"{self.name}-{self.architecture}-{self.dtype}"

    def config(self) -> MegatronConfig:
        ones = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
        sizes = {f"{dimension}_parallel": size for dimension, size in {**ones, **self.sizes}.items()}
        return MegatronConfig(collective_timeout_s=600.0, ddp=self.ddp, mtp=self.architecture == LATENT, **sizes)


def _rows(num_ranks: int, architecture: str, *rows: tuple[str, Mapping[str, int], tuple[str, ...]]) -> tuple[Layout, ...]:
    return tuple(
        Layout(name=name, num_ranks=num_ranks, sizes=sizes, architecture=architecture, sources=sources)
        for name, sizes, sources in rows
    )


LAYOUTS = (
    *_rows(
        2,
        DENSE,
        ("dp2", {}, ("one",)),
        ("tp2", {"tensor": 2}, ("one", "dp2")),
        ("pp2", {"pipeline": 2}, ("tp2",)),
        ("cp2", {"context": 2}, ("pp2",)),
        ("pp2xvpp2", {"pipeline": 2, "virtual_pipeline": 2}, ("cp2", "pp2")),
    ),
    *_rows(
        2,
        MOE,
        ("ep2", {"expert": 2}, ("one",)),
        ("etp2", {"tensor": 2, "expert_tensor": 2}, ("ep2",)),
        ("tp2", {"tensor": 2}, ("etp2",)),
        ("pp2xvpp2", {"pipeline": 2, "virtual_pipeline": 2}, ("tp2",)),
        ("dp2", {}, ("pp2xvpp2", "ep2")),
    ),
    *_rows(2, LATENT, ("tp2", {"tensor": 2}, ("one",)), ("pp2", {"pipeline": 2}, ("tp2",))),
    *_rows(2, NORMS, ("tp2", {"tensor": 2}, ("one",)), ("pp2", {"pipeline": 2}, ("tp2",))),
    *_rows(2, IMAGES, ("tp2", {"tensor": 2}, ("one",)), ("pp2", {"pipeline": 2}, ("tp2",)), ("dp2", {}, ("pp2",))),
    *_rows(4, IMAGES, ("tp2xpp2", {"tensor": 2, "pipeline": 2}, ("dp2",))),
    *_rows(2, SINKS, ("tp2", {"tensor": 2}, ("one",)), ("ep2", {"expert": 2}, ("tp2",))),
    *_rows(
        4,
        DENSE,
        ("tp2xpp2", {"tensor": 2, "pipeline": 2}, ("one",)),
        ("tp2xcp2", {"tensor": 2, "context": 2}, ("tp2xpp2", "pp2xvpp2")),
        ("pp2xvpp2xdp2", {"pipeline": 2, "virtual_pipeline": 2}, ("tp2xcp2",)),
        ("pp2xcp2", {"pipeline": 2, "context": 2}, ("pp2xvpp2xdp2",)),
        ("dp2xtp2", {"tensor": 2}, ("pp2xcp2", "dp2")),
        ("pp4", {"pipeline": 4}, ("dp2xtp2",)),
        ("tp4", {"tensor": 4}, ("pp4",)),  # of two key heads
        ("dp4", {}, ("tp4",)),
    ),
    *_rows(
        4,
        MOE,
        ("tp2xep2", {"tensor": 2, "expert": 2}, ("one",)),
        ("ep2xcp2", {"expert": 2, "context": 2}, ("tp2xep2",)),
        ("dp2xetp2", {"tensor": 2, "expert_tensor": 2}, ("ep2xcp2", "pp2xvpp2")),
        ("pp2xep2", {"pipeline": 2, "expert": 2}, ("dp2xetp2", "etp2")),
        ("ep4", {"expert": 4}, ("pp2xep2",)),
        ("dp4", {}, ("ep4",)),
    ),
    Layout(
        name="dp2+overlap",
        num_ranks=2,
        architecture=DENSE,
        sources=("one", "pp2"),
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    Layout(name="dp2", num_ranks=2, architecture=DENSE, sources=("one",), dtype="bfloat16"),
    Layout(name="pp2", num_ranks=2, architecture=DENSE, sources=("dp2",), sizes={"pipeline": 2}, dtype="bfloat16"),
)
ONE = (
    Layout(name="one", num_ranks=1, architecture=DENSE, sources=()),
    Layout(name="one", num_ranks=1, architecture=MOE, sources=()),
    Layout(name="one", num_ranks=1, architecture=LATENT, sources=()),
    Layout(name="one", num_ranks=1, architecture=SINKS, sources=()),
    Layout(name="one", num_ranks=1, architecture=NORMS, sources=()),
    Layout(name="one", num_ranks=1, architecture=IMAGES, sources=()),
    Layout(name="one", num_ranks=1, architecture=DENSE, sources=(), dtype="bfloat16"),
)


@frozen(kw_only=True)
class Place:
    """Where a case runs."""

    rank: int
    num_ranks: int
    root: Path

    def backend(self, layout: Layout) -> MegatronBackend:
        place = {"rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank, "device": "cpu"}
        place |= {"rendezvous": "env://", "dtype": layout.dtype}
        directory = self.root / "models" / layout.architecture
        backend = make_backend(directory, config=layout.config(), optimizer=SPEC, **place)
        if layout.architecture == IMAGES:
            chosen = np.arange(NUM_SEQUENCES)
            backend.own_batches = [image_batch(directory, seed).select(chosen) for seed in range(len(BATCHES))]
        return backend

    def directory(self, layout: Layout, source: str | None = None) -> Path:
        return self.root / "saved" / evolve(layout, name=source or layout.name).saved


def step(backend: MegatronBackend, version: int) -> TrainStepResult:
    batch = getattr(backend, "own_batches", BATCHES)[version]
    mine = list(range(backend.layout.data_parallel_rank, NUM_SEQUENCES, backend.layout.data_parallel_size))
    groups = [group for group in (mine[::2], mine[1::2]) if group]
    return backend.train_step(step_request(split(batch, groups), batch.counts(), version))


def save(backend: MegatronBackend, directory: Path) -> tuple[str, ...]:
    directory.mkdir(parents=True, exist_ok=True)
    return backend.save_state(SaveStateRequest(directory=directory, kind="resume")).files


def load(backend: MegatronBackend, directory: Path) -> None:
    assert backend.load_state(LoadStateRequest(directory=directory)).weight_version == SAVE_AFTER


def state_of(backend: MegatronBackend) -> dict[str, Tensor]:
    """Copies of weights and moments that this rank's optimizer holds, and its counts of steps."""
    with cuda_or_cpu():
        shards = shards_of(backend.models, backend.optimizer)
    found = {}
    for shard in shards:
        name = shard.pieces[0].name
        found[name] = shard.key.detach().clone()
        found |= {f"{kind} of {name}": tensor.clone() for kind, tensor in shard.state.items()}
    return found


def prepare(root: Path, architectures: Collection[str]) -> None:
    """Make models of these architectures, and checkpoints of one process."""
    for architecture in (DENSE, MOE):
        tied = architecture == DENSE
        make_model(root / "models" / architecture, architecture, tied=tied, num_layers=5, alphabet=ALPHABET)
    if LATENT in architectures:
        make_with_head(root / "models" / LATENT, LATENT, num_hidden_layers=5)
    for family in {SINKS, NORMS}.intersection(architectures):
        make_own(root / "models" / family, family, num_hidden_layers=5)
    if IMAGES in architectures:
        make_image_model(root / "models" / IMAGES, IMAGES, num_layers=5)
    for layout in (layout for layout in ONE if layout.architecture in architectures):
        backend = Place(rank=0, num_ranks=1, root=root).backend(layout)
        for version in range(SAVE_AFTER):
            step(backend, version)
        directory = Place(rank=0, num_ranks=1, root=root).directory(layout)
        save(backend, directory)
        found = {"result": step(backend, SAVE_AFTER), "weights": saved(backend, SAVE_AFTER + 1)}
        torch.save(found, directory / "expected.pt")
        backend.close(CloseRequest())


def check_resumes(place: Place, layout: Layout) -> None:
    """The step after each source's is the one that one process would have gone on with, and bit for bit the same each time."""
    backend = place.backend(layout)
    step(backend, 0)  # what it held before must leave no trace
    found = [resumed(place, layout, backend, layout.sources[0])]
    load(backend, place.directory(layout, layout.sources[0]))
    assert_files(place, layout, save(backend, place.directory(layout)))
    found += [resumed(place, layout, backend, source) for source in (*layout.sources[1:], layout.name)]
    for state, result, weights in found[1:]:
        assert_equal(state, found[0][0])
        assert result == found[0][1]
        assert_equal(weights, found[0][2])
    if layout.dtype == "float32":
        expected = torch.load(place.directory(layout, "one") / "expected.pt", weights_only=False)
        assert_near(found[0][1], found[0][2], expected)
    backend.close(CloseRequest())


def resumed(
    place: Place, layout: Layout, backend: MegatronBackend, source: str
) -> tuple[dict[str, Tensor], TrainStepResult, dict[str, Tensor]]:
    """The state that `source` has saved, the next step from there, and the weights after it."""
    load(backend, place.directory(layout, source))
    state = state_of(backend)
    result = step(backend, SAVE_AFTER)
    return state, result, saved(backend, SAVE_AFTER + 1)


def assert_files(place: Place, layout: Layout, files: tuple[str, ...]) -> None:
    """Each rank names what it wrote, and together they name everything once."""
    everyone: list[Any] = [None] * place.num_ranks
    dist.all_gather_object(everyone, files)
    names = [name for mine in everyone for name in mine]
    directory = place.directory(layout)
    assert sorted(names) == sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def assert_near(result: TrainStepResult, weights: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    one = expected["result"]
    assert abs(result.loss - one.loss) < ACROSS_LAYOUTS * max(1.0, abs(one.loss))
    assert abs(result.grad_norm - one.grad_norm) < ACROSS_LAYOUTS * one.grad_norm
    assert weights.keys() == expected["weights"].keys()
    errors = {name: float((weights[name] - tensor).abs().max()) for name, tensor in expected["weights"].items()}
    assert {name: error for name, error in errors.items() if not error <= ACROSS_LAYOUTS} == {}


def check_damage_on_one(place: Place) -> None:
    """What one rank alone cannot read is an error on both, which keep what they had."""
    layout = next(layout for layout in LAYOUTS if layout.num_ranks == place.num_ranks)
    backend, directory = place.backend(layout), place.root / "damaged"
    before = state_of(backend)
    save(backend, directory)
    with pytest.raises(CheckpointError, match="elsewhere"):
        load(backend, place.root / "elsewhere" if place.rank else directory)
    dist.barrier()
    if place.rank == 0:
        largest = max(directory.rglob("*.distcp"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1])
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"distcp: .* \d+ bytes; .* \d+"):
        load(backend, directory)
    assert_equal(state_of(backend), before)
    backend.close(CloseRequest())


def check_described_once(place: Place) -> None:
    """Rank 0 alone reads what describes a checkpoint, once; a rank may be one of many thousands."""
    layout = next(layout for layout in LAYOUTS if layout.num_ranks == place.num_ranks)
    backend, directory = place.backend(layout), place.root / "described"
    for version in range(SAVE_AFTER):
        step(backend, version)
    save(backend, directory)
    dist.barrier()
    opened: list[str] = []
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    load(backend, directory)
    names = sorted(Path(path).name for path in opened if path.startswith(str(directory)))
    counts: list[Any] = [None] * place.num_ranks
    dist.all_gather_object(counts, [name for name in names if name in (".metadata", "trainer.json")])
    assert counts == [[".metadata", "trainer.json"], *[[]] * (place.num_ranks - 1)]
    assert any(name.endswith(".distcp") for name in names), "each rank reads tensors"
    backend.close(CloseRequest())


def check_disk_full_on_one(place: Place) -> None:
    """A disk that refuses the files of one rank alone is an error on both, which go on."""
    layout = next(layout for layout in LAYOUTS if layout.num_ranks == place.num_ranks)
    for full_rank, num_bytes in ((1, 4096), (0, 4096), (0, 16)):
        backend = place.backend(layout)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if place.rank == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                save(backend, place.root / f"full-{full_rank}-{num_bytes}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert step(backend, 0).weight_version == 1
        backend.close(CloseRequest())


def case_of(layout: Layout) -> str:
    return f"{layout.saved} from {' and '.join(layout.sources)}"


def with_sources(names: Collection[str]) -> set[str]:
    """Return the names of cases, and of those that save what the cases resume."""
    by_name = {layout.saved: layout for layout in LAYOUTS}
    found, waiting = set(names), [layout for layout in LAYOUTS if case_of(layout) in names]
    while waiting:
        layout = waiting.pop()
        found.add(case_of(layout))
        sources = (f"{source}-{layout.architecture}-{layout.dtype}" for source in layout.sources)
        waiting += [by_name[source] for source in sources if source in by_name]
    return found


def cases(num_ranks: int) -> dict[str, Callable[[Place], None]]:
    """All that so many ranks do, in order."""
    of_two = {
        "damage on one rank": check_damage_on_one,
        "full disk on one rank": check_disk_full_on_one,
        "described once": check_described_once,
    }
    return (of_two if num_ranks == 2 else {}) | {
        case_of(layout): lambda place, layout=layout: check_resumes(place, layout)
        for layout in LAYOUTS
        if layout.num_ranks == num_ranks
    }


def run_all(rank: int, num_ranks: int, root: Path, names: Collection[str]) -> None:
    """Run the cases of these names."""
    torch.set_num_threads(1)
    init = f"file://{root}/rendezvous-{num_ranks}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=num_ranks)
    every = {name: case for name, case in cases(num_ranks).items() if name in names}
    place = Place(rank=rank, num_ranks=num_ranks, root=root)
    run_rows({name: partial(function, place) for name, function in every.items()}, root / f"results-{num_ranks}-{rank}.json")
    dist.destroy_process_group()
