"""Linear layers in float8, emulated on CPU, against the same model in float32."""

import statistics

import pytest
import torch
from fsdp2_support import TEMPERATURE, WEIGHTED, exported, make_batch, make_config, step_request

from rlcore.spi import ModelSpec
from rlcore_fsdp2.gradients import accumulate
from rlcore_fsdp2.policy import make_policy
from rlcore_torchkit.trainer.losses import DeferredErrors, total
from rlcore_torchkit.trainer.microbatch import move

pytest.importorskip("torchao", reason="needs torchao, the extra fp8")

CPU = torch.device("cpu")
BOUND, MEDIAN_BOUND = 0.6, 0.25
"""Most relative L2 error of a gradient, and of half of them: float8 has 3 bits of mantissa, or 2 for gradients, in each of some
tens of products, and where two experts are nearly equal a token may go to the other one."""


def gradients(directory, **options):
    model, _ = make_policy(ModelSpec(path=str(directory)), make_config(**options), None, CPU)
    batch = make_batch()
    microbatches = [move(batch, CPU, WEIGHTED.token_columns)]
    totals = total(
        accumulate(model, microbatches, WEIGHTED, batch.counts(), TEMPERATURE, DeferredErrors(), reduce_every_microbatch=False)
    )
    return model, totals.loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_float8_gradients_stay_near_those_of_float32(architecture, model_directory):
    plain, loss, expected = gradients(model_directory(architecture))
    model, rounded_loss, found = gradients(model_directory(architecture), fp8=True)
    assert rounded_loss != loss
    assert rounded_loss == pytest.approx(loss, abs=0.05)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["q_proj"] == kinds["o_proj"] == "Float8Linear"
    assert kinds["lm_head"] != "Float8Linear"
    errors = {name: ((found[name] - right).norm() / right.norm()).item() for name, right in expected.items()}
    print(f"{architecture}: largest relative error of a gradient {max(errors.values()):.3f}")
    assert max(errors.values()) < BOUND, errors
    assert statistics.median(errors.values()) < MEDIAN_BOUND, errors


def test_float8_trains_and_exports_the_master_weights(model_directory, backend):
    trainer, batch = backend(model_directory("qwen3"), config=make_config(fp8=True), needs_reference=True), make_batch()
    before = exported(trainer)
    assert trainer.train_step(step_request([batch], batch.counts())).weight_version == 1
    after = exported(trainer, 1)
    assert before.keys() == after.keys()
    assert all((after[name] != tensor).any() for name, tensor in before.items())
