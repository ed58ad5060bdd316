"""What each rank does to compare a layout with one process: LAYOUTS is the table, and one launch runs all rows of a size."""

import shutil
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import fsdp2_support
import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from comparing import Comparing
from fsdp2_support import ALPHABET, TEMPERATURE, Reference, exported, make_backend, make_batch, make_config, split, step_request
from gradient_norm_cases import assert_norms, norms_in_files
from rank_launch import run_rows
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import CloseRequest, LoadStateRequest, LogprobsRequest, SaveStateRequest, TokenBatch
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.export import whole
from rlcore_fsdp2.gradients import held_elements
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.sharding import local, reshard
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.testing.models import make_model

ARCHITECTURES = installed_model_types()

NUM_STEPS = 3
SAVE_AFTER = 2
NUM_SEQUENCES = 8
OPTIMIZER = evolve(fsdp2_support.OPTIMIZER, learning_rate=2e-4)
"""Adam divides by the gradient's own size: of one near zero float32's rounding changes the update by percents of this rate."""


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(factory=dict)
    """Of `[trainer.fsdp2]`."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where it is tried: compiling takes half a minute on CPU."""
    packed: tuple[str, ...] = ()
    """Architectures whose sequences come in two packed microbatches for each data-parallel rank."""
    unpacked: tuple[str, ...] = ()
    """Architectures whose sequences come in a microbatch each."""


@frozen(kw_only=True)
class Bounds:
    """How far a layout may be from one process in float32."""

    element: float
    """Most difference of any element of a weight, and where `gradient` is 0 of a gradient."""
    gradient: float = 0.0
    """Most L2 error of a parameter's gradient, relative to its L2 norm."""
    figure: float
    """Most difference of a log-probability, an entropy and a loss, and relative difference of the gradient's norm."""


FLOAT32 = Bounds(element=1e-5, figure=1e-5)
WEIGHT = 2e-5
"""Most difference of any element of a weight after all steps: Adam divides gradients of rounding alone by their own size."""
BFLOAT16 = Bounds(element=2.1 * NUM_STEPS * OPTIMIZER.learning_rate, gradient=0.06, figure=0.15)
"""bfloat16 rounds by up to 2⁻⁹ in each of some tens of products in a row. Adam's steps are no longer than its learning rate,
and may point the other way."""
BFLOAT16_EXPERTS = evolve(BFLOAT16, gradient=0.3)
"""Where two experts are nearly equal it may send a token to the other one."""

BIASED = "llama_biased"
"""Llama with biases everywhere, those of the projections that tensor parallelism divides by inputs included."""
LAYOUTS = (
    Layout(name="dp2", num_ranks=2, packed=("qwen3_moe",), unpacked=("qwen2",)),
    Layout(
        name="tp2",
        num_ranks=2,
        options={"tensor_parallel": 2, "sequence_parallel": False},
        packed=("qwen3", "qwen3_moe"),
        unpacked=("qwen2",),
    ),
    Layout(name="tp2+sp", num_ranks=2, options={"tensor_parallel": 2}, packed=(*ARCHITECTURES, BIASED), unpacked=("qwen3",)),
    Layout(
        name="tp2+sp+checkpointing+offload",
        num_ranks=2,
        options={"tensor_parallel": 2, "activation_checkpointing": True, "cpu_offload": True},
        packed=("qwen3_moe",),
    ),
    Layout(
        name="tp2+sp+compiled",
        num_ranks=2,
        options={"tensor_parallel": 2, "compile_layers": True},
        devices=("cuda",),
        packed=("qwen3",),
    ),
    Layout(name="cp2", num_ranks=2, options={"context_parallel": 2}, packed=("qwen3", "qwen3_moe"), unpacked=("llama",)),
    Layout(name="ep2", num_ranks=2, options={"expert_parallel": 2}, packed=("qwen3_moe",), unpacked=("qwen3_moe",)),
    Layout(name="dp4", num_ranks=4, packed=("qwen3_moe",), unpacked=("qwen3",)),
    Layout(name="hsdp2x2", num_ranks=4, options={"replicate": 2}, packed=("qwen3_moe",), unpacked=("llama",)),
    Layout(name="dp2xtp2", num_ranks=4, options={"tensor_parallel": 2}, packed=ARCHITECTURES, unpacked=("qwen2",)),
    Layout(
        name="dp2xtp2+every",
        num_ranks=4,
        options={"tensor_parallel": 2, "reduce_every_microbatch": True, "reshard_after_forward": False},
        packed=("qwen3",),
    ),
    Layout(
        name="tp2xcp2",
        num_ranks=4,
        options={"tensor_parallel": 2, "context_parallel": 2},
        packed=("qwen2", "qwen3_moe"),
        unpacked=("qwen3",),
    ),
    # Of two key heads, so that two ranks share each.
    Layout(name="tp4", num_ranks=4, options={"tensor_parallel": 4, "sequence_parallel": False}, packed=("qwen2", "qwen3")),
    Layout(name="tp4+sp", num_ranks=4, options={"tensor_parallel": 4}, packed=("qwen3_moe",), unpacked=("llama",)),
    Layout(name="hsdp2xtp2", num_ranks=4, options={"replicate": 2, "tensor_parallel": 2}, packed=("qwen3",)),
    Layout(name="dp2xcp2", num_ranks=4, options={"context_parallel": 2}, packed=("qwen3",), unpacked=("llama",)),
    Layout(
        name="cp4+checkpointing",
        num_ranks=4,
        options={"context_parallel": 4, "activation_checkpointing": True},
        packed=("qwen2",),
    ),
    Layout(name="dp2xep2", num_ranks=4, options={"expert_parallel": 2}, packed=("qwen3_moe",), unpacked=("qwen3_moe",)),
    Layout(
        name="tp2xep2+checkpointing",
        num_ranks=4,
        options={"tensor_parallel": 2, "expert_parallel": 2, "activation_checkpointing": True},
        packed=("qwen3_moe",),
    ),
    Layout(name="cp2xep4", num_ranks=4, options={"context_parallel": 2, "expert_parallel": 4}, packed=("qwen3_moe",)),
)
BATCHES = tuple(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=11) for seed in range(NUM_STEPS))


