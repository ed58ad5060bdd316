"""What each rank does to compare adapters in a layout with plain transformers, whatever the trainer."""

import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from fsdp2_support import ALPHABET, TEMPERATURE, exported, split, step_request
from gradient_norm_cases import adapter_norms, assert_norms
from lora_support import (
    BATCHES,
    NUM_SEQUENCES,
    NUM_STEPS,
    SPEC,
    LoraReference,
    assert_adapters,
    lora_context,
    write_adapter,
)
from rank_launch import launch, once
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.spi import (
    CloseRequest,
    LogprobsRequest,
    OptimStepRequest,
    SaveStateRequest,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
    UseAdapterRequest,
)
from rlcore_conformance.trainers.pieces import piece_of
from rlcore_torchkit.testing.models import make_model

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe")
SAVE_AFTER = 2
MakeBackend = Callable[[TrainerContext, Mapping[str, Any]], Any]


@frozen(kw_only=True)
class Layout:
    """A row of the table."""

    name: str
    num_ranks: int
    options: Mapping[str, Any] = field(factory=dict)
    """Of the trainer's section."""
    architectures: tuple[str, ...]
    dropout: float = 0.0
    """Where it is not 0, the microbatches are those of one process."""


def cases(layouts: Sequence[Layout]) -> list[tuple[int, str]]:
    """Number of ranks and name of every case."""
    return [(layout.num_ranks, f"{layout.name}/{name}") for layout in layouts for name in layout.architectures]


def prepare(root: Path) -> None:
    """Models, adapters to begin with, and what plain transformers makes of these."""
    for name in ARCHITECTURES:
        layers = 4 if name == "qwen2" else 2
        make_model(root / "models" / name, name, tied=name != "qwen3_moe", num_layers=layers, alphabet=ALPHABET)
        prepare_adapters(root, name)


def prepare_adapters(root: Path, name: str) -> None:
    """Adapters for a model of that name, and what plain transformers makes of them."""
    model = root / "models" / name
    reference = LoraReference(model, write_adapter(root / f"{name}-adapter", model))
    (root / f"{name}-norms.json").write_text(json.dumps(adapter_norms(reference, BATCHES[0])))
    for batch in BATCHES:
        reference.step(batch)
    save_file({key: tensor.contiguous() for key, tensor in reference.adapters().items()}, root / f"{name}.safetensors")
    save_file({f"{key}.weight": tensor for key, tensor in reference.merged().items()}, root / f"{name}-merged.safetensors")


def results_of(root: Path, run: Callable[..., None], names: Collection[str]) -> Callable[[int], list[dict[str, str]]]:
    """Return a function that launches a number of ranks once for cases of these names. It returns each rank's failures."""

    @once
    def get(num_ranks: int) -> list[dict[str, str]]:
        launch(run, (num_ranks, root, names), num_ranks)
        return [json.loads((root / f"results-{num_ranks}-{rank}.json").read_text()) for rank in range(num_ranks)]

    return get


@cache
def expected(root: Path, name: str) -> Mapping[str, Tensor]:
    return load_file(root / f"{name}.safetensors")


def selected(layouts: Sequence[Layout], num_ranks: int, names: Collection[str]) -> list[tuple[Layout, str]]:
    """Return layout and architecture of each case of so many ranks that has one of these names."""
    pairs = [(layout, name) for layout in layouts if layout.num_ranks == num_ranks for name in layout.architectures]
    return [(layout, name) for layout, name in pairs if f"{layout.name}/{name}" in names]


