"""What each rank does to compare a layout with one process: LAYOUTS is the table, and one launch runs all rows of a size."""

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import asdict, evolve, field, frozen
from comparing import Comparing
from fsdp2_support import ALPHABET
from gradient_norm_cases import assert_norms, norms_of
from megatron_families import DENSE as DENSE_OWN
from megatron_families import FAMILIES, FIXED, WITH_EXPERTS, make_own
from megatron_support import (
    GRPO,
    OPTIMIZER,
    TEMPERATURE,
    WEIGHTED,
    GradientsSeen,
    Reference,
    auxiliary_backward,
    exported,
    grpo_batch,
    in_files,
    make_backend,
    make_batch,
    reference_backward,
    saved,
    split,
    step_request,
)
from multi_token_reference import expected_head, make_with_head
from rank_launch import run_rows
from routing_reference import make_mixed_model
from safetensors.torch import load_file, save_file

from rlcore.spi import CloseRequest, LogprobsRequest, LossSpec, TokenBatch
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.testing.models import make_model

ARCHITECTURES = installed_model_types()

NUM_STEPS = 3
NUM_SEQUENCES = 8
SPEC = evolve(OPTIMIZER, learning_rate=1e-4)
"""Adam divides by the gradient's own size: of one near zero float32's rounding changes the update by percents of this."""
LOSSES: Mapping[str, LossSpec] = {"weighted": WEIGHTED, "grpo": GRPO}
BATCHES = tuple(grpo_batch(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=11)) for seed in range(NUM_STEPS))


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(factory=dict)
    """Of `[trainer.megatron]`."""
    packed: tuple[str, ...] = ()
    """Architectures whose sequences come in two packed microbatches for each data-parallel rank, with GRPO's loss."""
    unpacked: tuple[str, ...] = ()
    """Architectures whose sequences come in a microbatch each, with a loss that is linear in log-probabilities and entropy."""
    auxiliary: tuple[str, ...] = ()
    """Architectures with experts whose router's losses are on."""
    mtp: tuple[str, ...] = ()
    """Architectures whose multi-token head trains too; packed as those of `packed`."""


@frozen(kw_only=True)
class Bounds:
    """How far a layout may be from one process in float32."""

    element: float
    """Most difference of any element of a weight, and where `gradient` is 0 of a gradient."""
    rounding: float = 0.0
    """Further difference of an element of a weight, relative to it."""
    gradient: float = 0.0
    """Most L2 error of a parameter's gradient, relative to its L2 norm and SMALL of all gradients'."""
    figure: float
    """Most difference of a log-probability, an entropy and a loss, and relative difference of the gradient's norm."""


SMALL = 0.02
"""Of the norm of all gradients: keys' biases, which cancel out in softmax, have gradients of rounding alone."""
FLOAT32 = Bounds(element=1e-5, figure=1e-5)
WEIGHT = 2e-5
"""Most difference of any element of a weight after all steps: Adam divides gradients of rounding alone by their own size."""
FLOAT32_CUDA = Bounds(element=5e-5, figure=5e-5)
"""Sums are taken in other orders, and Adam doubts the sign of the smallest gradients."""
BFLOAT16 = Bounds(element=2.5 * NUM_STEPS * SPEC.learning_rate, rounding=2**-8, gradient=0.1, figure=0.05)
"""bfloat16 rounds by up to 2⁻⁹ in each of some tens of products in a row. Adam's steps are about as long as its learning rate,
and may point the other way."""
BFLOAT16_EXPERTS = evolve(BFLOAT16, gradient=0.5, figure=0.3)
"""Where two experts are nearly equal it may send a token to the other one."""

