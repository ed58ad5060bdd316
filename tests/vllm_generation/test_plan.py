"""The generator's engines for `rlcore plan`."""

import numpy as np
import pytest
from attrs import evolve
from trainer_plans import plan_context

from rlcore.spi import PlanContext
from rlcore_plan.lengths import response_lengths
from rlcore_plan.turns import generation_turns
from rlcore_rollout.schedule import Schedule, SchedulePolicy
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_vllm.checks import plan as module
from rlcore_vllm.checks.plan import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    Engine,
    generation_seconds,
    plan,
    prefill_seconds,
    reading_seconds,
    step_seconds,
)
from rlcore_vllm.setup.config import VllmConfig

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
        contexts = (option.num_devices - 1) * CONTEXT_BYTES  # of the other ranks, which map the trainer's weights there
        assert option.idle["none"] == ASLEEP_BYTES + contexts
        share = (CONTEXT.free_bytes - contexts) / CONTEXT.device.memory_bytes
        assert share - 0.01 <= option.options["gpu_memory_utilization"] <= share + 1e-6
    apart = plan(evolve(CONTEXT, is_shared=False), VllmConfig())
    assert [option.options.get("replicas", 1) for option in apart] == [8, 4, 2, 1]


def test_a_run_has_the_one_layout_of_its_section() -> None:
    """With what engines that share a device keep between refits of changes alone."""
    own = evolve(CONTEXT, as_configured=True)
    (option,) = plan(own, VllmConfig(tensor_parallel=2))
    assert option.options == {"gpu_memory_utilization": 0.87 - 0.01}, "beside the context of the other rank"
    (apart,) = plan(evolve(own, is_shared=False), VllmConfig())
    assert apart.options == {"gpu_memory_utilization": 0.87}
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


CACHE = 1e12
"""Bytes that hold the keys and values of all."""


def ahead(max_staleness: int, **changed: object) -> PlanContext:
    """A step of 128 samples of one engine, which runs so many steps ahead; answers of up to 600 tokens."""
    lengths = response_lengths(120.0, 600)
    own = {"world_size": 1, "local_size": 1, "num_sequences": 128, "samples_per_prompt": 4, "response_lengths": lengths}
    context = evolve(CONTEXT, **{**own, **changed})
    turns = generation_turns(lengths, context.samples_per_prompt, max_staleness + 1) if max_staleness else ()
    return evolve(context, generation_turns=turns)


def simulated_seconds(context: PlanContext, max_staleness: int, most: int) -> float:
    """Mean seconds of a step's generation in a run: token by token, with the schedule that runs have and an engine that gives
    its places to the samples that began first."""
    own, random = engine(), np.random.default_rng(0)
    lengths, groups = np.array(context.response_lengths), context.num_sequences // context.samples_per_prompt
    schedule = Schedule(SchedulePolicy(groups_per_step=groups, num_steps=10**6, max_staleness=max_staleness))
    wanted: dict[int, np.ndarray] = {}
    said: dict[int, np.ndarray] = {}
    seconds = []
    for _ in range(24):
        kept = {number: [one for one in said[number][said[number] < wanted[number]] if one] for number in schedule.running}
        begun = schedule.admit()
        for number in begun:
            if number % groups == 0:
                drawn = np.rint(random.permutation(lengths)).reshape(groups, -1)
            wanted[number], said[number] = drawn[number % groups], np.zeros(context.samples_per_prompt)
        reads = len(begun) + sum(bool(tokens) for tokens in kept.values())
        total = reading_seconds(context, own, reads, context.prompt_tokens)
        for tokens in kept.values():
            total += sum(reading_seconds(context, own, 1, float(one), behind=context.prompt_tokens) for one in tokens)
        while not schedule.can_take():
            places = [(number, one) for number in schedule.running for one in np.flatnonzero(said[number] < wanted[number])]
            tokens = [said[number][one] for number, one in places[:most]]
            total += step_seconds(context, own, len(tokens), context.prompt_tokens + float(np.mean(tokens)))
            for number, one in places[:most]:
                said[number][one] += 1
            for number in list(schedule.running):
                if (said[number] >= wanted[number]).all():
                    schedule.end(number, has_signal=True)
        schedule.take()
        schedule.train()
        seconds.append(total)
    return float(np.mean(seconds[3 * (max_staleness + 1) :]))


