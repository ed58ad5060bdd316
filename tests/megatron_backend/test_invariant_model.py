"""Layers that compute by batch-invariant kernels, against the ordinary ones and on two ranks; on CPU, where torch computes."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from fsdp2_support import make_backend as make_fsdp2
from fsdp2_support import make_config
from megatron_invariant_cases import GROUPS, computed, run_on_two
from megatron_support import make_backend, make_batch, split, step_request

from rlcore.spi import ConfigError, ContractError
from rlcore_megatron.modules.invariant_model import use_invariant_kernels
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model
from rlcore_torchkit.testing.ranks import launch

INVARIANT = {"batch_invariant": True, "batch_invariant_parts": 2}
KINDS = {f"Invariant{name}" for name in ("Columns", "Rows", "Norm", "Mlp", "Attention")}
BFLOAT16_BOUND = 0.05
"""Most relative L2 error of a gradient, as of fsdp2's."""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 128 tokens, with heads as wide as the kernels take."""
    shape = {"hidden_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    folder = tmp_path_factory.mktemp("invariant") / "qwen3"
    return make_model(folder, "qwen3", tied=request.param, alphabet="".join(map(chr, range(1, 127))), **shape)


@pytest.fixture(scope="module")
def step_of(directory: Path) -> Callable[..., dict[str, Any]]:
    """A function (dtype, options) -> what one process finds, once for the same."""
    return cache(partial(computed, directory))


@pytest.fixture(scope="module")
def on_two(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of each of two tensor ranks."""
    root = tmp_path_factory.mktemp("two-ranks")
    launch(run_on_two, (directory, root), 2, timeout_s=300)
    return [torch.load(root / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - right).norm() / right.norm()) for name, right in expected.items()}
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_those_of_the_ordinary_layers(
    step_of: Callable[..., dict[str, Any]], recompute: str, on_two: list[dict[str, Any]]
) -> None:
    expected = step_of("float32")
    assert not expected["modules"] & KINDS
    found = [step_of("float32", **INVARIANT, recompute=recompute), *(each["float32"] for each in on_two)]
    for each in found:
        assert each["modules"] >= KINDS
        assert each["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert_near(each["gradients"], expected["gradients"], 2e-6)


def test_bfloat16_gradients_stay_near(step_of: Callable[..., dict[str, Any]], on_two: list[dict[str, Any]]) -> None:
    expected = step_of("float32")["gradients"]
    for found in (step_of("bfloat16", **INVARIANT), *(each["bfloat16"] for each in on_two)):
        assert_near(found["gradients"], expected, BFLOAT16_BOUND)


def test_one_rank_and_two_give_the_same_bits(step_of: Callable[..., dict[str, Any]], on_two: list[dict[str, Any]]) -> None:
    """In requests and in steps; and others than without parts, which the table would not tell from rounding."""
    one, plain = step_of("bfloat16", **INVARIANT), step_of("bfloat16", batch_invariant=True)
    for found in (one, *(each["bfloat16"] for each in on_two)):
        for name in ("before", "step"):
            for ours, expected in zip(found[name], one["before"], strict=True):
                assert np.array_equal(ours, expected)
    assert any(not np.array_equal(*both) for both in zip(one["before"], plain["before"], strict=True))


def test_the_bits_are_those_of_fsdp2(directory: Path, step_of: Callable[..., dict[str, Any]]) -> None:
    found = step_of("bfloat16", **INVARIANT)
    trainer = make_fsdp2(directory, dtype="bfloat16", config=make_config(**INVARIANT))
    batch = make_batch(max_length=40)
    step = trainer.train_step(evolve(step_request(split(batch, GROUPS), batch.counts()), logprobs=True))
    assert step.logprobs is not None
    for ours, theirs in zip(found["step"], step.logprobs, strict=True):
        assert np.array_equal(ours, theirs)


def test_layers_of_other_parts_are_refused() -> None:
    """Layers of a Megatron-Core that builds local ones of other classes."""
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2))])
    hf = SimpleNamespace(head_dim=128, rope_parameters={"rope_theta": 1e4}, max_position_embeddings=8)
    with pytest.raises(ContractError, match="without ColumnParallelLinear, RowParallelLinear"):
        use_invariant_kernels(decoder, hf, 1)


def test_a_model_that_check_could_not_see_is_refused_once_it_is_loaded(tmp_path: Path) -> None:
    other = make_model(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError) as raised:
        make_backend(other, dtype="bfloat16", config=MegatronConfig(batch_invariant=True))
    assert [problem.path for problem in raised.value.problems] == ["trainer.megatron.batch_invariant"]