EXACT = Bounds(element=0.0, figure=0.0)
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
MLA = "deepseek_v3"
WITH_HEAD = (MLA, "glm4_moe")
MOE = "qwen3_moe"
MIXED = "mixed"
"""The same with MLPs in the first half of its layers, so that the first of two stages has no experts."""
STARVED = "starved"
"""deepseek_v3, whose routers choose the first half of the experts alone: no token reaches the second of two expert ranks."""
OWN = tuple(FAMILIES)
LAYOUTS = (
    Layout(name="one", num_ranks=1, packed=(*ARCHITECTURES, *OWN), unpacked=("qwen2", MOE), auxiliary=(MOE,), mtp=WITH_HEAD),
    Layout(
        name="one+recompute", num_ranks=1, options={"recompute": "full"}, packed=("qwen3", MOE), auxiliary=(MOE,), mtp=(MLA,)
    ),
    Layout(name="tp2", num_ranks=2, options={"tensor_parallel": 2, "sequence_parallel": False}, packed=("qwen2", "qwen3")),
    Layout(
        name="tp2+sp",
        num_ranks=2,
        options={"tensor_parallel": 2},
        packed=(*ARCHITECTURES, *OWN),
        unpacked=("qwen2",),
        auxiliary=(MOE,),
        mtp=WITH_HEAD,
    ),
    Layout(name="tp2+sp+selective", num_ranks=2, options={"tensor_parallel": 2, "recompute": "selective"}, packed=("qwen3",)),
    Layout(
        name="pp2",
        num_ranks=2,
        options={"pipeline_parallel": 2},
        packed=("qwen2", "llama", "mistral", *OWN),
        unpacked=("qwen3", MOE),
        auxiliary=(MOE,),
        mtp=WITH_HEAD,
    ),
    Layout(
        name="pp2xvpp2",
        num_ranks=2,
        options={"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
        packed=("qwen3", MOE, "deepseek_v3", "gemma3_text"),
        unpacked=("llama",),
        auxiliary=(MOE,),
        mtp=(MLA,),
    ),
    Layout(
        name="pp2+uneven",
        num_ranks=2,
        options={"pipeline_parallel": 2, "pipeline_layers": (1, 3)},
        packed=("qwen2", MOE, "deepseek_v3"),
        unpacked=("qwen3",),
        auxiliary=(MOE,),
    ),
    Layout(name="dp2", num_ranks=2, packed=("qwen3", MOE), unpacked=("qwen2",), auxiliary=(MOE,), mtp=(MLA,)),
    Layout(
        name="cp2",
        num_ranks=2,
        options={"context_parallel": 2},
        packed=("qwen3", "mistral", MOE, *OWN),
        unpacked=("llama",),
        mtp=WITH_HEAD,
    ),
    Layout(
        name="ep2",
        num_ranks=2,
        options={"expert_parallel": 2},
        packed=(MOE, STARVED, *WITH_EXPERTS),
        unpacked=(MOE,),
        mtp=(MLA,),
    ),
    Layout(name="etp2", num_ranks=2, options={"tensor_parallel": 2, "expert_tensor_parallel": 2}, packed=(MOE,)),
    Layout(name="cp2xetp2", num_ranks=2, options={"context_parallel": 2, "expert_tensor_parallel": 2}, packed=(MOE,)),
    Layout(
        name="tp2xpp2",
        num_ranks=4,
        options={"tensor_parallel": 2, "pipeline_parallel": 2},
        packed=("qwen3", "mistral", MOE, *OWN),
        mtp=(MLA,),
    ),
    Layout(
        name="tp2xcp2",
        num_ranks=4,
        options={"tensor_parallel": 2, "context_parallel": 2},
        packed=("qwen2", "mistral", MOE, *DENSE_OWN),
        auxiliary=(MOE,),
    ),
    # Of two key heads, so that two ranks share each.
    Layout(name="tp4", num_ranks=4, options={"tensor_parallel": 4, "sequence_parallel": False}, packed=("qwen2", "qwen3")),
    Layout(name="tp4+sp", num_ranks=4, options={"tensor_parallel": 4}, packed=("qwen3", MOE), unpacked=("llama",)),
    Layout(name="pp2xcp2", num_ranks=4, options={"pipeline_parallel": 2, "context_parallel": 2}, packed=("llama",)),
    Layout(name="pp2xdp2", num_ranks=4, options={"pipeline_parallel": 2}, auxiliary=(MIXED,)),
    Layout(
        name="tp2xep2",
        num_ranks=4,
        options={"tensor_parallel": 2, "expert_parallel": 2},
        packed=(MOE, STARVED, *WITH_EXPERTS),
        mtp=(MLA,),
    ),
    Layout(name="ep2xcp2", num_ranks=4, options={"expert_parallel": 2, "context_parallel": 2}, packed=(MOE,)),
    Layout(
        name="pp2xvpp2xdp2",
        num_ranks=4,
        options={"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
        packed=("qwen3",),
        unpacked=("qwen2",),
    ),
    Layout(name="tp2xpp2xdp2", num_ranks=8, options={"tensor_parallel": 2, "pipeline_parallel": 2}, packed=("qwen3",)),
    Layout(
        name="tp2xpp2xcp2",
        num_ranks=8,
        options={"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2},
        packed=("qwen2",),
    ),
    Layout(
        name="tp2xpp2xep2",
        num_ranks=8,
        options={"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
        packed=(MOE,),
    ),
)
COEFFICIENTS = {
    "load_balancing_loss": 0.5,
    "seq_load_balancing_loss": 0.3,
    "global_load_balancing_loss": 0.4,
    "z_loss": 0.01,
}
AUXILIARY_OPTIONS = {
    "transformer": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.5, 0.3, 0.4],
        "moe_z_loss_coeff": 0.01,
    }
}
WORLD_SIZES = tuple(sorted({layout.num_ranks for layout in LAYOUTS}))


def rows(num_ranks: int) -> list[tuple[Layout, str, str]]:
    """Layout, architecture and form of every case of that many ranks."""
    return [
        (layout, architecture, form)
        for layout in LAYOUTS
        if layout.num_ranks == num_ranks
        for form in ("packed", "unpacked")
        for architecture in getattr(layout, form)
    ]


def label(layout: Layout, architecture: str, form: str) -> str:
    return f"{layout.name}/{architecture}/{form}"


@frozen(kw_only=True)
class Launch:
    """Of all cases of so many ranks."""

    num_ranks: int
    root: Path
    device: str = "cpu"
    dtype: str = "float32"
    engine: bool | None = None
    """Whether layers are TransformerEngine's."""
    names: Collection[str] | None = None
    """Ids of the cases that run; every case where it is empty."""

    def results(self, rank: int) -> Path:
        """What went wrong on a rank, or an empty string, by the case's name."""
        return self.root / f"results-{self.num_ranks}-{self.dtype}-{rank}.json"


loaded = cache(torch.load)
"""What many cases of a rank are compared with, read once."""


@frozen(kw_only=True)
class Place(Launch, Comparing):
    """Where a case runs, and what it is compared with."""

    rank: int

    def bounds(self, architecture: str) -> Bounds:
        if self.dtype == "float32":
            return FLOAT32 if self.device == "cpu" else FLOAT32_CUDA
        return BFLOAT16_EXPERTS if architecture in (MOE, MIXED, STARVED, *WITH_EXPERTS) else BFLOAT16

    def loss_of(self, form: str) -> str:
        """GRPO's clips at a ratio: a step in the gradient, which rounding to bfloat16 moves to other tokens."""
        return "grpo" if form == "packed" and self.dtype == "float32" else "weighted"

    def backend(self, layout: Layout, architecture: str, **options: Any) -> MegatronBackend:
        place = {"rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank, "device": self.device}
        options |= {"dtype": self.dtype, "rendezvous": "env://", "optimizer": SPEC}
        sizes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)
        engine = self.engine and architecture != "gpt_oss"  # which is refused with TransformerEngine
        config = MegatronConfig(collective_timeout_s=600.0, transformer_engine=engine, **sizes | dict(layout.options))
        return make_backend(self.root / "models" / architecture, config=config, **place, **options)

    def expected(self, architecture: str, form: str) -> Any:
        return loaded(self.root / f"{architecture}-{self.loss_of(form)}.pt")


def prepare(root: Path, **options: Any) -> None:
    """All that the ranks find in `root`; `options` of `make_model`."""
    options |= {"alphabet": ALPHABET}
    for architecture in ARCHITECTURES:
        tied = architecture in ("qwen2", "qwen3")
        make_model(root / "models" / architecture, architecture, tied=tied, num_layers=4, **options)
    for family in OWN:
        make_own(root / "models" / family, family)
    make_starved(root / "models" / STARVED)
    for architecture in (*ARCHITECTURES, STARVED, *OWN):
        for name, loss in LOSSES.items():
            torch.save(expected_steps(root / "models" / architecture, loss, root), root / f"{architecture}-{name}.pt")
    make_mixed_model(root / "models" / MIXED, range(2), **options)
    for layout in LAYOUTS:
        for architecture in layout.mtp:
            if not (root / "models" / with_head(architecture)).exists():
                make_with_head(root / "models" / with_head(architecture), architecture)
                found = expected_head(root / "models" / architecture, BATCHES, step_reference, SPEC)
                torch.save(found, root / f"{with_head(architecture)}.pt")
        for architecture in layout.auxiliary:
            file = auxiliary_file(root, architecture, data_size(layout))
            if not file.exists():
                torch.save(expected_auxiliary(root / "models" / architecture, data_size(layout)), file)


def make_starved(directory: Path) -> None:
    """Write a deepseek_v3 whose correction biases choose the first half of the experts, whatever their scores are."""
    make_own(directory, MLA)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(FIXED):
            tensor[: len(tensor) // 2] += 10.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def expected_steps(model: Path, loss: LossSpec, root: Path) -> dict[str, Any]:
    """Log-probabilities before, and gradients of each step and weights after all, of plain transformers in one process."""
    reference = Reference(model, SPEC)
    with torch.no_grad():
        logprobs = reference.logprobs(BATCHES[0])
    losses, norms, gradients = [], [], []
    for batch in BATCHES:
        losses.append(reference_backward(reference, batch, loss))
        gradients.append(in_files(reference.model, reference.gradients()))
        norms.append(torch.nn.utils.clip_grad_norm_(reference.model.parameters(), SPEC.max_grad_norm).item())
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    weights = reference.saved(root / f"{model.name}-saved")
    return {"logprobs": logprobs, "losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def with_head(architecture: str) -> str:
    return f"{architecture}-with-head"


def step_reference(reference: Reference, batch: TokenBatch) -> None:
    reference_backward(reference, batch, GRPO)
    torch.nn.utils.clip_grad_norm_(reference.model.parameters(), SPEC.max_grad_norm)
    reference.optimizer.step()
    reference.optimizer.zero_grad()


def sequences_of(backend: MegatronBackend) -> list[int]:
    """What a data-parallel rank trains on."""
    return list(range(backend.layout.data_parallel_rank, NUM_SEQUENCES, backend.layout.data_parallel_size))


def own_places(backend: MegatronBackend) -> np.ndarray:
    """Which of the tokens of the first step's batch are a data-parallel rank's."""
    offsets = BATCHES[0].offsets
    return np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in sequences_of(backend)])


def microbatches(batch: TokenBatch, backend: MegatronBackend, form: str) -> tuple[TokenBatch, ...]:
    mine = sequences_of(backend)
    groups = [mine[:1], mine[1:]] if form == "packed" else [[sequence] for sequence in mine]
    return split(batch, groups)


def assert_elements(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], bounds: Bounds) -> None:
    assert found.keys() == expected.keys()
    excess = {
        name: float(((found[name].cpu() - tensor).abs() - bounds.rounding * tensor.abs()).max())
        for name, tensor in expected.items()
    }
    wrong = {name: error for name, error in excess.items() if not error <= bounds.element}
    assert not wrong, wrong


def assert_gradients(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], bounds: Bounds) -> None:
    if not bounds.gradient:
        assert_elements(found, expected, bounds)
        return
    assert found.keys() == expected.keys()
    small = SMALL * torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    errors = {name: float((found[name].cpu() - tensor).norm() / (tensor.norm() + small)) for name, tensor in expected.items()}
    wrong = {name: error for name, error in errors.items() if not error <= bounds.gradient}
    assert not wrong, wrong