@pytest.mark.wide(sample=3)
@pytest.mark.parametrize(("most", "near"), [(1024, 0.02), (24, 0.1)])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_generation_ahead_is_that_of_a_run_token_by_token(max_staleness: int, most: int, near: float) -> None:
    """With places for all samples, and with fewer than those of one step."""
    context = ahead(max_staleness)
    found = generation_seconds(context, engine(), VllmConfig(max_num_seqs=most), CACHE)
    assert found == pytest.approx(simulated_seconds(context, max_staleness, most), rel=near)


def test_one_turn_is_a_step_that_waits_for_all() -> None:
    context = ahead(0)
    one = evolve(context, generation_turns=(context.response_lengths[-1],))
    seconds = [generation_seconds(each, engine(), VllmConfig(), CACHE) for each in (context, one)]
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize("num_sequences", [16, 256, 4096])
@pytest.mark.parametrize("most", [16, 1024])
def test_running_ahead_costs_no_more_than_what_is_read_anew(monkeypatch, num_sequences: int, most: int) -> None:
    """Which a run with the same weights for longer does not have; else no step is slower, with experts either."""
    config = VllmConfig(max_num_seqs=most)
    monkeypatch.setattr(module, "kept_seconds", lambda *arguments: 0.0)
    for own in (engine(), engine(4), engine(**EXPERTS)):
        apart = generation_seconds(ahead(0, num_sequences=num_sequences), own, config, CACHE)
        for max_staleness in (1, 2, 8):
            found = generation_seconds(ahead(max_staleness, num_sequences=num_sequences), own, config, CACHE)
            assert found <= apart * (1 + 1e-9)


def test_what_is_unfinished_is_read_anew(monkeypatch) -> None:
    """With its prompt, once for its samples; what has no place has said nothing that could be read."""
    read: list[tuple[float, float, float]] = []

    def reading(context: PlanContext, own: Engine, number: float, tokens: float, *, behind: float = 0.0) -> float:
        read.append((number, tokens, behind))
        return 1.0

    context = evolve(ahead(0, num_sequences=64), response_lengths=(100.0, 200.0, 400.0, 400.0))
    monkeypatch.setattr(module, "reading_seconds", reading)
    assert module.kept_seconds(context, engine(), 1024.0, [0.0, 150.0, 300.0]) == 4.0
    assert read == [(16.0, 100.0, 0.0), (48.0, 150.0, 100.0), (16.0, 100.0, 0.0), (32.0, 300.0, 100.0)]
    assert module.kept_seconds(context, engine(), 20.0, [0.0, 150.0, 300.0]) == pytest.approx(4.0 * 20 / 80)


def test_sequences_are_as_long_where_an_engine_has_a_part_of_one(monkeypatch) -> None:
    """Of few samples on many devices, less than one an engine."""
    seen: list[float] = []
    monkeypatch.setattr(module, "step_seconds", lambda *arguments: seen.append(arguments[3]) or 1.0)
    found = []
    for num_sequences in (1, 64):
        seen.clear()
        generation_seconds(ahead(2, world_size=8, num_sequences=num_sequences), engine(), VllmConfig(), CACHE)
        found.append(list(seen))
    assert found[0] == pytest.approx(found[1])


def test_the_assumptions_say_that_generation_runs_ahead() -> None:
    def told(context: PlanContext) -> str:
        return " ".join(plan(context, VllmConfig(tensor_parallel=1))[0].assumptions)

    assert "beside each other" not in told(ahead(0))
    assert "samples of 3 steps are generated beside each other" in told(ahead(2))
