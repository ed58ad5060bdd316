"""Generation that ran ahead as it was measured (docs/benchmarks.md, the headline work), beside what its own lengths come to."""

from statistics import median

import numpy as np
import pytest
from attrs import evolve
from trainer_plans import plan_context

from rlcore.run.data.prompt_stream import RandomPurpose
from rlcore_plan.devices import DEVICES
from rlcore_rollout.schedule import Schedule, SchedulePolicy
from rlcore_rollout.step_plans import Draws
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_vllm.checks.plan import Engine, reading_seconds, step_seconds
from rlcore_vllm.setup.config import VllmConfig

SAMPLES, PROMPT, LIMIT, MEAN = 32, 150, 3946, 795
EIGHT_BITS = VllmConfig(quantization="fp8", kv_cache_dtype="fp8")


def turns(shape: str, config: VllmConfig, groups: int, num_gpus: int, max_staleness: int, num_steps: int) -> list[list[float]]:
    """Of each step of a run from its seed: the tokens of its turn, its seconds, and the mean length of what it trains on."""
    from model_shapes import SHAPES  # type: ignore[import-not-found]
    from response_lengths import lengths_of  # type: ignore[import-not-found]

    dims = ModelDims.of(SHAPES[shape])
    assert dims is not None
    context, own = evolve(plan_context(), device=DEVICES["H200"]), Engine.of(dims, "bfloat16", 1, config)
    schedule = Schedule(SchedulePolicy(groups_per_step=groups, num_steps=num_steps, max_staleness=max_staleness))
    wanted: dict[int, np.ndarray] = {}
    said: dict[int, int] = {}
    found = []
    for _ in range(num_steps):
        seconds = 0.0
        for number in schedule.running:
            kept = int((wanted[number] > said[number]).sum()) / num_gpus
            seconds += reading_seconds(context, own, kept, said[number], behind=PROMPT)
        begun = schedule.admit()
        for number in begun:
            draws = Draws((0, RandomPurpose.ROLLOUTS, number // groups + 1), groups, SAMPLES)
            seeds = np.array([draws.seed(0, number % groups, member) for member in range(SAMPLES)])
            wanted[number], said[number] = lengths_of(seeds, mean=MEAN, limit=LIMIT), 0
        seconds += reading_seconds(context, own, len(schedule.running) / num_gpus, PROMPT)
        tokens = 0
        while not schedule.can_take():
            alive = {number: int((wanted[number] > said[number]).sum()) for number in schedule.running}
            total = sum(alive.values())
            mean = PROMPT + sum(count * said[number] for number, count in alive.items()) / total
            seconds += step_seconds(context, own, max(1.0, total / num_gpus), mean)
            tokens += 1
            for number in alive:
                said[number] += 1
                if said[number] == wanted[number].max():
                    schedule.end(number, has_signal=True)
        taken = schedule.take()
        schedule.train()
        found.append([tokens, seconds, float(np.mean([wanted[number].mean() for number in taken]))])
    return found


@pytest.mark.usefixtures("script")
def test_8b_in_8_bits() -> None:
    """Runs of three steps, the first of which is left out: two steps and, one step ahead, both turns, in the last of which
    nothing begins. The mean lengths are those that were measured."""
    _, *plain = turns("8b", EIGHT_BITS, 8, 1, 0, 3)
    assert median(step[2] for step in plain) == pytest.approx(809, abs=0.5)
    assert median(step[1] for step in plain) == pytest.approx(22.35, rel=0.10)
    _, second, third = turns("8b", EIGHT_BITS, 8, 1, 1, 3)
    assert [second[0], third[0]] == [1451, LIMIT - 1451]
    assert second[2] == pytest.approx(854, abs=0.5)
    assert second[1] == pytest.approx(13.2, rel=0.10)
    assert (second[2] + third[2]) / 2 == pytest.approx(847, abs=0.6)
    assert (second[1] + third[1]) / 2 == pytest.approx(12.8, rel=0.10)


@pytest.mark.usefixtures("script")
def test_1_5b() -> None:
    """Medians of six steps after the first, and of three at a staleness of 0."""
    _, *plain = turns("1.5b", VllmConfig(), 16, 2, 0, 4)
    assert median(step[1] for step in plain) == pytest.approx(12.88, rel=0.10)
    _, *ahead = turns("1.5b", VllmConfig(), 16, 2, 1, 7)
    assert median(step[1] for step in ahead) == pytest.approx(5.75, rel=0.10)