def check_logprobs(place: Place, backend: MegatronBackend, expected: Any, form: str, model: str, bound: float) -> None:
    """Every rank gets those of all its tokens, and the entropies."""
    batch = BATCHES[0]
    places = own_places(backend)
    request = LogprobsRequest(
        microbatches=microbatches(batch, backend, form), model=model, temperature=TEMPERATURE, entropy=True, weight_version=0
    )
    result = backend.get_logprobs(request)
    for found, wanted in zip((result.logprobs, result.entropy), expected["logprobs"], strict=True):
        with place.comparing():
            np.testing.assert_allclose(np.concatenate(found), wanted.numpy()[places], atol=bound)


OTHER = "qwen3"
"""A reference of another family than the policy's, without experts."""


def check_parity(place: Place, layout: Layout, architecture: str, form: str) -> None:
    """Three steps, each with the gradients and figures of one process, and weights that are its own."""
    has_reference = architecture == MOE
    bounds, expected = place.bounds(architecture), place.expected(architecture, form)
    other = place.root / "models" / OTHER if has_reference and form == "packed" else None
    backend = place.backend(layout, architecture, needs_reference=has_reference, reference=other)
    check_logprobs(place, backend, expected, form, "policy", bounds.figure)
    if has_reference:
        of_reference = expected if other is None else place.expected(OTHER, form)
        check_logprobs(place, backend, of_reference, form, "reference", bounds.figure)
    seen = GradientsSeen(backend)
    for version, batch in enumerate(BATCHES):
        loss = LOSSES[place.loss_of(form)]
        request = step_request(microbatches(batch, backend, form), batch.counts(), version, loss)
        request = evolve(request, logprobs=version == 0, gradient_norms=version < 2)
        result = step_in_pieces(backend, request) if version == 1 else backend.train_step(request)
        if version == 0:
            with place.comparing():
                np.testing.assert_allclose(
                    np.concatenate(result.logprobs), expected["logprobs"][0].numpy()[own_places(backend)], atol=bounds.figure
                )
        loss_error = abs(result.loss - expected["losses"][version])
        norm_error = abs(result.grad_norm - expected["norms"][version])
        with place.comparing():
            assert loss_error < bounds.figure
        with place.comparing():
            assert norm_error < bounds.figure * max(1.0, expected["norms"][version])
        if request.gradient_norms:
            with place.comparing():
                assert_norms(result, norms_of(expected["gradients"][version]), bounds.figure)
        with place.comparing():
            assert_gradients(seen.tensors, expected["gradients"][version], bounds)
    weights = exported(backend, NUM_STEPS)
    with place.comparing():
        assert_elements(weights, expected["weights"], evolve(bounds, element=max(bounds.element, WEIGHT)))
    backend.close(CloseRequest())


