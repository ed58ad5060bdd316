"""What each rank does to compare models of images in a layout with one process: ROWS is the table, one launch for each size."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from attrs import asdict, evolve, field, frozen
from comparing import Comparing
from fsdp2_support import OPTIMIZER, TEMPERATURE, exported, split, step_request
from gradient_norm_cases import assert_norms, norms_of
from image_support import ImageReference, image_batch
from megatron_layout_cases import (
    BFLOAT16,
    FLOAT32,
    FLOAT32_CUDA,
    WEIGHT,
    Bounds,
    assert_elements,
    assert_gradients,
)
from megatron_support import GradientsSeen, in_files, make_backend
from rank_launch import run_rows

from rlcore.spi import CloseRequest, LogprobsRequest, TokenBatch
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.modules.model import unwrapped
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.forward import image_forward
from rlcore_torchkit.testing.image_models import make_image_model

NUM_STEPS, NUM_SEQUENCES = 3, 6
SPEC = evolve(OPTIMIZER, learning_rate=1e-4)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ROUNDED = ("k_proj.bias", "qkv.bias")
"""Of which a part has gradients of rounding alone, by whose size Adam divides them."""


@frozen(kw_only=True)
class Row:
    """A row of the table."""

    layout: str
    num_ranks: int
    family: str = "qwen3_vl"
    options: Mapping[str, Any] = field(factory=dict)
    """Of `[trainer.megatron]`."""

    @property
    def frozen(self) -> bool:
        return self.options.get("freeze") == "vision"

    @property
    def name(self) -> str:
        return f"{self.layout}/{self.family}"


TP2, PP2, CP2 = ({f"{name}_parallel": 2} for name in ("tensor", "pipeline", "context"))
FROZEN = {"freeze": "vision"}
ROWS = (
    *(Row(layout="one", num_ranks=1, family=family) for family in FAMILIES),
    Row(layout="one+frozen", num_ranks=1, options=FROZEN),
    Row(layout="one+recompute", num_ranks=1, options={"recompute": "full"}),
    Row(layout="tp2", num_ranks=2, options={**TP2, "sequence_parallel": False}),
    *(Row(layout="tp2+sp", num_ranks=2, family=family, options=TP2) for family in FAMILIES),
    Row(layout="tp2+sp+recompute", num_ranks=2, options={**TP2, "recompute": "full"}),
    *(Row(layout="pp2", num_ranks=2, family=family, options=PP2) for family in FAMILIES),
    Row(layout="pp2+frozen", num_ranks=2, options={**PP2, **FROZEN}),
    Row(layout="pp2xvpp2", num_ranks=2, family="qwen2_5_vl", options={**PP2, "virtual_pipeline_parallel": 2}),
    Row(layout="dp2", num_ranks=2),
    *(Row(layout="cp2", num_ranks=2, family=family, options=CP2) for family in FAMILIES),
    Row(layout="tp2xpp2", num_ranks=4, options={**TP2, **PP2}),
    Row(layout="tp2xcp2", num_ranks=4, options={**TP2, **CP2}),
    Row(layout="tp2xdp2", num_ranks=4, options=TP2),
    Row(layout="pp2xdp2", num_ranks=4, family="qwen2_5_vl", options=PP2),
)


@frozen(kw_only=True)
class Launch:
    """Of all rows of so many ranks."""

    num_ranks: int
    root: Path
    device: str = "cpu"
    dtype: str = "float32"
    names: Collection[str]

    def results(self, rank: int) -> Path:
        return self.root / f"image-results-{self.num_ranks}-{self.dtype}-{rank}.json"


@frozen(kw_only=True)
class Place(Launch, Comparing):
    """Where a row runs, and what it is compared with."""

    rank: int

    @property
    def bounds(self) -> Bounds:
        if self.dtype == "bfloat16":
            return evolve(BFLOAT16, gradient=0.3)  # the tower's layers round before the decoder's do, and behind them
        return FLOAT32 if self.device == "cpu" else FLOAT32_CUDA

    def backend(self, row: Row) -> MegatronBackend:
        place = {"rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank, "device": self.device}
        place |= {"dtype": self.dtype}
        sizes = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), 1)
        config = MegatronConfig(collective_timeout_s=600.0, **{**sizes, **row.options})
        return make_backend(model_of(self.root, row.family), config=config, rendezvous="env://", optimizer=SPEC, **place)


def model_of(root: Path, family: str) -> Path:
    return root / "models" / family


def prepare(root: Path) -> None:
    """All that the ranks find in `root`."""
    for family in FAMILIES:
        directory = make_image_model(model_of(root, family), family, hidden_size=128, num_layers=4, seed=1)
        for is_frozen in {row.frozen for row in ROWS if row.family == family}:
            torch.save(expected_steps(directory, is_frozen, root), expected_file(root, family, is_frozen))


def expected_file(root: Path, family: str, is_frozen: bool) -> Path:
    return root / f"{family}-{is_frozen}.pt"


def batches(directory: Path) -> list[TokenBatch]:
    """Sequences of which every second has images: of two data-parallel ranks one has none."""
    return [image_batch(directory, seed) for seed in range(NUM_STEPS)]


def expected_steps(directory: Path, is_frozen: bool, root: Path) -> dict[str, Any]:
    """Log-probabilities before, and gradients of each step and weights after all, of plain transformers in one process."""
    reference = ImageReference(directory, SPEC, frozen="visual" if is_frozen else None)
    steps = batches(directory)
    with torch.no_grad():
        logprobs = reference.logprobs(steps[0])[0]
    losses, norms, gradients = [], [], []
    for batch in steps:
        losses.append(reference.backward(batch))
        gradients.append(in_files(reference.model, reference.gradients()))
        norms.append(torch.nn.utils.clip_grad_norm_(reference.model.parameters(), SPEC.max_grad_norm).item())
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    weights = reference.saved(root / f"{directory.name}-{is_frozen}-saved")
    return {"logprobs": logprobs, "losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def microbatches(batch: TokenBatch, backend: MegatronBackend) -> tuple[TokenBatch, ...]:
    """Two of each data-parallel rank: with and without images."""
    mine = own_sequences(backend)
    return split(batch, [mine[:2], mine[2:]])


def own_sequences(backend: MegatronBackend) -> list[int]:
    return list(range(backend.layout.data_parallel_rank, NUM_SEQUENCES, backend.layout.data_parallel_size))


def check_row(place: Place, row: Row) -> None:
    """Log-probabilities, three steps with the gradients and figures of one process, and weights that are its own; those of the
    tower on each rank that holds it."""
    decoded: list[bytes] = []
    decode = image_forward.decode_image
    with patch.object(image_forward, "decode_image", lambda file: (decoded.append(file), decode(file))[1]):
        reads_pixels = compare_row(place, row)
    with place.comparing():
        assert bool(decoded) == reads_pixels, "of a pipeline's stages the first alone decodes images"


def compare_row(place: Place, row: Row) -> bool:
    """Compare, and return whether this rank holds the tower and has sequences with images."""
    bounds = place.bounds
    expected = torch.load(expected_file(place.root, row.family, row.frozen))
    backend, steps = place.backend(row), batches(model_of(place.root, row.family))
    before = exported(backend)
    first = microbatches(steps[0], backend)
    request = LogprobsRequest(microbatches=first, model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    offsets, sequences = steps[0].offsets, own_sequences(backend)
    places = np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in sequences])
    found = np.concatenate(backend.get_logprobs(request).logprobs)
    with place.comparing():
        np.testing.assert_allclose(found, expected["logprobs"].numpy()[places], atol=bounds.figure)
    seen = GradientsSeen(backend)
    for version, batch in enumerate(steps):
        request = step_request(microbatches(batch, backend), batch.counts(), version)
        request = evolve(request, gradient_norms=version < 2)
        result = step_in_pieces(backend, request) if version == 1 else backend.train_step(request)
        norm = expected["norms"][version]
        with place.comparing():
            assert abs(result.loss - expected["losses"][version]) < bounds.figure
        with place.comparing():
            assert abs(result.grad_norm - norm) < bounds.figure * max(1.0, norm)
        if request.gradient_norms:
            with place.comparing():
                assert_norms(result, norms_of(expected["gradients"][version]), bounds.figure)
        gradients = {name: tensor for name, tensor in seen.tensors.items() if not (row.frozen and "visual" in name)}
        with place.comparing():
            assert_gradients(gradients, expected["gradients"][version], bounds)
    after, wanted = exported(backend, NUM_STEPS), expected["weights"]
    vision = {name for name in after if "visual" in name}
    with place.comparing():
        assert vision
        assert all(torch.equal(after[name], before[name]) for name in vision) == row.frozen
    compared = [name for name in wanted if not name.endswith(ROUNDED)]
    with place.comparing():
        assert after.keys() == wanted.keys()
        ours, theirs = ({name: tensors[name] for name in compared} for tensors in (after, wanted))
        assert_elements(ours, theirs, evolve(bounds, element=max(bounds.element, WEIGHT)))
    check_own_tower(place, backend, after)
    reads_pixels = unwrapped(backend.models)[0].vision is not None and any(
        batch.images is not None and batch.images[number] for batch in steps for number in sequences
    )
    backend.close(CloseRequest())
    return reads_pixels


def check_own_tower(place: Place, backend: MegatronBackend, after: Mapping[str, torch.Tensor]) -> None:
    """Each rank of the first stage holds the tower that is exported, to the bit."""
    chunk = unwrapped(backend.models)[0]
    with place.comparing():
        assert (chunk.vision is None) == (not chunk.pre_process)
    if chunk.vision is not None:
        own = dict(chunk.vision.named_parameters())
        different = [name for name, parameter in own.items() if not torch.equal(parameter.float(), _stored(after, name))]
        with place.comparing():
            assert not different, different


def _stored(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[name] if name in tensors else tensors[f"model.{name}"]


def run_all(rank: int, launch: Launch) -> None:
    """Run the rows."""
    torch.set_num_threads(1)
    backend = "gloo"
    if launch.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    file = launch.root / f"image-rendezvous-{launch.num_ranks}-{launch.dtype}"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=launch.num_ranks)

    def run(row: Row) -> str:
        place = Place(rank=rank, **asdict(launch))
        check_row(place, row)
        return "\n".join(place.wrong)

    rows = {row.name: partial(run, row) for row in ROWS if row.num_ranks == launch.num_ranks and row.name in launch.names}
    run_rows(rows, launch.results(rank), alone=launch.num_ranks == 1)
    dist.destroy_process_group()
