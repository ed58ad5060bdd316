"""State of tensors with settings of their own: its size, its offload, adapters, critics, multi-token heads, other schedules."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from megatron_support import exported, make_batch, make_context, saved, step_request
from multi_token_reference import make_with_head

from rlcore.spi import (
    CheckpointError,
    CloseRequest,
    ExportWeightsRequest,
    LoadStateRequest,
    LoraSpec,
    LossSpec,
    NonFiniteError,
    OptimizerGroup,
    OptimizerSpec,
    SaveStateRequest,
    ScheduleSpec,
    SetResidencyRequest,
)
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.layouts.optimizer_memory import state_bytes
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_megatron.training import adamw, shard_states
from rlcore_megatron.training.masters import MASTER
from rlcore_megatron.training.optimizer_shards import shards_of
from rlcore_megatron.training.optimizer_state import names_of, read
from rlcore_megatron.training.tensor_optimizer import TensorOptimizer
from rlcore_torchkit.distributed.residency import num_bytes
from rlcore_torchkit.optimizer import one_pass
from rlcore_torchkit.optimizer.one_pass import divided
from rlcore_torchkit.testing.models import make_model

MUON = OptimizerSpec(name="muon", learning_rate=1e-3, weight_decay=0.1)
NARROW = OptimizerSpec(moments="8bit", learning_rate=1e-3)
BATCH = make_batch()
MakeBackend = Callable[..., MegatronBackend]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden_size=128, num_layers=2)


@pytest.fixture
def backend() -> Iterator[MakeBackend]:
    """A function (model directory, context options) -> MegatronBackend; all are closed at the end."""
    made = []

    def make(directory: Path, *, config: MegatronConfig | None = None, **options: Any) -> MegatronBackend:
        others = {name: options.pop(name) for name in ("lora", "head") if name in options}
        made.append(MegatronBackend(evolve(make_context(directory, **options), **others), config or MegatronConfig()))
        return made[-1]

    yield make
    for one in made:
        one.close(CloseRequest())


def step(trainer: MegatronBackend, version: int = 0, batch: Any = BATCH) -> float:
    return trainer.train_step(step_request([batch], batch.counts(), version)).learning_rate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [MUON, NARROW, evolve(MUON, moments="8bit")])
def test_state_has_the_size_that_plans_count(spec: OptimizerSpec, dtype: str, model: Path, backend: MakeBackend) -> None:
    trainer = backend(model, optimizer=spec, dtype=dtype)
    step(trainer)
    weights = trainer.residency.weights()
    item, count = weights[0].element_size(), sum(weight.numel() for weight in weights)
    table = weights[0].numel()
    found = trainer.set_residency(SetResidencyRequest(weights="device", state="device")).device_bytes - num_bytes(weights)
    assert found == pytest.approx(state_bytes(spec, {}, item, count, table), rel=0.02)


@pytest.mark.parametrize("wide", [True, False])
def test_masters_of_bfloat16_weights_are_those_of_torch(
    wide: bool, model: Path, backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate far below the last bit of most weights, for the same gradients, clipped, in float32 or bfloat16; parts
    of 64 elements at a time."""
    monkeypatch.setattr(shard_states, "DECODED_ELEMENTS", 64)
    groups = (OptimizerGroup(parameters=("*.q_proj.weight",), learning_rate=3e-6),)
    spec = OptimizerSpec(learning_rate=1e-6, weight_decay=0.0, groups=groups, max_grad_norm=0.05)
    config = MegatronConfig(ddp={"grad_reduce_in_fp32": wide})
    trainer = backend(model, config=config, optimizer=spec, dtype="bfloat16")
    shards = shards_of(trainer.models, trainer.optimizer)
    copies = [torch.nn.Parameter(shard.key.detach().float()) for shard in shards]
    # Queries, keys and values are one parameter, each with its own rate: two copies of it, and elements of either.
    own = [torch.optim.AdamW(copies, lr=1e-6, weight_decay=0.0)]
    raised = [torch.nn.Parameter(copy.detach().clone()) for copy in copies]
    own.append(torch.optim.AdamW(raised, lr=3e-6, weight_decay=0.0))
    before = [shard.key.detach().clone() for shard in shards]
    take, norms = TensorOptimizer.step, list[float]()

    def watched(self: TensorOptimizer, *arguments: Any) -> None:
        gradients = [shard.key.decoupled_grad.float().clone() for shard in shards]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        for gradient, *both in zip(gradients, copies, raised, strict=True):
            for one in both:
                one.grad = gradient * min(1.0, spec.max_grad_norm / norms[-1])
        take(self, *arguments)

    monkeypatch.setattr(TensorOptimizer, "step", watched)
    for version in range(3):
        step(trainer, version)
        for one in own:
            one.step()
    assert all(norm == pytest.approx(spec.max_grad_norm, rel=1e-5) if wide else norm > 0.2 for norm in norms)
    for shard, copy, other, first in zip(shards, copies, raised, before, strict=True):
        masters = read(shard, MASTER)
        near = [torch.isclose(masters, one.detach(), rtol=2e-7, atol=1e-10) for one in (copy, other)]
        assert bool((near[0] | near[1]).all())
        assert bool(near[0].any())
        assert torch.equal(shard.key, divided(masters)[0])
        assert float((masters != first.float()).float().mean()) > 0.9
        assert float((shard.key != first).float().mean()) < 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_pass_is_the_step_by_operators(
    dtype: str, tmp_path: Path, backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices with rows of whole blocks, and others; clipped gradients, and bfloat16 ones."""
    wide, calls = make_model(tmp_path / "wide", "qwen3", hidden_size=256, num_layers=1), list[int]()
    spec = OptimizerSpec(moments="8bit", learning_rate=1e-3, max_grad_norm=0.05)
    config = MegatronConfig(ddp={"grad_reduce_in_fp32": dtype == "float32"})
    by_operators, in_one_pass = (backend(wide, config=config, optimizer=spec, dtype=dtype) for _ in range(2))

    def counted(*arguments: Any) -> None:
        calls.append(arguments[0].numel())
        one_pass.update(*arguments)

    for version in range(3):
        step(by_operators, version)
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "takes", lambda columns, _: one_pass.takes(columns, torch.device("cuda")))
            patch.setattr(one_pass, "compiled", lambda: counted)
            step(in_one_pass, version)
    pairs = zip(*(shards_of(trainer.models, trainer.optimizer) for trainer in (in_one_pass, by_operators)), strict=True)
    assert 0 < sum(calls) < 3 * sum(shard.key.numel() for shard in shards_of(in_one_pass.models, in_one_pass.optimizer))
    for found, expected in pairs:
        distance = (read(found, MASTER) - read(expected, MASTER)).abs() / spec.learning_rate
        assert float((distance > 1e-3).float().mean()) < 1e-4
        assert float(distance.max()) < 0.2  # a code that rounding made the next one
        for name in names_of(found):
            ours, theirs = (shard.state[name].float() for shard in (found, expected))
            most = 1.0 if found.state[name].dtype == torch.uint8 else 2e-5 * float(theirs.abs().max())
            assert float(((ours - theirs).abs() > most).float().mean()) < 1e-4


def test_the_norm_of_bfloat16_gradients_is_not_rounded(model: Path, backend: MakeBackend) -> None:
    trainer = backend(model, config=MegatronConfig(ddp={"grad_reduce_in_fp32": False}), optimizer=NARROW, dtype="bfloat16")
    result = trainer.train_step(evolve(step_request([BATCH], BATCH.counts()), gradient_norms=True))
    assert result.gradient_norms is not None
    assert result.grad_norm == pytest.approx(math.hypot(*result.gradient_norms.values()), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_offload_are_the_same(dtype: str, model: Path, backend: MakeBackend) -> None:
    moved, still = (backend(model, optimizer=evolve(MUON, moments="8bit"), dtype=dtype) for _ in range(2))
    for version in range(2):
        step(moved, version)
        step(still, version)
        moved.set_residency(SetResidencyRequest(weights="host", state="host"))
        moved.set_residency(SetResidencyRequest(weights="device", state="device"))
    found, expected = exported(moved, 2), exported(still, 2)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_step_that_is_refused_changes_no_state(model: Path, backend: MakeBackend) -> None:
    trainer, other = (backend(model, optimizer=MUON) for _ in range(2))
    bad = LossSpec(path="fsdp2_support:nan_loss", config=-1e9, token_columns=("advantages",))
    with pytest.raises(NonFiniteError):
        trainer.train_step(step_request([BATCH], BATCH.counts(), 0, bad))
    for one in (trainer, other):
        step(one)
    found, expected = exported(trainer, 1), exported(other, 1)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_adapters_have_groups_and_moments_in_8_bits(model: Path, backend: MakeBackend, tmp_path: Path) -> None:
    """A moves by the rate of its group, ten times that of B's."""
    groups = (OptimizerGroup(parameters=("*.lora_A.weight",), learning_rate=1e-2),)
    trainer = backend(model, optimizer=evolve(NARROW, groups=groups), lora=LoraSpec(rank=32))
    before = adapters(trainer, 0)
    for version in range(2):  # B begins at zero, so that A has a gradient in the second step
        step(trainer, version)
    after = adapters(trainer, 2)
    for ending, most in (("lora_A.weight", 1e-2), ("lora_B.weight", 2e-3)):
        moved = max(float((after[name] - before[name]).abs().max()) for name in before if name.endswith(ending))
        assert 0.5 * most < moved <= 1.1 * most
    kinds = {
        kind for states in trainer.optimizer.chained_optimizers for state in states.optimizer.state.values() for kind in state
    }
    assert "exp_avg_codes" in kinds
    (tmp_path / "saved").mkdir()
    trainer.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="resume"))
    step(trainer, 2)
    expected = adapters(trainer, 3)
    trainer.load_state(LoadStateRequest(directory=tmp_path / "saved"))
    step(trainer, 2)
    found = adapters(trainer, 3)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def adapters(trainer: MegatronBackend, version: int) -> dict[str, torch.Tensor]:
    request = ExportWeightsRequest(weight_version=version, dtype="float32", max_bucket_bytes=2**14, adapters="alone")
    buckets = trainer.export_weights(request).buckets
    return {named.name: named.tensor.clone() for bucket in buckets for named in bucket.tensors}


