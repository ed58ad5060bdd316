"""What each of two ranks does in the tests of test_backend_two_ranks: one launch runs all cases."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from float64_reference import Float64Reference
from fsdp2_support import (
    TEMPERATURE,
    WEIGHTED,
    Reference,
    WrongOnceLater,
    assert_same,
    assert_stepped_alike,
    exported,
    make_backend,
    make_batch,
    make_config,
    split,
    step_request,
)
from rank_launch import run_rows

from rlcore.spi import (
    BoundError,
    CloseRequest,
    ContractError,
    LoadStateRequest,
    LogprobsRequest,
    LossOutput,
    LossSpec,
    ModelSpec,
    NonFiniteError,
    SaveStateRequest,
    SetResidencyRequest,
    TokenBatch,
)
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.gradients import accumulate
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.policy import make_policy
from rlcore_torchkit.trainer.losses import DeferredErrors
from rlcore_torchkit.trainer.microbatch import move

WORLD_SIZE = 2
SHARES = (
    ([[0, 1, 2]], [[3, 4, 5]]),
    ([[5], [1, 3], [0]], [[2], [4], [0, 1]]),
)
"""Microbatches of each rank; of the second form, rank 1's last repeats sequences whose loss mask is off."""


@frozen(kw_only=True)
class Ranks:
    """Where a case runs."""

    rank: int
    models: Path
    scratch: Path

    def backend(self, case: str, architecture: str = "qwen3", **options: Any) -> Fsdp2Backend:
        rendezvous = f"file://{self.scratch / case.replace('/', '-')}"
        place = {"rank": self.rank, "world_size": WORLD_SIZE, "local_rank": self.rank, "rendezvous": rendezvous}
        return make_backend(self.models / architecture, **(place | options))


CASES: dict[str, Callable[[Ranks], None]] = {}


