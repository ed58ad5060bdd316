"""A step's work for the plans of trainers and generators, and what holds of every trainer's."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve

from rlcore.spi import DeviceSpec, LoraSpec, ModelError, PlanContext, PlanOption

MODEL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
"""The sizes of Llama-3.2-1B, untied."""
DEVICE = DeviceSpec(
    name="test",
    memory_bytes=80 * 2**30,
    flops=1e15,
    bandwidth=4e12,
    link=4e11,
    network=5e10,
    host=4e10,
    devices_per_node=8,
)


def plan_context() -> PlanContext:
    """A step of a model of a billion parameters on one machine."""
    return PlanContext(
        model=MODEL,
        dtype="bfloat16",
        device=DEVICE,
        world_size=8,
        local_size=8,
        is_shared=True,
        free_bytes=70 * 2**30,
        num_sequences=512,
        prompt_tokens=100.0,
        samples_per_prompt=8,
        response_lengths=(100.0, 400.0, 1000.0),
        max_sequence_length=2048,
        max_microbatch_tokens=8192,
        updates=2,
        policy_passes=0.5,
        reference_passes=1.0,
        reference=MODEL,
    )


class TrainerPlans:
    """Tests of a trainer's plan: derive a class whose `plan` and `config` are the trainer's own, with the size
    `tensor_parallel`."""

    plan: Callable[[PlanContext, Any], Sequence[PlanOption]]
    """The provider's `plan`, as a staticmethod."""
    config: type
    """The class of its section."""

    def planned(self, *, sizes: int | None = None, **changed: Any) -> Sequence[PlanOption]:
        """The layouts of a step's work with these changes, of a section with so many tensor ranks or with its defaults."""
        config = self.config() if sizes is None else self.config(tensor_parallel=sizes)
        return type(self).plan(evolve(plan_context(), **changed), config)

    def test_every_layout_says_its_memory_and_seconds(self) -> None:
        """And no two are the same."""
        options = self.planned()
        assert len({tuple(option.options.items()) for option in options}) == len(options) > 10
        for option in options:
            assert all(size >= 0 for size in option.memory.values())
            assert option.idle["all"] == 0 <= option.idle["state"] < option.idle["none"] <= sum(option.memory.values())
            assert option.seconds["training"] > 0
            assert option.seconds["log-probabilities"] > 0

    def test_a_run_has_the_one_layout_of_its_section(self) -> None:
        """Which is among those that a plan compares; what is left to the trainer is a number in it."""
        (own,) = self.planned(sizes=2, as_configured=True)
        (same,) = [option for option in self.planned(sizes=2) if option.options == own.options]
        assert "tensor_parallel" not in own.options
        assert own.idle == same.idle
        assert "auto" not in own.options.values()

    def test_copies_of_what_is_sent_stay_wherever_the_trainer_is(self) -> None:
        """They are a part of the memory, and of what is idle."""
        plain, kept = (self.planned(delta_copies=each) for each in ("none", "parts"))
        for one, other in zip(plain, kept, strict=True):
            copies = other.memory["copies of sent weights"]
            assert copies > 0
            assert sum(other.memory.values()) - sum(one.memory.values()) == copies
            assert {where: size - one.idle[where] for where, size in other.idle.items()} == dict.fromkeys(one.idle, copies)

    def test_sizes_that_the_recipe_sets_stay(self) -> None:
        """The others are varied."""
        options = self.planned(sizes=2)
        assert options
        assert not any("tensor_parallel" in option.options for option in options)
        assert len(self.planned()) > len(options)

    def test_layouts_divide_the_model(self) -> None:
        """Three key heads are divided by no power of two."""
        model = {**MODEL, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64}
        assert {option.options.get("tensor_parallel", 1) for option in self.planned(model=model)} == {1}

    def test_more_devices_hold_less_each(self) -> None:
        """Compared by the layouts that need least."""
        few, many = (min(sum(one.memory.values()) for one in self.planned(world_size=size)) for size in (8, 32))
        assert many < few

    def test_a_reference_is_held_and_adapters_are_small(self) -> None:
        """Weights and optimizer state of the first layout."""
        plain, with_reference = self.planned(reference=None, reference_passes=0.0), self.planned()
        adapters = self.planned(lora=LoraSpec(rank=8))
        assert plain[0].memory["weights"] < with_reference[0].memory["weights"]
        assert adapters[0].memory["optimizer state"] < plain[0].memory["optimizer state"] / 5

    def test_a_model_without_sizes_is_refused(self) -> None:
        """By the key that it lacks."""
        with pytest.raises(ModelError, match="hidden_size"):
            self.planned(model={"model_type": "llama"})
