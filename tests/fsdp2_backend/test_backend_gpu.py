"""On CUDA: float32 and bfloat16 against plain torch on CPU, and device memory given back."""

import pytest
import torch
from fsdp2_support import (
    TEMPERATURE,
    WEIGHTED,
    Reference,
    assert_same,
    exported,
    make_backend,
    make_batch,
    make_config,
    split,
    step_request,
)

from rlcore.spi import (
    CloseRequest,
    LoadStateRequest,
    LogprobsRequest,
    ModelSpec,
    RankInfo,
    SaveStateRequest,
    SetResidencyRequest,
)
from rlcore_fsdp2.gradients import accumulate
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.policy import make_policy
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.distributed import process_group
from rlcore_torchkit.testing.models import make_model
from rlcore_torchkit.trainer.losses import DeferredErrors, total
from rlcore_torchkit.trainer.microbatch import move

ARCHITECTURES = installed_model_types()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
BFLOAT16_BOUND, BFLOAT16_EXPERTS_BOUND = 0.05, 0.15
"""Most relative L2 error of a parameter's gradient: bfloat16 rounds by up to 2⁻⁹ in each of some tens of products in a row, and
where two experts are nearly equal it may send a token to the other one."""
GROUPS = [[4, 0], [1, 5, 3], [2]]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """A function architecture -> directory; head dimension 32, which flash attention takes."""

    def get(architecture):
        return make_model(tmp_path_factory.mktemp("wide") / architecture, architecture, hidden_size=128)

    return get


def gradients(directory, dtype, **options):
    """Gradients of one batch in three microbatches on CUDA, by name, on the host."""
    batch = make_batch(max_length=40)
    process_group.join(RankInfo(device="cuda"), 60.0)
    try:
        meshes = ParallelLayout().meshes("cuda") if dtype != "float32" else None
        model, _ = make_policy(ModelSpec(path=str(directory), dtype=dtype), make_config(**options), meshes, CUDA)
        microbatches = [move(part, CUDA, WEIGHTED.token_columns) for part in split(batch, GROUPS)]
        totals = total(
            accumulate(
                model, microbatches, WEIGHTED, batch.counts(), TEMPERATURE, DeferredErrors(), reduce_every_microbatch=False
            )
        )
        grads = {name: p.grad.full_tensor() if meshes else p.grad for name, p in model.named_parameters()}
        return totals.loss.item(), {name: grad.cpu() for name, grad in grads.items()}
    finally:
        process_group.leave()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_gradients_equal_those_on_cpu(architecture, wide_model):
    directory = wide_model(architecture)
    reference = Reference(directory)
    expected_loss = reference.backward(make_batch(max_length=40))
    loss, found = gradients(directory, "float32")
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert_same(found, reference.gradients(), tolerance=2e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_gradients_stay_within_the_bound_of_float32_on_cpu(architecture, wide_model):
    directory = wide_model(architecture)
    reference = Reference(directory)
    expected_loss = reference.backward(make_batch(max_length=40))
    loss, found = gradients(directory, "bfloat16")
    assert loss == pytest.approx(expected_loss, abs=0.05)
    errors = {name: ((found[name] - right).norm() / right.norm()).item() for name, right in reference.gradients().items()}
    print(f"{architecture}: largest relative error of a gradient {max(errors.values()):.4f}")
    assert max(errors.values()) < (BFLOAT16_EXPERTS_BOUND if architecture.endswith("moe") else BFLOAT16_BOUND), errors


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_give_the_same_gradients(dtype, checkpointing, wide_model):
    directory = wide_model("qwen3")
    torch.compiler.reset()
    loss, expected = gradients(directory, dtype)
    compiled_loss, found = gradients(directory, dtype, compile_layers=True, activation_checkpointing=checkpointing)
    bound = 1e-5 if dtype == "float32" else BFLOAT16_BOUND
    assert compiled_loss == pytest.approx(loss, abs=bound)
    errors = {name: ((found[name] - right).norm() / right.norm()).item() for name, right in expected.items()}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_given_back_and_the_training_goes_on_unchanged(dtype, wide_model, backend, tmp_path):
    directory = wide_model("qwen3")
    moved, still = (backend(directory, dtype=dtype, device="cuda", needs_reference=True) for _ in range(2))
    for version in range(2):
        batch = make_batch(seed=version)
        results = [one.train_step(step_request([batch], batch.counts(), version)) for one in (moved, still)]
        assert results[0] == results[1]
        held = moved.set_residency(SetResidencyRequest(weights="device", state="device")).device_bytes
        before = torch.cuda.memory_allocated()
        left = moved.set_residency(SetResidencyRequest(weights="host", state="host")).device_bytes
        assert left == 0
        assert before - torch.cuda.memory_allocated() >= held
        if version == 1:
            moved.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
            moved.load_state(LoadStateRequest(directory=tmp_path))
        moved.set_residency(SetResidencyRequest(weights="device", state="host"))
        request = LogprobsRequest(
            microbatches=(batch,), model="reference", temperature=1.0, entropy=False, weight_version=version + 1
        )
        assert (moved.get_logprobs(request).logprobs[0] == still.get_logprobs(request).logprobs[0]).all()
        assert moved.set_residency(SetResidencyRequest(weights="device", state="device")).device_bytes == held
    assert_same(exported(moved, 2), exported(still, 2), tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_close_frees_the_device(dtype, wide_model):
    directory, batch, left = wide_model("qwen2"), make_batch(), []
    for _ in range(3):
        trainer = make_backend(directory, dtype=dtype, device="cuda", needs_reference=True)
        trainer.train_step(step_request([batch], batch.counts()))
        trainer.close(CloseRequest())
        left.append(torch.cuda.memory_allocated())
    assert left[0] == left[1] == left[2], "the first may leave torch's own workspaces"