def rows(num_ranks: int, device: str) -> list[tuple[Layout, str, str]]:
    """Layout, architecture and form of every case of that many ranks."""
    return [
        (layout, architecture, form)
        for layout in LAYOUTS
        if layout.num_ranks == num_ranks and device in layout.devices
        for form in ("packed", "unpacked")
        for architecture in getattr(layout, form)
    ]


def label(layout: Layout, architecture: str, form: str) -> str:
    return f"{layout.name}/{architecture}/{form}"


loaded = cache(torch.load)
"""What many cases of a rank are compared with, read once."""


@frozen(kw_only=True)
class Place(Comparing):
    """Where a case runs, and what it is compared with."""

    rank: int
    num_ranks: int
    root: Path
    device: str = "cpu"
    dtype: str = "float32"

    def bounds(self, architecture: str) -> Bounds:
        narrow = BFLOAT16_EXPERTS if architecture == "qwen3_moe" else BFLOAT16
        return FLOAT32 if self.dtype == "float32" else narrow

    def backend(self, layout: Layout, architecture: str, **options: Any) -> Fsdp2Backend:
        place = {"rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank, "device": self.device}
        options |= {"dtype": self.dtype, "rendezvous": "env://"}
        options |= {"config": make_config(**layout.options), "optimizer": OPTIMIZER}
        return make_backend(self.root / "models" / architecture, **place, **options)

    def expected(self, architecture: str) -> Any:
        return loaded(self.root / f"{architecture}.pt")


def make_models(root: Path, **options: Any) -> None:
    for architecture in ARCHITECTURES:
        tied = architecture in ("qwen2", "qwen3")
        make_model(root / "models" / architecture, architecture, tied=tied, alphabet=ALPHABET, **options)
    make_biased(root)


def make_biased(root: Path) -> None:
    """From the llama made before."""
    config = AutoConfig.from_pretrained(root / "models" / "llama", attention_bias=True, mlp_bias=True)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(root / "models" / BIASED)
    shutil.copy(root / "models" / "llama" / "tokenizer.json", root / "models" / BIASED)


def write_expected(root: Path, architecture: str) -> None:
    """Log-probabilities before, and gradients of each step and weights after all, of plain transformers in one process."""
    reference = Reference(root / "models" / architecture, OPTIMIZER)
    with torch.no_grad():
        logprobs = reference.logprobs(BATCHES[0])
    losses, norms, gradients, tensor_norms = [], [], [], []
    for batch in BATCHES:
        losses.append(reference.backward(batch))
        gradients.append(reference.gradients())
        tensor_norms.append(norms_in_files(reference.model, gradients[-1]))
        reference.optimizer.zero_grad()
        norms.append(reference.step(batch)[1])
    weights = reference.saved(root / f"{architecture}-saved")
    found = {"logprobs": logprobs, "losses": losses, "norms": norms, "gradients": gradients, "weights": weights}
    torch.save(found | {"tensor_norms": tensor_norms}, root / f"{architecture}.pt")


def train_on_one(backend: Fsdp2Backend, version: int) -> None:
    batch = BATCHES[version]
    backend.train_step(step_request(split(batch, [[0, 1, 2, 3], [4, 5, 6, 7]]), batch.counts(), version))


def save_on_one(root: Path, architecture: str) -> None:
    """What `resumptions` call "single"."""
    backend = make_backend(root / "models" / architecture, optimizer=OPTIMIZER)
    for version in range(SAVE_AFTER):
        train_on_one(backend, version)
    directory = saved_at(root, "single", architecture)
    directory.mkdir(parents=True)
    backend.save_state(SaveStateRequest(directory=directory, kind="resume"))
    backend.close(CloseRequest())


def prepare(root: Path, **options: Any) -> None:
    """All that the ranks find in `root`; `options` of `make_model`."""
    make_models(root, **options)
    for architecture in (*ARCHITECTURES, BIASED):
        write_expected(root, architecture)
    for architecture in ("qwen3", "qwen3_moe"):
        save_on_one(root, architecture)


def sequences_of(rank: int, size: int) -> list[int]:
    """What a data-parallel rank trains on."""
    return list(range(rank, NUM_SEQUENCES, size))


def microbatches(batch: TokenBatch, backend: Fsdp2Backend, form: str) -> tuple[TokenBatch, ...]:
    mine = sequences_of(backend.layout.data_parallel_rank, backend.layout.data_parallel_size)
    groups = [mine[:1], mine[1:]] if form == "packed" else [[sequence] for sequence in mine]
    return split(batch, groups)


class GradientsSeen:
    """The whole gradients of a backend's last step, before clipping."""

    def __init__(self, backend: Fsdp2Backend) -> None:
        self.tensors: dict[str, Tensor] = {}
        update, model = backend.update, backend.policy

        def see(gradients: Any, *arguments: Any) -> float:
            self.tensors = {
                name: whole(parameter.grad, torch.float32, backend.device).clone().cpu()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            return update(gradients, *arguments)

        backend.update = see


def assert_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bounds: Bounds = FLOAT32) -> None:
    assert found.keys() == expected.keys()
    errors = {name: float((found[name].cpu() - tensor).abs().max()) for name, tensor in expected.items()}
    most = max(bounds.element, WEIGHT)
    wrong = {name: error for name, error in errors.items() if not error <= most}
    assert not wrong, f"weights are off by {wrong}; expected at most {most}"


def assert_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bounds: Bounds) -> None:
    if not bounds.gradient:
        assert_weights(found, expected, bounds)
        return
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= bounds.gradient} == {}


