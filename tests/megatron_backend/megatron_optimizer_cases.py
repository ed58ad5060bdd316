"""What each rank does to compare `[optimizer]` with torch's own optimizers in one process: LAYOUTS and KINDS are the table."""

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, field, frozen
from comparing import Comparing
from file_optimizer import expected_steps
from fsdp2_support import ALPHABET, make_batch
from megatron_checkpoint_cases import SAVE_AFTER, assert_equal, load, save, state_of
from megatron_families import make_own
from megatron_support import exported, make_backend, split, step_request
from optimizer_reference import differences, use_exact_iterations
from rank_launch import run_rows

from rlcore.spi import CloseRequest, MuonSpec, OptimizerGroup, OptimizerSpec, TrainStepResult
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model

NUM_STEPS, NUM_SEQUENCES = 3, 8
BATCHES = tuple(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=11) for seed in range(NUM_STEPS))
DENSE, MOE = "qwen2", "qwen3_moe"
LATENT, IN_TURN, SINKS = "deepseek_v3", "qwen3_5_text", "gpt_oss"
"""Narrow projections that each tensor rank holds whole; tensors whose rows several parameters share; experts in stacks whose
gates and columns take turns."""
BASE = OptimizerSpec(learning_rate=1e-3, weight_decay=0.1, eps=1e-5)
QUERIES = OptimizerGroup(parameters=("*.q_*proj.weight", "*.gate_proj.weight"), learning_rate=5e-3, betas=(0.8, 0.9))
"""A part of a parameter that Megatron fuses."""
_KINDS: Mapping[str, OptimizerSpec] = {
    "muon": evolve(BASE, name="muon"),
    "mixed": evolve(
        BASE,
        name="muon",
        moments="8bit",
        muon=MuonSpec(momentum=0.8, nesterov=False, newton_schulz_steps=3, scale="original"),
        groups=(
            evolve(QUERIES, name="adamw", weight_decay=0.0),
            OptimizerGroup(parameters=("*_proj.weight",), learning_rate=2e-3),
        ),
    ),
    "8bit": evolve(BASE, moments="8bit", groups=(QUERIES,)),
    "groups": evolve(BASE, groups=(QUERIES, OptimizerGroup(parameters=("*",), weight_decay=0.3))),
}
BFLOAT16 = ("mixed-bfloat16", "groups-bfloat16")
"""Kinds whose weights are the upper halves of their masters."""
KINDS = {**_KINDS, **{kind: _KINDS[kind.removesuffix("-bfloat16")] for kind in BFLOAT16}}
BOUNDS = {"muon": 2e-3, "mixed": 0.04, "8bit": 0.04, "groups": 2e-3, **dict.fromkeys(BFLOAT16, 0.6)}
"""Most L2 norm of what a tensor differs by, in relation to what the steps change it by. A moment of 8 bits that rounding lifts
to the next code changes by up to 12%. In bfloat16 the biases of keys move by rounding alone."""


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    sizes: Mapping[str, int] = field(factory=dict)
    """Of `[trainer.megatron]`, without "_parallel"."""
    cases: Mapping[str, tuple[str, ...]]
    """Kinds of optimizers by architecture."""

    def config(self) -> MegatronConfig:
        ones = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
        sizes = {f"{dimension}_parallel": size for dimension, size in {**ones, **self.sizes}.items()}
        return MegatronConfig(collective_timeout_s=600.0, **sizes)


def _layout(name: str, num_ranks: int, sizes: Mapping[str, int], **cases: tuple[str, ...]) -> Layout:
    return Layout(name=name, num_ranks=num_ranks, sizes=sizes, cases=cases)