def case(name: str) -> Callable[[Callable[[Ranks], None]], Callable[[Ranks], None]]:
    def add(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        CASES[name] = function
        return function

    return add


def masked(batch: TokenBatch) -> TokenBatch:
    """The same sequences without a loss token."""
    return TokenBatch(
        tokens=batch.tokens,
        offsets=batch.offsets,
        loss_mask=np.zeros_like(batch.loss_mask),
        token_columns=batch.token_columns,
        sequence_columns=batch.sequence_columns,
    )


def shares(batch: TokenBatch, form: int, rank: int) -> tuple[TokenBatch, ...]:
    parts = split(batch, SHARES[form][rank])
    return (*parts[:-1], masked(parts[-1])) if (form, rank) == (1, 1) else parts


def add_gradient_cases(architecture: str, form: int, options: dict[str, Any]) -> None:
    label = f"gradients/{architecture}-{form}" + "".join(f"-{key}" for key in options)

    @case(label)
    def gradients_and_weights_equal_plain_torch(ranks: Ranks) -> None:
        config = make_config(**options)
        backend = ranks.backend(label, architecture, config=config)
        meshes = ParallelLayout.of(config, ranks.rank, WORLD_SIZE).meshes("cpu")
        model, _ = make_policy(ModelSpec(path=str(ranks.models / architecture)), config, meshes, torch.device("cpu"))
        reference, batch = Reference(ranks.models / architecture), make_batch()
        reference.backward(batch)
        microbatches = [move(part, torch.device("cpu"), WEIGHTED.token_columns) for part in shares(batch, form, ranks.rank)]
        every = options.get("reduce_every_microbatch", False)
        accumulate(model, microbatches, WEIGHTED, batch.counts(), TEMPERATURE, DeferredErrors(), reduce_every_microbatch=every)
        assert_same({name: p.grad.full_tensor() for name, p in model.named_parameters()}, reference.gradients())
        reference.optimizer.zero_grad()
        for version in range(2):
            result = backend.train_step(step_request(shares(batch, form, ranks.rank), batch.counts(), version))
            loss, norm = reference.step(batch)
            assert result.loss == pytest.approx(loss, abs=1e-5)
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
            assert result.metrics["tokens"] == pytest.approx(1.0)
            if form == 0:
                assert result.metrics["longest"] == batch.lengths.max()
        weights = exported(backend, 2)
        if ranks.rank == 0:  # save_pretrained writes on no other
            assert_stepped_alike(weights, reference.saved(ranks.scratch / f"{label.replace('/', '-')}-saved"))
        backend.close(CloseRequest())


for _architecture in ("qwen2", "qwen3", "qwen3_moe", "llama"):
    add_gradient_cases(_architecture, 0, {})
for _options in (
    {},
    {"reduce_every_microbatch": True},
    {"activation_checkpointing": True, "reshard_after_forward": False},
    {"activation_checkpointing": True},
):
    add_gradient_cases("qwen3", 1, _options)


@case("float64")
def two_ranks_in_float64_equal_transformers_in_float64(ranks: Ranks) -> None:
    backend = ranks.backend("float64", dtype="float64")
    reference, batch = Float64Reference(ranks.models / "qwen3"), make_batch()
    for version in range(2):
        result = backend.train_step(step_request(shares(batch, 0, ranks.rank), batch.counts(), version))
        loss, norm = reference.step(batch)
        assert result.loss == pytest.approx(loss, abs=1e-10)
        assert result.grad_norm == pytest.approx(norm, abs=1e-10)
    assert_same(exported(backend, 2, "float64"), reference.tensors(), 1e-10)
    backend.close(CloseRequest())


@case("mixed-precision")
def bfloat16_layers_follow_float32_weights(ranks: Ranks) -> None:
    backend = ranks.backend("mixed-precision", dtype="bfloat16")
    reference, batch = Reference(ranks.models / "qwen3"), make_batch()
    for version in range(2):
        result = backend.train_step(step_request(shares(batch, 0, ranks.rank), batch.counts(), version))
        loss, norm = reference.step(batch)
        assert result.loss == pytest.approx(loss, rel=0.05)
        assert result.grad_norm == pytest.approx(norm, rel=0.1)
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in exported(backend, 2).values()), "masters are float32"
    backend.close(CloseRequest())


@case("fails-midway")
def a_step_that_fails_midway_needs_a_new_trainer(ranks: Ranks) -> None:
    backend, batch = ranks.backend("fails-midway"), make_batch()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr("rlcore_fsdp2.gradients.packed_logprobs", lambda *_, **__: 1 // 0)  # the model's pass, not the loss
        backend.train_step(step_request([batch], batch.counts()))
    with pytest.raises(ContractError, match="build the trainer anew"):
        backend.train_step(step_request([batch], batch.counts()))
    backend.close(CloseRequest())
    assert not torch.distributed.is_initialized()


WRONG: dict[str, tuple[type[Exception], Any]] = {
    "raises": (ZeroDivisionError, "fsdp2_support:raising_loss"),
    "returns-nothing": (ContractError, WrongOnceLater(None)),
    "returns-a-vector": (ContractError, WrongOnceLater(LossOutput(loss=torch.zeros(2)))),
    "returns-other-metrics": (ContractError, WrongOnceLater(LossOutput(loss=torch.zeros(()), sums={"more": torch.zeros(())}))),
}


def add_wrong_loss_case(name: str, expected: type[Exception], wrong: Any) -> None:
    @case(f"wrong-loss/{name}")
    def a_wrong_loss_leaves_no_gradient(ranks: Ranks) -> None:
        path, config = (wrong, None) if isinstance(wrong, str) else ("fsdp2_support:breaking_loss", wrong)
        backend, batch = ranks.backend(f"wrong-loss/{name}"), make_batch()
        parts = shares(batch, 1, ranks.rank)
        with pytest.raises(expected):
            backend.train_step(step_request(parts, batch.counts(), 0, LossSpec(path=path, config=config)))
        reference = Reference(ranks.models / "qwen3")
        loss, norm = reference.step(batch)
        result = backend.train_step(step_request(parts, batch.counts()))
        assert (result.loss, result.grad_norm) == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-4))
        backend.close(CloseRequest())


