"""The generator's engines for `rlcore plan`."""

import pytest
from attrs import evolve

from rlcore.testing.plans import plan_context
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.plan import Engine, plan, prefill_seconds, step_seconds

CONTEXT = plan_context()
DIMS = ModelDims.of(CONTEXT.model)
assert DIMS is not None
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512}


def engine(ranks: int = 1, config: VllmConfig | None = None, **changed: object) -> Engine:
    dims = ModelDims.of({**CONTEXT.model, **changed})
    assert dims is not None
    return Engine.of(dims, "bfloat16", ranks, config or VllmConfig())


def test_engines_divide_machines_and_heads() -> None:
    assert [option.num_devices for option in plan(CONTEXT, VllmConfig())] == [1, 2, 4, 8]
    odd = evolve(CONTEXT, model={**CONTEXT.model, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128})
    assert [option.num_devices for option in plan(odd, VllmConfig())] == [1, 2, 4]
    assert [option.num_devices for option in plan(CONTEXT, VllmConfig(tensor_parallel=2))] == [2]


def test_engines_fill_what_is_free() -> None:
    for option in plan(CONTEXT, VllmConfig()):
        assert sum(option.memory.values()) == pytest.approx(CONTEXT.free_bytes, rel=1e-6)
        assert option.options["gpu_memory_utilization"] == 0.87
    apart = plan(evolve(CONTEXT, is_shared=False), VllmConfig())
    assert [option.options.get("replicas", 1) for option in apart] == [8, 4, 2, 1]


def test_a_run_has_the_one_layout_of_its_section() -> None:
    """With what engines that share a device keep between refits of changes alone."""
    own = evolve(CONTEXT, as_configured=True)
    (option,) = plan(own, VllmConfig(tensor_parallel=2))
    assert option.options == {"gpu_memory_utilization": 0.87}
    (apart,) = plan(evolve(own, is_shared=False), VllmConfig())
    assert dict(apart.options) == dict(option.options)
    (whole,) = plan(evolve(own, is_shared=False, free_bytes=int(0.92 * CONTEXT.device.memory_bytes)), VllmConfig())
    assert whole.options["gpu_memory_utilization"] == 0.92
    kept = evolve(own, delta_copies="whole")
    one, two, named = (
        plan(kept, VllmConfig(**options))[0].memory["engine's copies of weights"]
        for options in ({}, {"replicas": 2}, {"replicas": 2, "devices": (0, 1)})
    )
    assert (two, named) == (pytest.approx(1.5 * one), one)
    (of_four,) = plan(evolve(kept, is_shared=False, local_size=4), VllmConfig(replicas=8))
    assert of_four.memory["engine's copies of weights"] == two
    assert plan(own, VllmConfig(gpu_memory_utilization=0.87))[0].options == {}


@pytest.mark.parametrize(("kept", "number"), [("parts", 1), ("whole", 2)])
def test_copies_for_refits_of_changes_come_on_top(kept: str, number: int) -> None:
    """Each rank's are of all tensors, however many divide the engine."""
    for option, with_copies in zip(
        plan(CONTEXT, VllmConfig()), plan(evolve(CONTEXT, delta_copies=kept), VllmConfig()), strict=True
    ):
        copies = with_copies.memory["engine's copies of weights"]
        assert copies == pytest.approx(number * 2 * 1.5e9, rel=0.02)
        assert sum(with_copies.memory.values()) == pytest.approx(sum(option.memory.values()), rel=1e-6)
        assert with_copies.idle["none"] - option.idle["none"] == copies
        shares = [float(each.options["gpu_memory_utilization"]) for each in (option, with_copies)]
        assert shares[0] - shares[1] == pytest.approx(copies / CONTEXT.device.memory_bytes, abs=0.011)


def test_one_sequence_has_its_place_even_where_that_is_too_much() -> None:
    (option,) = plan(evolve(CONTEXT, free_bytes=2**30), VllmConfig(tensor_parallel=8))
    assert sum(option.memory.values()) > 2**30


def test_weights_and_keys_are_counted() -> None:
    whole = engine()
    assert whole.weights == pytest.approx(2 * 1.5e9, rel=0.02)
    assert whole.kv_per_token == 16 * 2 * 8 * 64 * 2
    assert engine(4).kv_per_token == whole.kv_per_token / 4
    assert engine(16).kv_per_token == whole.kv_per_token / 8
    assert engine(config=VllmConfig(kv_cache_dtype="fp8")).kv_per_token == whole.kv_per_token / 2
    assert engine(8, **LATENT).kv_per_token == 16 * (512 + 64) * 2
    assert engine(config=VllmConfig(quantization="fp8")).weights < 0.75 * whole.weights


def test_few_sequences_read_few_experts() -> None:
    experts = engine(**EXPERTS)
    assert experts.read_bytes(1) < 0.35 * experts.read_bytes(512)


def test_more_sequences_take_longer_each_step_and_less_each_token() -> None:
    seconds = [step_seconds(CONTEXT, engine(), number, 500.0) for number in (1, 16, 256)]
    assert seconds == sorted(seconds)
    assert seconds[2] / 256 < seconds[1] / 16 < seconds[0]
    assert prefill_seconds(CONTEXT, engine(2), 64.0) == pytest.approx(prefill_seconds(CONTEXT, engine(), 64.0) / 2)


def test_sequences_without_a_place_come_after_others() -> None:
    few = [plan(evolve(CONTEXT, num_sequences=64), VllmConfig(max_num_seqs=size))[0] for size in (1, 8)]
    assert few[0].seconds["generation"] > 3 * few[1].seconds["generation"]