def data_size(layout: Layout) -> int:
    """Data-parallel ranks."""
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    return layout.num_ranks // math.prod(layout.options.get(name, 1) for name in names)


def auxiliary_parts(rank: int, num_ranks: int) -> tuple[TokenBatch, ...]:
    """A data-parallel rank's microbatches: of different sizes, not as many as stages, and shorter than the other ranks'."""
    mine = list(range(rank, NUM_SEQUENCES, num_ranks))
    return split(BATCHES[0], [mine[:1], mine[1:3], mine[3:]])


def auxiliary_file(root: Path, architecture: str, num_data_ranks: int) -> Path:
    return root / f"{architecture}-auxiliary-{num_data_ranks}.pt"


def expected_auxiliary(model: Path, num_data_ranks: int) -> dict[str, Any]:
    reference = Reference(model, SPEC)
    reference_backward(reference, BATCHES[0], WEIGHTED)
    dealt = [auxiliary_parts(rank, num_data_ranks) for rank in range(num_data_ranks)]
    means = auxiliary_backward(reference, list(zip(*dealt, strict=True)), COEFFICIENTS)
    return {"gradients": in_files(reference.model, reference.gradients()), "means": means}


def check_auxiliary(place: Place, layout: Layout, architecture: str) -> None:
    """The router's losses add the gradients of their formulas, and every rank reports their values."""
    backend = place.backend(evolve(layout, options={**layout.options, **AUXILIARY_OPTIONS}), architecture)
    expected = loaded(auxiliary_file(place.root, architecture, data_size(layout)))
    seen, bounds = GradientsSeen(backend), place.bounds(architecture)
    parts = auxiliary_parts(backend.layout.data_parallel_rank, backend.layout.data_parallel_size)
    result = backend.train_step(step_request(parts, BATCHES[0].counts()))
    with place.comparing():
        assert_gradients(seen.tensors, expected["gradients"], bounds)
    errors = {name: abs(result.metrics[name] - mean) for name, mean in expected["means"].items()}
    with place.comparing():
        assert max(errors.values()) < bounds.figure, errors
    backend.close(CloseRequest())


