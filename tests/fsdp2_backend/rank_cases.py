"""Checks of adapters of a smaller rank than the recipe's, whatever the trainer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from fsdp2_support import ALPHABET, TEMPERATURE, split, step_request
from lora_support import BATCHES, CONFIG, NUM_STEPS, OPTIMIZER, TENSORS, assert_adapters, lora_context, saved_adapters
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlcore.spi import (
    CloseRequest,
    ExportWeightsRequest,
    LoadStateRequest,
    LogprobsRequest,
    LoraSpec,
    OptimizerSpec,
    SaveStateRequest,
    TrainerContext,
    UseAdapterRequest,
)
from rlcore_torchkit.testing.models import make_model

Make = Callable[[TrainerContext], Any]
SPEC = LoraSpec(rank=64, alpha=6.0)
RANK, SEED = 5, 7
SMALL = evolve(SPEC, rank=RANK)


@frozen(kw_only=True)
class Case:
    """An optimizer, and how far a smaller rank is from a recipe of that rank."""

    optimizer: OptimizerSpec
    most: float = 1e-6


CASES = {
    "adamw": Case(optimizer=OPTIMIZER),
    "8bit": Case(optimizer=evolve(OPTIMIZER, moments="8bit"), most=3e-3),  # at RANK too few elements for 8 bits
    "muon": Case(optimizer=evolve(OPTIMIZER, name="muon")),
}


def make_rank_model(directory: Path) -> Path:
    """A model whose adapters of SPEC have enough elements for moments in 8 bits."""
    return make_model(directory, hidden_size=64, num_layers=2, alphabet=ALPHABET)


def context_of(model: Path, case: Case, spec: LoraSpec = SPEC, **options: Any) -> TrainerContext:
    return evolve(lora_context(model, spec, optimizer=case.optimizer, **options), seed=SEED)


def train(backend: Any, first: int = 0, last: int = NUM_STEPS) -> None:
    for version in range(first, last):
        batch = BATCHES[version]
        backend.train_step(step_request(split(batch, [[0, 1, 2], [3, 4, 5, 6, 7]]), batch.counts(), version))


def begin(backend: Any, name: str = "small", rank: int | None = RANK) -> None:
    backend.use_adapter(UseAdapterRequest(name=name, seed=SEED, rank=rank))


def export_of(backend: Any, version: int, adapters: str) -> dict[str, torch.Tensor]:
    request = ExportWeightsRequest(weight_version=version, dtype="float32", max_bucket_bytes=2**20, adapters=adapters)
    buckets = backend.export_weights(request).buckets
    return {named.name: named.tensor.clone() for bucket in buckets for named in bucket.tensors}


def logprobs_of(backend: Any, version: int) -> np.ndarray:
    request = LogprobsRequest(
        microbatches=(BATCHES[0],), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=version
    )
    return backend.get_logprobs(request).logprobs[0]


def save(backend: Any, directory: Path, kind: str = "resume") -> Path:
    directory.mkdir()
    backend.save_state(SaveStateRequest(directory=directory, kind=kind))
    return directory


def check_equals_a_recipe_of_that_rank(make: Make, model: Path, case: Case, tmp_path: Path) -> None:
    """Rows behind the rank stay zero to the bit, and those before it train as where the recipe has that rank."""
    alone = make(context_of(model, case, SMALL))
    train(alone)
    expected, logprobs = saved_adapters(alone, tmp_path / "alone"), logprobs_of(alone, NUM_STEPS)
    merged = export_of(alone, NUM_STEPS, "merged")
    alone.close(CloseRequest())
    backend = make(context_of(model, case))
    begin(backend)
    train(backend)
    apart = export_of(backend, NUM_STEPS, "alone")
    for name, factor in apart.items():
        behind = factor[RANK:] if name.endswith("lora_A.weight") else factor[:, RANK:]
        assert torch.equal(behind, torch.zeros_like(behind)), name
        assert factor.count_nonzero() == factor.numel() - behind.numel(), name
    assert_adapters(saved_adapters(backend, tmp_path / "small"), expected, case.most)
    assert json.loads((tmp_path / "small" / CONFIG).read_text()) == json.loads((tmp_path / "alone" / CONFIG).read_text())
    np.testing.assert_allclose(logprobs_of(backend, NUM_STEPS), logprobs, rtol=0, atol=1000 * case.most)
    assert_adapters(export_of(backend, NUM_STEPS, "merged"), merged, 10 * case.most)
    backend.close(CloseRequest())


def check_exports_agree(make: Make, model: Path, tmp_path: Path) -> None:
    """Merged weights, factors apart at the recipe's scale, and PEFT's own model compute the same."""
    backend = make(context_of(model, CASES["adamw"]))
    begin(backend)
    train(backend)
    base, apart, merged = (
        load_file(model / "model.safetensors"),
        *(export_of(backend, NUM_STEPS, adapters) for adapters in ("apart", "merged")),
    )
    for name in {key.partition(".lora_")[0] for key in apart if ".lora_" in key}:
        product = SPEC.scale * apart[f"{name}.lora_B.weight"] @ apart[f"{name}.lora_A.weight"]
        torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + product, rtol=0, atol=1e-6)
    found = logprobs_of(backend, NUM_STEPS)
    with_peft = peft_logprobs(model, save(backend, tmp_path / "peft", "peft"))
    np.testing.assert_allclose(found, with_peft, rtol=0, atol=1e-5)
    backend.close(CloseRequest())


def peft_logprobs(model: Path, adapter: Path) -> np.ndarray:
    """Log-probabilities of the first batch by PEFT's own model in float64."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    loaded, batch = peft.PeftModel.from_pretrained(base, adapter).double(), BATCHES[0]
    parts = []
    for first, last in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[first:last]).long()
        table = torch.log_softmax(loaded(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
        parts.append(np.concatenate([[0.0], table.gather(1, tokens[1:, None])[:, 0].detach().numpy()]))
    return np.concatenate(parts)


def check_rank_is_remembered(make: Make, model: Path, tmp_path: Path) -> None:
    """The rank is kept by an adapter that others took turns with, and by a checkpoint that another adapter or trainer loads."""
    backend = make(context_of(model, CASES["adamw"]))
    begin(backend)
    train(backend, 0, 1)
    directory, before = save(backend, tmp_path / "resume"), logprobs_of(backend, 1)
    for name, rank in (("whole", None), ("one", 1)):
        begin(backend, name, rank)
        train(backend, 0, 1)
    backend.use_adapter(UseAdapterRequest(name="small"))
    np.testing.assert_array_equal(logprobs_of(backend, 1), before)
    train(backend, 1)
    expected = saved_adapters(backend, tmp_path / "expected")
    backend.use_adapter(UseAdapterRequest(name="whole"))
    backend.load_state(LoadStateRequest(directory=directory))
    train(backend, 1)
    assert_adapters(saved_adapters(backend, tmp_path / "loaded"), expected, 0.0)
    assert ranks_of(expected) == {RANK}
    backend.use_adapter(UseAdapterRequest(name="one"))
    assert ranks_of(saved_adapters(backend, tmp_path / "one")) == {1}
    backend.close(CloseRequest())
    other = make(context_of(model, CASES["adamw"]))
    other.load_state(LoadStateRequest(directory=directory))
    train(other, 1)
    assert_adapters(saved_adapters(other, tmp_path / "other"), expected, 0.0)
    other.close(CloseRequest())


def ranks_of(adapters: Mapping[str, torch.Tensor]) -> set[int]:
    return {min(tensor.shape) for tensor in adapters.values()}


def run_layout(rank: int, num_ranks: int, root: Path, make: Callable[[TrainerContext, str], Any], layout: str) -> None:
    """Trains and saves an adapter of a smaller rank on each rank."""
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{layout}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": num_ranks, "local_rank": rank, "rendezvous": "env://"}
    backend = make(context_of(root / "model", CASES["adamw"], **place), layout)
    begin(backend)
    mine, size = backend.layout.data_parallel_rank, backend.layout.data_parallel_size
    for version, batch in enumerate(BATCHES):
        own = [number for number in range(8) if number % size == mine]
        backend.train_step(step_request(split(batch, [own[:2], own[2:]]), batch.counts(), version))
    factors = export_of(backend, NUM_STEPS, "alone")
    (root / layout).mkdir(exist_ok=True)
    backend.save_state(SaveStateRequest(directory=root / layout, kind="peft"))
    if rank == 0:
        save_file(factors, root / layout / "factors.safetensors")
    backend.close(CloseRequest())


def check_layout(root: Path, layout: str, expected: Mapping[str, torch.Tensor]) -> None:
    """The adapter of a layout is that of one process, and its factors apart are those of the PEFT directory, scaled."""
    saved, factors = load_file(root / layout / TENSORS), load_file(root / layout / "factors.safetensors")
    assert_adapters(saved, expected, 2e-6)
    for name, factor in factors.items():
        own, is_a = saved[f"base_model.model.{name}"], name.endswith("lora_A.weight")
        assert torch.equal(factor[:RANK] if is_a else factor[:, :RANK], own if is_a else own * (SPEC.rank / RANK)), name


def trained_adapter(make: Make, model: Path, directory: Path) -> dict[str, torch.Tensor]:
    """The adapter that one process trains."""
    backend = make(context_of(model, CASES["adamw"]))
    begin(backend)
    train(backend)
    found = saved_adapters(backend, directory)
    backend.close(CloseRequest())
    return found