ALL = tuple(_KINDS)
MIXED = ("mixed",)
LAYOUTS = (
    _layout("one", 1, {}, qwen2=(*ALL, *BFLOAT16), qwen3_moe=ALL, deepseek_v3=MIXED, qwen3_5_text=("muon",), gpt_oss=("muon",)),
    _layout("dp2", 2, {}, qwen2=(*ALL, *BFLOAT16), qwen3_moe=MIXED, gpt_oss=("muon",)),
    _layout(
        "tp2",
        2,
        {"tensor": 2},
        qwen2=(*ALL, *BFLOAT16),
        qwen3_moe=MIXED,
        deepseek_v3=MIXED,
        qwen3_5_text=("muon",),
        gpt_oss=("muon",),
    ),
    _layout("pp2", 2, {"pipeline": 2}, qwen2=MIXED, qwen3_moe=MIXED),
    _layout("pp2xvpp2", 2, {"pipeline": 2, "virtual_pipeline": 2}, qwen2=MIXED),
    _layout("cp2", 2, {"context": 2}, qwen2=MIXED, qwen3_moe=MIXED),
    _layout("ep2", 2, {"expert": 2}, qwen3_moe=(*ALL, *BFLOAT16), gpt_oss=("muon",)),
    _layout("etp2", 2, {"tensor": 2, "expert_tensor": 2}, qwen3_moe=MIXED),
    _layout("tp2xdp2", 4, {"tensor": 2}, qwen2=(*ALL, *BFLOAT16), qwen3_moe=MIXED),
    _layout("tp4", 4, {"tensor": 4}, qwen2=MIXED),  # of two key heads
    _layout("tp2xpp2", 4, {"tensor": 2, "pipeline": 2}, qwen3_moe=MIXED),
    _layout("tp2xcp2", 4, {"tensor": 2, "context": 2}, qwen2=MIXED),
    _layout("tp2xep2", 4, {"tensor": 2, "expert": 2}, qwen3_moe=ALL),
    _layout("pp2xep2", 4, {"pipeline": 2, "expert": 2}, qwen3_moe=MIXED),
    _layout("pp2xdp2", 4, {"pipeline": 2}, qwen2=MIXED),
    _layout("pp2xcp2", 4, {"pipeline": 2, "context": 2}, qwen2=MIXED),
    _layout("ep2xcp2", 4, {"expert": 2, "context": 2}, qwen3_moe=MIXED),
    _layout("ep2xdp2", 4, {"expert": 2}, qwen3_moe=MIXED),
    _layout("etp2xdp2", 4, {"tensor": 2, "expert_tensor": 2}, qwen3_moe=MIXED),
)
WORLD_SIZES = tuple(sorted({layout.num_ranks for layout in LAYOUTS}))


def rows(num_ranks: int) -> dict[str, tuple[Layout, str, str]]:
    """Layout, architecture and kind of every case of that many ranks, by its name."""
    return {
        f"{layout.name}/{architecture}/{kind}": (layout, architecture, kind)
        for layout in LAYOUTS
        if layout.num_ranks == num_ranks
        for architecture, kinds in layout.cases.items()
        for kind in kinds
    }


@frozen(kw_only=True)
class Launch:
    """Of all cases of so many ranks."""

    num_ranks: int
    root: Path
    names: Collection[str]
    """Names of the cases that run."""

    def results(self, rank: int) -> Path:
        """What went wrong on a rank, or an empty string, by the case's name."""
        return self.root / f"results-{self.num_ranks}-{rank}.json"


loaded = cache(torch.load)