def own_places(backend: Fsdp2Backend) -> np.ndarray:
    """Which of the tokens of the first step's batch are a data-parallel rank's."""
    offsets = BATCHES[0].offsets
    mine = sequences_of(backend.layout.data_parallel_rank, backend.layout.data_parallel_size)
    return np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in mine])


def check_logprobs(place: Place, backend: Fsdp2Backend, architecture: str, form: str, model: str) -> None:
    """Every rank gets those of all its tokens, and the entropies."""
    batch, logprobs = BATCHES[0], place.expected(architecture)["logprobs"]
    places = own_places(backend)
    request = LogprobsRequest(
        microbatches=microbatches(batch, backend, form), model=model, temperature=TEMPERATURE, entropy=True, weight_version=0
    )
    result = backend.get_logprobs(request)
    for found, expected in zip((result.logprobs, result.entropy), logprobs, strict=True):
        with place.comparing():
            np.testing.assert_allclose(np.concatenate(found), expected.numpy()[places], atol=place.bounds(architecture).figure)


OTHER = "qwen3"
"""A reference of another family than the policy's, without experts."""


def check_parity(place: Place, layout: Layout, architecture: str, form: str) -> None:
    """Three steps, each with the gradients and figures of one process, and weights that are its own; saves on the way."""
    has_reference = architecture == "qwen3_moe"
    other = place.root / "models" / OTHER if has_reference and form == "packed" else None
    backend = place.backend(layout, architecture, needs_reference=has_reference, reference=other)
    check_logprobs(place, backend, architecture, form, "policy")
    if has_reference:
        check_logprobs(place, backend, architecture if other is None else OTHER, form, "reference")
    seen = GradientsSeen(backend)
    for version in range(NUM_STEPS):
        if version == SAVE_AFTER and form == "packed":
            save(place, backend, layout.name, architecture)
        check_step(place, backend, seen, version, form, architecture)
    check_weights(place, backend, architecture)
    check_held(backend)
    backend.close(CloseRequest())


def check_held(backend: Fsdp2Backend) -> None:
    """What is said of the parameters is what this rank has of them while FSDP has gathered them."""
    said = {name: held_elements(parameter) for name, parameter in backend.policy.named_parameters()}
    for module in backend.policy.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    assert said == {name: local(parameter).numel() for name, parameter in backend.policy.named_parameters()}
    reshard(backend.policy)