def check_mtp(place: Place, layout: Layout, architecture: str) -> None:
    """The policy trains as it does without a head, and the head by its formula; the files have both."""
    trunk, bounds = place.expected(architecture, "packed"), place.bounds(architecture)
    head = loaded(place.root / f"{with_head(architecture)}.pt")
    backend = place.backend(evolve(layout, options={**layout.options, "mtp": True}), with_head(architecture))
    before = saved(backend)
    with place.comparing():
        files = load_file(place.root / "models" / with_head(architecture) / "model.safetensors")
        dtype = getattr(torch, place.dtype)
        held = {name: tensor if name.endswith(FIXED) else tensor.to(dtype).float() for name, tensor in files.items()}
        assert_elements(before, held, EXACT)
    mine = sequences_of(backend)
    groups = [mine[:1], mine[1:2], mine[2:]]  # as many as interleaved stages fill up
    seen = GradientsSeen(backend, saved)
    for version, batch in enumerate(BATCHES):
        request = step_request(split(batch, groups), batch.counts(), version, LOSSES[place.loss_of("packed")])
        request = evolve(request, gradient_norms=version < 2)
        result = step_in_pieces(backend, request) if version == 1 else backend.train_step(request)
        figures = (result.loss, trunk["losses"]), (result.grad_norm, trunk["norms"])
        of_head = (result.metrics["mtp_loss"], head["losses"]), (result.metrics["mtp_grad_norm"], head["norms"])
        with place.comparing():
            for found, expected in (*figures, *of_head):
                assert abs(found - expected[version]) < bounds.figure * max(1.0, expected[version])
        if request.gradient_norms:
            with place.comparing():
                assert_norms(result, norms_of(trunk["gradients"][version]), bounds.figure)
        copies = {name: tensor.cpu() for name, tensor in seen.tensors.items() if name.endswith(COPIES)}
        with place.comparing():
            assert_gradients(seen.tensors, {**trunk["gradients"][version], **head["gradients"][version], **copies}, bounds)
    with place.comparing():
        refit = exported(backend, NUM_STEPS)
        assert refit.keys() == trunk["weights"].keys()
        weights = {**trunk["weights"], **head["weights"]}
        assert_elements(saved(backend, NUM_STEPS), weights, evolve(bounds, element=max(bounds.element, WEIGHT)))
    backend.close(CloseRequest())


