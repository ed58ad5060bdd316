"""The trainer's layouts for `rlcore plan`."""

import pytest
from attrs import evolve

from rlcore.spi import LoraSpec, ModelError, PlanContext
from rlcore.testing.plans import plan_context
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.plan import plan

CONTEXT = plan_context()


def test_every_layout_says_its_memory_and_seconds() -> None:
    options = plan(CONTEXT, MegatronConfig())
    assert len({tuple(option.options.items()) for option in options}) == len(options) > 10
    for option in options:
        assert all(size >= 0 for size in option.memory.values())
        assert option.idle["all"] == 0 <= option.idle["state"] < option.idle["none"] <= sum(option.memory.values())
        assert option.seconds["training"] > 0
        assert option.seconds["log-probabilities"] > 0


def test_copies_of_what_is_sent_stay_wherever_the_trainer_is() -> None:
    plain, kept = (plan(evolve(CONTEXT, delta_copies=each), MegatronConfig()) for each in ("none", "parts"))
    for one, other in zip(plain, kept, strict=True):
        copies = other.memory["copies of sent weights"]
        assert copies > 0
        assert sum(other.memory.values()) - sum(one.memory.values()) == copies
        assert {where: size - one.idle[where] for where, size in other.idle.items()} == dict.fromkeys(one.idle, copies)


def test_sizes_that_the_recipe_sets_stay() -> None:
    options = plan(CONTEXT, MegatronConfig(tensor_parallel=2))
    assert options
    assert not any("tensor_parallel" in option.options for option in options)
    others = plan(CONTEXT, MegatronConfig())
    assert len(others) > len(options)


def test_layouts_divide_the_model() -> None:
    model = {**CONTEXT.model, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64}
    sizes = {option.options.get("tensor_parallel", 1) for option in plan(evolve(CONTEXT, model=model), MegatronConfig())}
    assert sizes == {1}


def test_more_devices_hold_less_each() -> None:
    few, many = (
        min(sum(option.memory.values()) for option in plan(one, MegatronConfig())) for one in (CONTEXT, larger(CONTEXT))
    )
    assert many < few


def larger(context: PlanContext) -> PlanContext:
    return evolve(context, world_size=4 * context.world_size)


def test_a_reference_is_held_and_adapters_are_small() -> None:
    plain = plan(evolve(CONTEXT, reference=None, reference_passes=0.0), MegatronConfig())
    with_reference = plan(CONTEXT, MegatronConfig())
    adapters = plan(evolve(CONTEXT, lora=LoraSpec(rank=8)), MegatronConfig())
    assert plain[0].memory["weights"] < with_reference[0].memory["weights"]
    assert adapters[0].memory["optimizer state"] < plain[0].memory["optimizer state"] / 5


def test_a_model_without_sizes_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        plan(evolve(CONTEXT, model={"model_type": "llama"}), MegatronConfig())
