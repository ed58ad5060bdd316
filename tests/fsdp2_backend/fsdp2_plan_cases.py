"""What each of two tensor ranks does in the tests of test_plan_parallel."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from decoder_families import DIVIDED
from fsdp2_decoder_cases import WORLD_SIZE, run_cases, train
from fsdp2_layout_cases import GradientsSeen
from fsdp2_support import Reference, exported, make_backend, make_batch, make_config, make_context, split, step_request
from torch import Tensor

from rlcore.spi import CloseRequest, LoraSpec
from rlcore_fsdp2.backend import Fsdp2Backend

LORA = LoraSpec(rank=2, targets=("all-linear",))
STEPPED = ("smollm3", "phi3", "glm4_moe")
"""With steps, a checkpoint and an export: divided heads, gathered ones, and experts."""
ADAPTED = ("phi3", "glm4_moe")
"""With adapters: beside layers whose outputs are gathered, and beside shared experts."""
PARTS = [[0, 5], [1, 2, 3, 4]]
TENSOR = make_config(tensor_parallel=WORLD_SIZE)
MOST = 1e-4
"""Difference of any gradient's element, relative to the largest of its parameter or 1e-3 of that of all."""


def placed(rank: int, scratch: Path, name: str) -> dict[str, Any]:
    return {"rank": rank, "world_size": WORLD_SIZE, "local_rank": rank, "rendezvous": f"file://{scratch / name}"}


def check_gradients(rank: int, directory: Path, scratch: Path) -> None:
    """Of every parameter, before anything scales or clips them."""
    trainer = make_backend(directory, config=TENSOR, **placed(rank, scratch, f"{directory.name}-gradients"))
    reference, batch, seen = Reference(directory), make_batch(), GradientsSeen(trainer)
    parts = [held.to_local().numel() / held.numel() for held in trainer.policy.parameters()]
    assert min(parts) == 1 / WORLD_SIZE
    trainer.train_step(step_request(split(batch, PARTS), batch.counts()))
    reference.backward(batch)
    assert_close(seen.tensors, reference.gradients())
    trainer.close(CloseRequest())


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    sizes = {name: tensor.abs().max().item() for name, tensor in expected.items()}
    floor = 1e-3 * max(sizes.values())
    errors = {
        name: (found[name].cpu() - tensor).abs().max().item() / max(sizes[name], floor) for name, tensor in expected.items()
    }
    assert {name: error for name, error in errors.items() if not error <= MOST} == {}


def with_adapters(directory: Path, **place: Any) -> dict[str, Tensor]:
    """Weights after two steps with their adapters merged in."""
    config = TENSOR if place else make_config()
    trainer = Fsdp2Backend(evolve(make_context(directory, **place), lora=LORA), config)
    for version in range(2):
        batch = make_batch(seed=version)
        trainer.train_step(step_request(split(batch, PARTS), batch.counts(), version))
    weights = exported(trainer, 2)
    trainer.close(CloseRequest())
    return weights


def check_adapters(rank: int, directory: Path, scratch: Path) -> None:
    weights = with_adapters(directory, **placed(rank, scratch, f"{directory.name}-adapters"))
    expected = torch.load(scratch / f"{directory.name}-adapters.pt")
    assert weights.keys() == expected.keys()
    errors = {name: (weights[name] - tensor).abs().max().item() for name, tensor in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


def cases(rank: int, models: Path, scratch: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family in DIVIDED:
        found[f"{family}/gradients"] = partial(check_gradients, rank, models / family, scratch)
    for family in STEPPED:
        found[f"{family}/steps"] = partial(train, rank, models / family, scratch, TENSOR)
    for family in ADAPTED:
        found[f"{family}/adapters"] = partial(check_adapters, rank, models / family, scratch)
    return found


def run_all(rank: int, models: Path, scratch: Path, names: Collection[str]) -> None:
    """Run the cases of these names."""
    run_cases(rank, scratch, {name: case for name, case in cases(rank, models, scratch).items() if name in names})