def test_a_head_of_values_trains_with_adamw_beside_muon(tmp_path: Path, backend: MakeBackend) -> None:
    directory = make_model(tmp_path / "critic", "qwen3", head="value")
    trainer = backend(directory, optimizer=MUON, head="value")
    kinds = {
        tuple(sorted(state))
        for part in trainer.optimizer.chained_optimizers
        for key, state in ((key, part.optimizer.make(key)) for group in part.optimizer.param_groups for key in group["params"])
    }
    assert kinds == {("momentum_buffer",), ("exp_avg", "exp_avg_sq")}


def test_the_multi_token_head_trains_by_the_same_settings(tmp_path: Path, backend: MakeBackend) -> None:
    directory = make_with_head(tmp_path / "model", "deepseek_v3")
    frozen = OptimizerGroup(parameters=("*.eh_proj.weight",), learning_rate=1e-12)
    trainer = backend(directory, optimizer=evolve(MUON, weight_decay=0.0, groups=(frozen,)), config=MegatronConfig(mtp=True))
    before = saved(trainer)
    step(trainer)
    after = saved(trainer, 1)
    (name,) = (name for name in before if name.endswith("eh_proj.weight"))
    others = [f"{name.removesuffix('eh_proj.weight')}{other}.weight" for other in ("self_attn.o_proj", "enorm", "mlp.gate")]
    moved = {one: float((after[one] - before[one]).abs().max()) for one in (name, *others)}
    assert [one for one, size in moved.items() if size > 1e-6] == others, moved