for wrong_name, (wrong_error, wrong_loss) in WRONG.items():
    add_wrong_loss_case(wrong_name, wrong_error, wrong_loss)


@case("logprobs")
def each_rank_gets_its_own_logprobs(ranks: Ranks) -> None:
    backend = ranks.backend("logprobs", "qwen3_moe", needs_reference=True)
    batch = make_batch(seed=ranks.rank)
    with torch.no_grad():
        expected, entropies = Reference(ranks.models / "qwen3_moe").logprobs(batch)
    for model in ("policy", "reference"):
        request = LogprobsRequest(
            microbatches=split(batch, [[0, 1, 2], [3, 4, 5]]),
            model=model,
            temperature=TEMPERATURE,
            entropy=True,
            weight_version=0,
        )
        result = backend.get_logprobs(request)
        np.testing.assert_allclose(np.concatenate(result.logprobs), expected.numpy(), atol=1e-5)
        np.testing.assert_allclose(np.concatenate(result.entropy), entropies.numpy(), atol=1e-5)
    backend.close(CloseRequest())


@case("export")
def export_equals_save_pretrained(ranks: Ranks) -> None:
    for architecture in ("qwen2", "qwen3", "qwen3_moe", "llama"):
        backend = ranks.backend(f"export-{architecture}", architecture)
        wide, narrow = exported(backend), exported(backend, dtype="bfloat16")
        if ranks.rank == 0:
            saved = Reference(ranks.models / architecture).saved(ranks.scratch / f"export-{architecture}-saved")
            assert_same(wide, saved, tolerance=0.0)
            assert_same(narrow, {name: tensor.bfloat16() for name, tensor in saved.items()}, tolerance=0.0)
        backend.close(CloseRequest())


@case("hf_directory")
def rank_0_writes_the_hf_directory(ranks: Ranks) -> None:
    backend = ranks.backend("hf", "qwen3_moe")
    directory = ranks.scratch / "hf-directory"
    directory.mkdir(exist_ok=True)
    files = backend.save_state(SaveStateRequest(directory=directory, kind="hf")).files
    assert bool(files) == (ranks.rank == 0)
    weights = exported(backend)
    if ranks.rank == 0:
        assert_same(Reference(directory).saved(ranks.scratch / "hf-again"), weights, 0.0)
    backend.close(CloseRequest())


@case("nan_on_one_rank")
def every_rank_refuses_a_step_that_one_rank_spoils(ranks: Ranks) -> None:
    backend = ranks.backend("nan")
    before, batch = exported(backend), make_batch(seed=ranks.rank)
    limit = 1e9 if ranks.rank == 0 else -1e9
    loss = LossSpec(path="fsdp2_support:nan_loss", config=limit, token_columns=("advantages",))
    with pytest.raises(NonFiniteError, match="loss is nan"):
        backend.train_step(step_request([batch], batch.counts(), 0, loss))
    steep = LossSpec(path="fsdp2_support:steep_loss", config=None)
    with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight"):
        backend.train_step(step_request([batch], batch.counts(), 0, steep))
    assert_same(exported(backend), before, 0.0)
    assert backend.train_step(step_request([batch], batch.counts())).weight_version == 1
    backend.close(CloseRequest())