def run_layouts(
    rank: int, num_ranks: int, root: Path, names: Collection[str], layouts: Sequence[Layout], make: MakeBackend
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{num_ranks}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    results = {}
    for layout, architecture in selected(layouts, num_ranks, names):
        try:
            _check(rank, root, layout, architecture, make)
            results[f"{layout.name}/{architecture}"] = ""
        except Exception:
            results[f"{layout.name}/{architecture}"] = traceback.format_exc()
        dist.barrier()
    (root / f"results-{num_ranks}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _check(rank: int, root: Path, layout: Layout, architecture: str, make: MakeBackend) -> None:
    """Nothing is asserted before the last collective: a rank that left would leave the others waiting."""
    spec = evolve(SPEC, init_from=str(root / f"{architecture}-adapter"), dropout=layout.dropout)
    place = {"rank": rank, "world_size": layout.num_ranks, "local_rank": rank, "rendezvous": "env://"}
    context = lora_context(root / "models" / architecture, spec, needs_reference=True, **place)
    backend = make(context, layout.options)
    directory = root / f"{layout.name}-{architecture}"
    before, results = [_logprobs(backend, model, 0) for model in ("policy", "reference")], []
    for version in range(NUM_STEPS):
        if version == SAVE_AFTER:
            _save(backend, directory / "resume", "resume")
        batch = BATCHES[version]
        request = step_request(_share(batch, backend), batch.counts(), version)
        if version == 1:
            _step_around_another(backend, request)
        else:
            results.append(backend.train_step(evolve(request, gradient_norms=version == 0)))
    reference, policy = (_logprobs(backend, model, NUM_STEPS) for model in ("reference", "policy"))
    merged = exported(backend, NUM_STEPS)
    _save(backend, directory / "peft", "peft")
    backend.close(CloseRequest())
    key = f"{architecture}-dropout" if layout.dropout else architecture
    assert_adapters(load_file(directory / "peft" / "adapter_model.safetensors"), expected(root, key))
    if not layout.dropout:
        assert_norms(results[0], json.loads((root / f"{architecture}-norms.json").read_text()))
        weights = expected(root, f"{architecture}-merged")
        assert_adapters({name: merged[name] for name in weights}, weights)
    assert max(float(np.abs(after - initial).max()) for after, initial in zip(reference, before[1], strict=True)) == 0.0
    assert max(float(np.abs(policy - begun).max()) for policy, begun in zip(*before, strict=True)) == 0.0
    assert max(float(np.abs(now - begun).max()) for now, begun in zip(policy, reference, strict=True)) > 1e-3


def _step_around_another(backend: Any, request: TrainStepRequest) -> None:
    """Make a step in two pieces, between which another adapter trains."""
    first, second = request.microbatches
    backend.forward_backward(piece_of(request, (first,), 0))
    backend.use_adapter(UseAdapterRequest(name="other", seed=9))
    batch = BATCHES[0]
    backend.train_step(step_request(_share(batch, backend), batch.counts(), 0))
    backend.use_adapter(UseAdapterRequest(name=""))
    backend.forward_backward(piece_of(request, (second,), 1))
    backend.optim_step(OptimStepRequest(pieces=2, weight_version=request.weight_version))


def _share(batch: TokenBatch, backend: Any) -> tuple[TokenBatch, ...]:
    """Two packed microbatches of the data-parallel rank's sequences; of one that is alone, those of one process."""
    rank, size = backend.layout.data_parallel_rank, backend.layout.data_parallel_size
    mine = list(range(rank, NUM_SEQUENCES, size))
    return split(batch, [mine[:1], mine[1:]])


def assert_reference_is_the_beginning(root: Path, backend: Any, version: int) -> None:
    """Of a Qwen3 backend at this version: the model with the adapters that its run began with, in float64."""
    expected, _ = LoraReference(root / "models" / "qwen3", root / "qwen3-adapter").logprobs(BATCHES[0])
    (found,) = backend.get_logprobs(
        LogprobsRequest(
            microbatches=(BATCHES[0],), model="reference", temperature=TEMPERATURE, entropy=False, weight_version=version
        )
    ).logprobs
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=0, atol=1e-4)


def _logprobs(backend: Any, model: str, version: int) -> tuple[np.ndarray, ...]:
    request = LogprobsRequest(
        microbatches=_share(BATCHES[0], backend), model=model, temperature=TEMPERATURE, entropy=False, weight_version=version
    )
    return backend.get_logprobs(request).logprobs


def _save(backend: Any, directory: Path, kind: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(SaveStateRequest(directory=directory, kind=kind))
    dist.barrier()
