"""Optimizers that keep masters and moments in fewer bits, or on the host: TransformerEngine's, on a GPU."""

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from megatron_checkpoint_cases import SAVE_AFTER, SPEC, load, save, step
from megatron_support import make_backend, make_batch, step_request
from torch import Tensor

from rlcore.spi import CloseRequest, ScheduleSpec, SetResidencyRequest
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.training.masters import MASTER
from rlcore_megatron.training.optimizer_shards import shards_of
from rlcore_megatron.training.optimizer_state import MOMENTS, optimizers_of, read
from rlcore_megatron.training.partial_step import step_in_parts
from rlcore_torchkit.distributed.residency import num_bytes
from rlcore_torchkit.testing.models import make_model

gpu = pytest.mark.gpu
needs_engine = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("transformer_engine") is None, reason="needs a GPU and TransformerEngine"
)
AWARE = {"use_precision_aware_optimizer": True}
ON_HOST = AWARE | {"optimizer_cpu_offload": True}
ON_DEVICE = SetResidencyRequest(weights="device", state="device")
ALL_AWAY = SetResidencyRequest(weights="host", state="host")
MakeBackend = Callable[..., MegatronBackend]


@frozen(kw_only=True)
class Kind:
    """Of an optimizer."""

    table: Mapping[str, Any] = field(factory=dict)
    state_bytes: float
    """A parameter, on the device."""
    of_change: float = 1e-2
    """Most difference of what steps change the masters by from what they change float32 ones by, relative, in the L2 norm. A
    weight that is rounded otherwise, a tie, is enough to change gradients in bfloat16 by their last digit, 4e-3."""
    is_exact: bool = True
    """Whether a checkpoint, which is float32, holds it bit by bit."""


KINDS = {
    "plain": Kind(state_bytes=12),
    "remainders": Kind(table=AWARE, state_bytes=10),
    "whole masters": Kind(table=AWARE | {"store_param_remainders": False}, state_bytes=12),
    "bfloat16 moments": Kind(
        table=AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, state_bytes=6, of_change=2e-2
    ),
    "float16 masters": Kind(table=AWARE | {"main_params_dtype": "float16"}, state_bytes=10, of_change=0.3, is_exact=False),
    "on the host": Kind(table=ON_HOST | {"optimizer_offload_fraction": 1.0}, state_bytes=0),
    "half on the host": Kind(
        table=ON_HOST | {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}, state_bytes=6
    ),
}
OTHERS = [name for name in KINDS if name != "plain"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden_size=128, num_layers=2)


@pytest.mark.parametrize(("ratio", "table", "least"), [(0.5, {}, 0.5), (0.0, {"min_lr": 5e-5}, 0.25), (0.0, {}, 0.0)])
def test_megatrons_scheduler_ends_at_the_least_rate(model: Path, ratio: float, table: dict[str, Any], least: float) -> None:
    config = MegatronConfig(scheduler={"lr_decay_style": "linear", **table})
    trainer = make_backend(model, config=config, optimizer=SPEC, schedule=ScheduleSpec(min_learning_rate_ratio=ratio))
    batch, found = make_batch(), []
    for version, place in enumerate((0, 5, 10, 12)):
        request = evolve(step_request([batch], batch.counts(), version), schedule_step=place)
        found.append(trainer.train_step(request).learning_rate / SPEC.learning_rate)
    trainer.close(CloseRequest())
    assert found == pytest.approx([1.0, (1 + least) / 2, least, least])


@pytest.fixture
def backend(model: Path) -> Iterator[MakeBackend]:
    """A function (kind) -> MegatronBackend on a GPU, in bfloat16; all are closed at the end."""
    made = []

    def make(kind: str) -> MegatronBackend:
        config = MegatronConfig(optimizer=KINDS[kind].table)
        made.append(make_backend(model, config=config, optimizer=SPEC, dtype="bfloat16", device="cuda"))
        return made[-1]

    yield make
    for one in made:
        one.close(CloseRequest())


def held(trainer: MegatronBackend) -> dict[str, Tensor]:
    """Masters and moments, in float32 on the host."""
    found = {}
    for shard in shards_of(trainer.models, trainer.optimizer):
        for name in (MASTER, *MOMENTS):
            found[f"{name} of {shard.pieces[0].name}"] = read(shard, name).detach().cpu().clone()
    return found


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], most: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=most, atol=most, msg=lambda text, name=name: f"{name}: {text}")


