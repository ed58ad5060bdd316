"""Where memory lives. Without CUDA both places are one, so what moves is made to move within the host's memory."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from lora_support import lora_context
from megatron_checkpoint_cases import BATCHES, SPEC, assert_equal, load, save, state_of, step
from megatron_support import exported, make_backend, make_batch, step_request

from rlcore.spi import BoundError, CloseRequest, LogprobsRequest, SetResidencyRequest, UseAdapterRequest
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.distributed.residency import num_bytes
from rlcore_torchkit.testing.models import make_model

ON_DEVICE = SetResidencyRequest(weights="device", state="device")
ON_HOST = SetResidencyRequest(weights="host", state="host")
STATE_ON_HOST = SetResidencyRequest(weights="device", state="host")
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
MakeBackend = Callable[..., MegatronBackend]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for architecture in ("qwen3", "qwen3_moe"):
        make_model(root / architecture, architecture)
    return root


@pytest.fixture
def backend(models: Path) -> Iterator[MakeBackend]:
    """A function (architecture, **options of make_backend) -> MegatronBackend that moves; all are closed at the end."""
    made = []

    def make(architecture: str = "qwen3", **options: Any) -> MegatronBackend:
        trainer = make_backend(models / architecture, optimizer=SPEC, needs_reference=True, **options)
        trainer.residency.residency.moves = True
        made.append(trainer)
        return trainer

    yield make
    for one in made:
        one.close(CloseRequest())


def move(trainer: MegatronBackend, request: SetResidencyRequest) -> int:
    return trainer.set_residency(request).device_bytes


def test_bytes_are_those_of_weights_reference_gradients_and_optimizer(backend: MakeBackend) -> None:
    trainer = backend()
    num_weights = sum(tensor.numel() for tensor in exported(trainer).values())
    gradients = num_bytes(trainer.residency.gradient_buffers())
    weights = move(trainer, STATE_ON_HOST)
    padded = 1.1  # Megatron's buffers leave gaps, so that parts start at round addresses
    assert 2 * 4 * num_weights <= weights <= 2 * 4 * num_weights * padded
    assert 4 * num_weights <= gradients <= 4 * num_weights * padded
    assert move(trainer, ON_DEVICE) == weights, "float32 masters are views of the weights"
    assert num_bytes(trainer.residency.gradient_buffers()) == 0, "they are made for the next step"
    step(trainer, 0)
    moments = move(trainer, ON_DEVICE) - weights
    assert 2 * 4 * num_weights <= moments <= 2 * 4 * num_weights * padded
    assert move(trainer, STATE_ON_HOST) == weights
    assert move(trainer, ON_HOST) == 0
    assert move(trainer, ON_DEVICE) == weights + moments


def test_masters_of_bfloat16_weights_are_state(backend: MakeBackend) -> None:
    trainer = backend(dtype="bfloat16")
    num_weights = sum(tensor.numel() for tensor in exported(trainer).values())
    whole, weights = move(trainer, ON_DEVICE), move(trainer, STATE_ON_HOST)
    assert whole - weights == 4 * num_weights
    assert 2 * 2 * num_weights <= weights <= 2 * 2 * num_weights * 1.1


def test_copies_of_gradients_are_freed_though_everything_stays(backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = backend(dtype="bfloat16", config=MegatronConfig(ddp={"grad_reduce_in_fp32": False}))
    masters = [master for group in trainer.optimizer.param_groups for master in group["params"]]
    copies, update = [], trainer.update

    def watched(*arguments: Any) -> float:
        rate = update(*arguments)
        copies.extend(master.grad.dtype for master in masters)
        return rate

    monkeypatch.setattr(trainer, "update", watched)
    for version in range(2):
        result = step(trainer, version)
        assert all(master.grad is None for master in masters)
    assert copies == [torch.float32] * (2 * len(masters))
    request = step_request((BATCHES[0],), BATCHES[0].counts(), 2)
    with pytest.raises(BoundError):
        trainer.train_step(evolve(request, bounds=dict.fromkeys(result.metrics, -math.inf)))
    assert all(master.grad is None for master in masters), "the copies of a step that was refused"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("architecture", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32")])
def test_state_moved_and_saved_on_the_host_goes_on_unchanged(
    architecture: str, dtype: str, device: str, backend: MakeBackend, tmp_path: Path
) -> None:
    moved, still = (backend(architecture, dtype=dtype, device=device) for _ in range(2))
    for version in range(2):
        assert step(moved, version) == step(still, version)
        assert move(moved, ON_HOST) == 0
        if version == 0:
            move(moved, ON_DEVICE)
    save(moved, tmp_path / "saved")
    load(moved, tmp_path / "saved")
    assert num_bytes(moved.residency.weights()) == 0, "it goes back to where it was"
    move(moved, STATE_ON_HOST)
    batch = make_batch()
    for model in ("policy", "reference"):
        request = LogprobsRequest(microbatches=(batch,), model=model, temperature=1.0, entropy=False, weight_version=2)
        assert (moved.get_logprobs(request).logprobs[0] == still.get_logprobs(request).logprobs[0]).all()
    assert_equal(exported(moved, 2), exported(still, 2))
    move(moved, ON_DEVICE)
    assert step(moved, 2) == step(still, 2)
    assert_equal(state_of(moved), state_of(still))


def test_adapters_that_are_not_in_use_move_too(models: Path) -> None:
    trainer = MegatronBackend(lora_context(models / "qwen3", optimizer=SPEC), MegatronConfig(collective_timeout_s=600.0))
    trainer.residency.residency.moves = True
    step(trainer, 0)
    of_one, before = move(trainer, ON_DEVICE), exported(trainer, 1)
    trainer.use_adapter(UseAdapterRequest(name="other", seed=1))
    step(trainer, 0)
    parameters = sum(
        parameter.numel() for model in trainer.models for parameter in model.parameters() if parameter.requires_grad
    )
    assert move(trainer, ON_DEVICE) - of_one >= 3 * 4 * parameters, "weights and two moments of the first"
    assert move(trainer, ON_HOST) == 0
    move(trainer, ON_DEVICE)
    assert trainer.use_adapter(UseAdapterRequest(name="")).weight_version == 1
    assert_equal(exported(trainer, 1), before)
    trainer.close(CloseRequest())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_handed_back(backend: MakeBackend) -> None:
    trainer = backend(device="cuda", dtype="bfloat16")
    step(trainer, 0)
    resident = move(trainer, ON_DEVICE)
    before = torch.cuda.memory_allocated()
    move(trainer, ON_HOST)
    assert torch.cuda.memory_allocated() <= before - 0.9 * resident
    move(trainer, ON_DEVICE)
    assert torch.cuda.memory_allocated() == before
