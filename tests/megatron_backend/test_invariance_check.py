"""Options beside which the trainer does not compute by batch-invariant kernels, each with its key."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, LoraSpec, ModelSpec
from rlcore_megatron.checks.check import check
from rlcore_megatron.provider import shared_kernels
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.huggingface import batch_invariance
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.provider import shared_kernels as vllm_kernels
from rlcore_vllm.setup.config import VllmConfig

SECTION = "trainer.megatron"
SIZES: dict[str, Any] = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}


def problems(context: CheckContext, **options: Any) -> set[tuple[str, str]]:
    config = MegatronConfig(**{"batch_invariant": True} | options)
    asked = ("batch_invariant", "batch-invariant", "vLLM")
    found = ((one.path.removeprefix(f"{SECTION}."), one.found) for one in check(context, config))
    return {(path, text) for path, text in found if path.startswith("batch_") or any(word in text for word in asked)}


def test_what_they_are_for(invariant_context: CheckContext) -> None:
    two = evolve(invariant_context, world_size=2)
    assert problems(invariant_context) == problems(invariant_context, batch_invariant_parts=2, recompute="full") == set()
    assert problems(two, **SIZES) == problems(two, **SIZES, batch_invariant_parts=2) == set()
    divided = SIZES | {"tensor_parallel": 2, "sequence_parallel": False}
    assert problems(two, **divided, batch_invariant_parts=2) == set()


def test_without_the_option_nothing_is_asked(invariant_context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: None)
    assert problems(invariant_context) == {("batch_invariant", "true, without vLLM for CUDA")}
    assert problems(invariant_context, batch_invariant=False) == set()
    found = problems(invariant_context, batch_invariant=False, batch_invariant_parts=2)
    assert found == {("batch_invariant_parts", "2, without batch_invariant")}


def test_other_options(invariant_context: CheckContext) -> None:
    found = problems(
        evolve(invariant_context, lora=LoraSpec()),
        transformer_engine=True,
        fp8=True,
        mtp=True,
        transformer={"moe_router_fusion": True, "apply_rope_fusion": True},
        batch_invariant_parts=3,
    )
    assert found == {
        ("transformer_engine", "true, with batch_invariant"),
        ("fp8", "true, with batch_invariant"),
        ("mtp", "true, with batch_invariant"),
        ("transformer", "moe_router_fusion, apply_rope_fusion, with batch_invariant"),
        ("batch_invariant", "true, with [lora]"),
        ("batch_invariant_parts", "3, for num_attention_heads = 4"),
        ("batch_invariant_parts", "3, for intermediate_size = 512"),
    }


def test_sizes(invariant_context: CheckContext) -> None:
    two = evolve(invariant_context, world_size=2)
    assert problems(two, tensor_parallel="auto", context_parallel=2) == {
        ("tensor_parallel", "auto, with batch_invariant"),
        ("context_parallel", "2, with batch_invariant"),
        ("sequence_parallel", "true, with batch_invariant and tensor_parallel auto"),
    }
    assert problems(two, **SIZES | {"tensor_parallel": 2, "sequence_parallel": False}) == {
        ("tensor_parallel", "2, with batch_invariant")
    }


def test_the_reference_too_is_of_the_family(invariant_context: CheckContext, tmp_path: Path) -> None:
    other = ModelSpec(path=str(make_model(tmp_path / "llama", "llama")), dtype="bfloat16")
    found = problems(evolve(invariant_context, reference=other, needs_reference=True))
    assert found == {("batch_invariant", "true, for model_type llama")}
    assert problems(evolve(invariant_context, reference=invariant_context.model, needs_reference=True)) == set()


def test_a_generator_of_as_many_ranks_has_the_same_kernels() -> None:
    ours = shared_kernels(MegatronConfig(batch_invariant=True, batch_invariant_parts=2))
    found = [vllm_kernels(VllmConfig(batch_invariant=True, tensor_parallel=ranks)) == ours for ranks in (1, 2, 4)]
    assert found == [False, True, False]
    assert shared_kernels(MegatronConfig()) is None