def test_megatrons_scheduler_scales_every_rate(model: Path, backend: MakeBackend) -> None:
    """At the end of a linear decay to half the peak, each tensor moves half as far as in a first step at the peak."""
    group = OptimizerGroup(parameters=("model.embed_tokens.weight",), learning_rate=1e-2)
    spec = evolve(MUON, weight_decay=0.0, groups=(group,))
    config = MegatronConfig(scheduler={"lr_decay_style": "linear", "min_lr": 5e-4})
    moved = []
    for place in (0, 10):
        trainer = backend(model, optimizer=spec, config=config, schedule=ScheduleSpec())
        before = exported(trainer)
        trainer.train_step(evolve(step_request([BATCH], BATCH.counts()), schedule_step=place))
        after = exported(trainer, 1)
        moved.append({name: after[name] - before[name] for name in before})
    for name, first in moved[0].items():
        torch.testing.assert_close(2 * moved[1][name], first, rtol=1e-2, atol=1e-6)


def by_adamw(*patterns: str) -> OptimizerSpec:
    """Muon, but for matrices of these names."""
    return evolve(MUON, groups=(OptimizerGroup(parameters=patterns, name="adamw"),))


@pytest.mark.parametrize(
    ("written", "read", "key"),
    [
        (OptimizerSpec(), MUON, "name"),
        (MUON, OptimizerSpec(), "name"),
        (NARROW, OptimizerSpec(), "moments"),
        (OptimizerSpec(), NARROW, "moments"),
        (by_adamw("*.k_proj.weight"), MUON, r"groups for \S+k_proj\.weight"),  # parts of parameters that Megatron fuses
        (MUON, by_adamw("*.up_proj.weight"), r"groups for \S+up_proj\.weight"),
        (by_adamw("*.k_proj.weight"), by_adamw("*.q_proj.weight"), r"groups for \S+k_proj\.weight"),
        (by_adamw("*.layers.*"), OptimizerSpec(), "name"),
    ],
)
def test_state_of_another_optimizer_is_refused(
    written: OptimizerSpec, read: OptimizerSpec, key: str, model: Path, backend: MakeBackend, tmp_path: Path
) -> None:
    writer, reader = backend(model, optimizer=written), backend(model, optimizer=read)
    step(writer)
    (tmp_path / "saved").mkdir()
    writer.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="resume"))
    before = exported(reader)
    with pytest.raises(CheckpointError, match=rf"optimizer\.{key}"):
        reader.load_state(LoadStateRequest(directory=tmp_path / "saved"))
    after = exported(reader)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_rates_of_groups_may_change(model: Path, backend: MakeBackend, tmp_path: Path) -> None:
    written = by_adamw("*.k_proj.weight", "*.q_proj.weight")
    groups = tuple(evolve(group, learning_rate=1e-12) for group in by_adamw("*.[kq]_proj.weight").groups)
    writer, reader = backend(model, optimizer=written), backend(model, optimizer=evolve(written, groups=groups))
    step(writer)
    (tmp_path / "saved").mkdir()
    writer.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="resume"))
    reader.load_state(LoadStateRequest(directory=tmp_path / "saved"))
    before = exported(reader, 1)
    step(reader, 1)
    after = exported(reader, 2)
    moved = {name for name in before if float((after[name] - before[name]).abs().max()) > 1e-6}
    assert not any(name.endswith(("k_proj.weight", "q_proj.weight")) for name in moved)
    assert any(name.endswith("v_proj.weight") for name in moved)