@case("bound_on_one_rank")
def every_rank_refuses_a_step_that_exceeds_a_bound_on_one(ranks: Ranks) -> None:
    backend, untouched = ranks.backend("bound"), ranks.backend("bound-untouched")
    batch = make_batch()
    parts = shares(batch, 0, ranks.rank)
    longest = [max(part.lengths.max() for part in shares(batch, 0, rank)) for rank in range(WORLD_SIZE)]
    assert longest[0] != longest[1]
    request = step_request(parts, batch.counts())
    with pytest.raises(BoundError, match="longest is") as raised:
        backend.train_step(evolve(request, bounds={"longest": min(longest), "tokens": 1.5}))
    assert raised.value.metrics == {"longest": max(longest)}
    with pytest.raises(BoundError, match="tokens is 1, above 0.9"):
        backend.train_step(evolve(request, bounds={"tokens": 0.9}))
    assert_same(exported(backend), exported(untouched), 0.0)
    assert backend.train_step(evolve(request, bounds={"longest": max(longest)})) == untouched.train_step(request)
    assert_same(exported(backend, 1), exported(untouched, 1), 0.0)
    for one in (backend, untouched):
        one.close(CloseRequest())


@case("bfloat16")
def bfloat16_step_is_close_to_float32(ranks: Ranks) -> None:
    backend, batch = ranks.backend("bfloat16", dtype="bfloat16"), make_batch()
    reference = Reference(ranks.models / "qwen3")
    result = backend.train_step(step_request(shares(batch, 1, ranks.rank), batch.counts()))
    loss, norm = reference.step(batch)
    assert result.loss == pytest.approx(loss, abs=0.05)
    assert result.grad_norm == pytest.approx(norm, rel=0.05)
    backend.close(CloseRequest())


@case("residency")
def moving_changes_nothing(ranks: Ranks) -> None:
    backend, batch = ranks.backend("residency"), make_batch()
    backend.train_step(step_request(shares(batch, 0, ranks.rank), batch.counts()))
    before = exported(backend, 1)
    backend.set_residency(SetResidencyRequest(weights="host", state="host"))
    backend.set_residency(SetResidencyRequest(weights="device", state="device"))
    assert_same(exported(backend, 1), before, 0.0)
    backend.close(CloseRequest())


@case("save_on_two")
def two_ranks_save_and_resume_exactly(ranks: Ranks) -> None:
    backend, batch = ranks.backend("save", "qwen3_moe"), make_batch()
    backend.train_step(step_request(shares(batch, 0, ranks.rank), batch.counts()))
    directory = ranks.scratch / "saved-on-two"
    directory.mkdir(exist_ok=True)
    files = backend.save_state(SaveStateRequest(directory=directory, kind="resume")).files
    assert files == (f"trainer-0000{ranks.rank}.safetensors", f"trainer-0000{ranks.rank}.json")
    torch.distributed.barrier()
    resumed = ranks.backend("save", "qwen3_moe")
    assert resumed.load_state(LoadStateRequest(directory=directory)).weight_version == 1
    request = step_request(shares(batch, 1, ranks.rank), batch.counts(), 1)
    assert resumed.train_step(request) == backend.train_step(request)
    weights = exported(backend, 2)
    assert_same(exported(resumed, 2), weights, 0.0)
    if ranks.rank == 0:
        np.savez(ranks.scratch / "saved-on-two-next.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
    for one in (backend, resumed):
        one.close(CloseRequest())


@case("load_on_two")
def two_ranks_load_what_one_saved(ranks: Ranks) -> None:
    backend, batch = ranks.backend("load", "qwen3_moe"), make_batch()
    assert backend.load_state(LoadStateRequest(directory=ranks.scratch / "saved-on-one")).weight_version == 1
    backend.train_step(step_request(shares(batch, 0, ranks.rank), batch.counts(), 1))
    with np.load(ranks.scratch / "saved-on-one-next.npz") as expected:
        assert_same(exported(backend, 2), {name: torch.from_numpy(expected[name]) for name in expected}, 1e-6)
    backend.close(CloseRequest())


def run_all(rank: int, models: Path, scratch: Path) -> None:
    """Run the cases."""
    torch.set_num_threads(1)
    ranks = Ranks(rank=rank, models=models, scratch=scratch)
    run_rows({name: partial(function, ranks) for name, function in CASES.items()}, scratch / f"results-{rank}.json")