def cases(num_ranks: int) -> dict[str, Callable[[Place], None]]:
    """All that so many ranks do, in order."""
    found = {label(*row): lambda place, row=row: check_parity(place, *row) for row in rows(num_ranks)}
    for layout in LAYOUTS:
        for architecture in layout.auxiliary if layout.num_ranks == num_ranks else ():
            found[label(layout, architecture, "auxiliary")] = lambda place, row=(layout, architecture): check_auxiliary(
                place, *row
            )
        for architecture in layout.mtp if layout.num_ranks == num_ranks else ():
            found[label(layout, architecture, "mtp")] = lambda place, row=(layout, architecture): check_mtp(place, *row)
    return found


def run_all(rank: int, launch: Launch) -> None:
    """Run the cases."""
    torch.set_num_threads(1)
    backend = "gloo"
    if launch.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    file = launch.root / f"rendezvous-{launch.num_ranks}-{launch.dtype}"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=launch.num_ranks)
    every = {name: case for name, case in cases(launch.num_ranks).items() if launch.names is None or name in launch.names}

    def run(function: Callable[[Place], None]) -> str:
        place = Place(rank=rank, **asdict(launch))
        function(place)
        return "\n".join(place.wrong)

    rows = {name: partial(run, function) for name, function in every.items()}
    run_rows(rows, launch.results(rank), alone=launch.num_ranks == 1)
    dist.destroy_process_group()