def check_step(place: Place, backend: Fsdp2Backend, seen: GradientsSeen, version: int, form: str, architecture: str) -> None:
    batch, expected, bounds = BATCHES[version], place.expected(architecture), place.bounds(architecture)
    request = step_request(microbatches(batch, backend, form), batch.counts(), version)
    request = evolve(request, logprobs=version == 0, gradient_norms=version < 2)
    result = step_in_pieces(backend, request) if version == 1 else backend.train_step(request)
    norm = expected["norms"][version]
    if version == 0:
        with place.comparing():
            own = expected["logprobs"][0].numpy()[own_places(backend)]
            np.testing.assert_allclose(np.concatenate(result.logprobs), own, atol=bounds.figure)
    with place.comparing():
        assert abs(result.loss - expected["losses"][version]) < bounds.figure
    with place.comparing():
        assert abs(result.grad_norm - norm) < bounds.figure * norm
    with place.comparing():
        assert abs(result.metrics["tokens"] - 1.0) < 1e-6
    if request.gradient_norms:
        with place.comparing():
            assert_norms(result, expected["tensor_norms"][version], bounds.figure)
    with place.comparing():
        assert_gradients(seen.tensors, expected["gradients"][version], bounds)


def check_weights(place: Place, backend: Fsdp2Backend, architecture: str) -> None:
    weights = exported(backend, NUM_STEPS)
    with place.comparing():
        assert_weights(weights, place.expected(architecture)["weights"], place.bounds(architecture))


def saved_at(root: Path, name: str, architecture: str) -> Path:
    return root / "saved" / name / architecture


def save(place: Place, backend: Fsdp2Backend, name: str, architecture: str) -> None:
    directory = saved_at(place.root, name, architecture)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(SaveStateRequest(directory=directory, kind="resume"))


def check_resume(place: Place, layout: Layout, source: str, architecture: str) -> None:
    """The step after what `source` saved is the one of one process."""
    backend = place.backend(layout, architecture)
    loaded = backend.load_state(LoadStateRequest(directory=saved_at(place.root, source, architecture)))
    assert loaded.weight_version == SAVE_AFTER
    check_step(place, backend, GradientsSeen(backend), SAVE_AFTER, "packed", architecture)
    check_weights(place, backend, architecture)
    backend.close(CloseRequest())


def resumptions(num_ranks: int, device: str) -> list[tuple[Layout, str, str]]:
    """Layout, the layout whose checkpoint it resumes, and the architecture: each from the one before, some from fewer ranks."""
    found = []
    for architecture in ("qwen3_moe", "qwen3"):
        having = [layout for layout in LAYOUTS if architecture in layout.packed and device in layout.devices]
        layouts = [layout for layout in having if layout.num_ranks == num_ranks]
        found += [(layout, layouts[index - 1].name, architecture) for index, layout in enumerate(layouts)]
        fewer = ["single", *(layout.name for layout in having if layout.num_ranks < num_ranks)]
        found += [(layout, source, architecture) for layout, source in zip(layouts, fewer[:2], strict=False)]
    return found


def cases(num_ranks: int, device: str = "cpu") -> dict[str, Callable[[Place], None]]:
    """All that so many ranks do, in order."""
    found: dict[str, Callable[[Place], None]] = {}
    for row in rows(num_ranks, device):
        found[f"parity/{label(*row)}"] = lambda place, row=row: check_parity(place, *row)
    for layout, source, architecture in resumptions(num_ranks, device):
        name = f"resume/{layout.name}-from-{source}/{architecture}"
        found[name] = lambda place, args=(layout, source, architecture): check_resume(place, *args)
    return found


def with_sources(num_ranks: int, names: Collection[str]) -> set[str]:
    """Return the names of cases, and of those that save what the cases resume."""
    found = set(names)
    for layout, source, architecture in resumptions(num_ranks, "cpu"):
        if f"resume/{layout.name}-from-{source}/{architecture}" in names:
            found.add(f"parity/{source}/{architecture}/packed")
    return found


def run_all(
    rank: int,
    num_ranks: int,
    root: Path,
    device: str = "cpu",
    dtype: str = "float32",
    names: Collection[str] | None = None,
) -> None:
    """Run the cases, or those of some names."""
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    # Each of a mesh's groups has threads that poll, and lives as long as the default group: cases of a layout share one.
    ParallelLayout.meshes = cache(ParallelLayout.meshes)  # type: ignore[method-assign]
    every = {name: case for name, case in cases(num_ranks, device).items() if names is None or name in names}

    def run(function: Callable[[Place], None]) -> str:
        place = Place(rank=rank, num_ranks=num_ranks, root=root, device=device, dtype=dtype)
        function(place)
        return "\n".join(place.wrong)

    run_rows({name: partial(run, case) for name, case in every.items()}, root / f"results-{num_ranks}-{rank}.json")
    dist.destroy_process_group()