def masters(trainer: MegatronBackend) -> Tensor:
    """All of them, end to end."""
    shards = shards_of(trainer.models, trainer.optimizer)
    return torch.cat([read(shard, MASTER).detach().cpu() for shard in shards])


@gpu
@needs_engine
@pytest.mark.parametrize("kind", OTHERS)
def test_steps_are_those_of_float32_and_take_the_room_that_is_said(kind: str, backend: MakeBackend) -> None:
    plain, other = backend("plain"), backend(kind)
    weights, before = num_bytes(other.residency.weights()), masters(plain)
    for version in range(SAVE_AFTER + 1):
        step(plain, version)
        step(other, version)
    expected = masters(plain)
    error = float((masters(other) - expected).norm() / (expected - before).norm())
    assert error < KINDS[kind].of_change
    found = other.set_residency(ON_DEVICE).device_bytes - weights
    # What is offloaded is whole tensors, until there is enough.
    least = 0.7 if kind == "half on the host" else 1.0
    assert least * KINDS[kind].state_bytes <= found / len(expected) <= 1.1 * KINDS[kind].state_bytes


@gpu
@needs_engine
@pytest.mark.parametrize("kind", OTHERS)
def test_state_moved_and_saved_goes_on_unchanged(kind: str, backend: MakeBackend, tmp_path: Path) -> None:
    moved, still = backend(kind), backend(kind)
    for version in range(SAVE_AFTER):
        assert step(moved, version) == step(still, version)
        assert moved.set_residency(ALL_AWAY).device_bytes == 0
        if version == 0:
            moved.set_residency(ON_DEVICE)
    save(moved, tmp_path / "saved")
    moved.set_residency(ON_DEVICE)
    step(moved, SAVE_AFTER)  # must leave no trace
    load(moved, tmp_path / "saved")
    most = 0.0 if KINDS[kind].is_exact else 1e-3
    assert_close(held(moved), held(still), most)
    step(moved, SAVE_AFTER)
    step(still, SAVE_AFTER)
    assert_close(held(moved), held(still), most)


@gpu
@needs_engine
@pytest.mark.parametrize(("source", "target"), [*[("plain", kind) for kind in OTHERS], *[(kind, "plain") for kind in OTHERS]])
def test_a_checkpoint_of_one_is_resumed_by_another(source: str, target: str, backend: MakeBackend, tmp_path: Path) -> None:
    first = backend(source)
    for version in range(SAVE_AFTER):
        step(first, version)
    save(first, tmp_path / "saved")
    second = backend(target)
    load(second, tmp_path / "saved")
    is_exact = KINDS[source].is_exact and KINDS[target].is_exact and target != "bfloat16 moments"
    assert_close(held(second), held(first), 0.0 if is_exact else 2.0**-8)
    before = masters(first)
    assert step(second, SAVE_AFTER).loss == pytest.approx(step(first, SAVE_AFTER).loss, rel=1e-3)
    expected = masters(first)
    error = float((masters(second) - expected).norm() / (expected - before).norm())
    assert error < max(KINDS[kind].of_change for kind in (source, target))


@gpu
@needs_engine
@pytest.mark.parametrize("kind", ["bfloat16 moments", "float16 masters"])
def test_a_step_in_parts_is_the_engines_whole_step_and_takes_less_memory(kind: str, backend: MakeBackend) -> None:
    whole, parts = backend(kind), backend(kind)
    for one in optimizers_of(whole.optimizer):
        del one.step
    for one in optimizers_of(parts.optimizer):
        del one.step
    step_in_parts(parts.optimizer, PART)
    assert all("step" not in vars(one) for one in optimizers_of(backend("plain").optimizer)), "float32 is not copied"
    copies, peaks = 8 if kind == "bfloat16 moments" else 4, []
    for trainer in (whole, parts):
        trainer.update = measured(trainer.update, found := [])
        for version in range(3):
            step(trainer, version)
        peaks.append(found[-1])
    assert_close(held(parts), held(whole), 0.0)
    num_parameters = len(masters(whole))
    assert num_parameters > 3 * PART
    assert peaks[0] >= copies * num_parameters
    # In a part too, what goes back is rounded in a tensor of its own.
    assert peaks[1] <= (copies + 4) * PART + 2**17


PART = 2**17
"""Elements; the largest parameter of the model has three quarters of that."""


def measured(update: Callable[..., float], peaks: list[int]) -> Callable[..., float]:
    """`update`, that adds the most bytes that it had beyond those before it to `peaks`."""

    def run(*arguments: Any) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rate = update(*arguments)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        return rate

    return run