@frozen(kw_only=True)
class Place(Launch, Comparing):
    """Where a case runs, and what it is compared with."""

    rank: int

    def backend(self, layout: Layout, architecture: str, kind: str) -> MegatronBackend:
        where = {"rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank, "rendezvous": "env://"}
        dtype = "bfloat16" if kind in BFLOAT16 else "float32"
        model = model_of(self.root, architecture)
        return make_backend(model, config=layout.config(), optimizer=KINDS[kind], dtype=dtype, **where)

    def saved(self, layout: str, architecture: str, kind: str) -> Path:
        return self.root / "saved" / f"{layout}-{architecture}-{kind}"


def model_of(root: Path, architecture: str) -> Path:
    """A directory of the model, made where it is not there."""
    directory = root / "models" / architecture
    if not directory.exists():
        if architecture in (DENSE, MOE):
            # Rows of 288 elements in the dense one, of which tensor ranks cut the first block.
            size = 96 if architecture == DENSE else 32
            num_layers = 4 if architecture == DENSE else 2
            make_model(directory, architecture, hidden_size=size, num_layers=num_layers, alphabet=ALPHABET)
        else:
            make_own(directory, architecture)
    return directory


def expectation(root: Path, architecture: str, kind: str) -> Path:
    """The file of what one process has, made where it is not there."""
    file = root / f"{architecture}-{kind}.pt"
    if not file.exists():
        found = expected_steps(model_of(root, architecture), KINDS[kind], BATCHES, root / f"{architecture}-{kind}")
        torch.save(found, file)
    return file


def check(place: Place, layout: Layout, architecture: str, kind: str) -> None:
    """Three steps end at the weights of torch's own optimizers, and a checkpoint before the last one goes on likewise."""
    expected, backend = loaded(expectation(place.root, architecture, kind)), place.backend(layout, architecture, kind)
    for version in range(NUM_STEPS):
        if version == SAVE_AFTER:
            save(backend, place.saved(layout.name, architecture, kind))
        result = step(backend, version)
        with place.comparing():
            # The first step's figures are before any update.
            most = (0.02 if kind in BFLOAT16 else 1e-5) if version == 0 else BOUNDS[kind]
            assert abs(result.loss - expected["losses"][version]) < most * max(1.0, abs(expected["losses"][version]))
            assert abs(result.grad_norm - expected["norms"][version]) < most * max(1.0, expected["norms"][version])
    weights = exported(backend, NUM_STEPS)
    with place.comparing():
        assert far_from(expected, weights, kind) == {}
    load(backend, place.saved(layout.name, architecture, kind))
    step(backend, SAVE_AFTER)
    again = exported(backend, NUM_STEPS)
    with place.comparing():
        assert [name for name, tensor in weights.items() if not torch.equal(tensor, again[name])] == []
    check_resumed(place, layout, architecture, kind, backend)
    backend.close(CloseRequest())


def check_resumed(place: Place, layout: Layout, architecture: str, kind: str, backend: MegatronBackend) -> None:
    """What one process has saved becomes the same state, bit by bit, as what this layout saves of it again."""
    one = place.saved("one", architecture, kind)
    if layout.name == "one" or not one.exists():
        return
    load(backend, one)
    state = state_of(backend)
    save(backend, place.saved(f"{layout.name}-of-one", architecture, kind))
    load(backend, place.saved(f"{layout.name}-of-one", architecture, kind))
    with place.comparing():
        assert_equal(state_of(backend), state)
    step(backend, SAVE_AFTER)
    with place.comparing():
        expected = loaded(expectation(place.root, architecture, kind))
        assert far_from(expected, exported(backend, NUM_STEPS), kind) == {}


def far_from(expected: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: str) -> dict[str, float]:
    """How far tensors are from the expected ones in relation to what these have moved by, where that is too far. Exported
    bfloat16 weights are their masters', rounded."""
    before = expected["before"]
    moved = {name: (tensor - before[name]).norm().item() for name, tensor in expected["weights"].items()}
    rounding = 2**-8 if kind in BFLOAT16 else 0.0
    sizes = {name: tensor.norm().item() for name, tensor in expected["weights"].items()}
    allowed = {name: BOUNDS[kind] + rounding * sizes[name] / max(moved[name], 1e-12) for name in moved}
    errors = differences(weights, expected["weights"], before)
    return {name: error for name, error in errors.items() if not error <= allowed[name]}


def step(backend: MegatronBackend, version: int) -> TrainStepResult:
    batch, layout = BATCHES[version], backend.layout
    mine = list(range(layout.data_parallel_rank, NUM_SEQUENCES, layout.data_parallel_size))
    request = step_request(split(batch, [mine[:1], mine[1:]]), batch.counts(), version)
    return step_in_pieces(backend, request) if version == 1 else backend.train_step(request)


def run_all(rank: int, launch: Launch) -> None:
    """Run the cases."""
    torch.set_num_threads(1)
    use_exact_iterations()
    file = launch.root / f"rendezvous-{launch.num_ranks}"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=launch.num_ranks)

    def run(function: Callable[[Place], None]) -> str:
        place = Place(rank=rank, **asdict(launch, recurse=False))
        function(place)
        return "\n".join(place.wrong)

    def case(layout: Layout, architecture: str, kind: str) -> Callable[[Place], None]:
        return lambda place: check(place, layout, architecture, kind)

    chosen = {name: row for name, row in rows(launch.num_ranks).items() if name in launch.names}
    run_rows(
        {name: partial(run, case(*row)) for name, row in chosen.items()}, launch.results(rank), alone=launch.num_ranks == 1
    )
    dist.destroy_process_group()
