"""The driver's overhead: a step's CPU seconds outside the backends, with fakes, from 2,048 to 65,536 rollouts.

    .venv/bin/python benchmarks/driver_overhead.py

Samples of 800 tokens after a prompt of 8, reference log-probabilities on, microbatches of 16,384 tokens. The floor is one copy
of the step's columns: 4 of 4 bytes and a mask for each token, read and written once.
"""

import argparse
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import GenerateRequest, GenerateResult, hookimpl
from rlcore.spi.arrays import Int64Array
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore_rollout import sampler
from rlcore_rollout.episode_run import EpisodeRun

BYTES_PER_TOKEN = 4 * 4 + 1
NUM_TOKENS = 800
LONGEST_ANSWER = len(" again:")
RECIPE = """
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "fake"
[environment.fake]
num_train_rows = 4096
[generator.fake]
instant = true
[trainer.fake]
instant = true
[rollout]
samples_per_prompt = 32
max_prompt_tokens = 16
stop_token_ids = []
[training]
max_tokens_per_microbatch = 16384
max_token_mult_prob_error = 1e9
[logging]
rollouts_every_n_steps = 0
[sinks]
names = []
[checkpoint]
at_end = false
"""


class TimedGenerator(FakeGenerator):
    """Adds up the CPU seconds that its samples take: a stream waits for the driver besides."""

    seconds = 0.0

    def sample_instantly(self, request: GenerateRequest, limits: Int64Array) -> GenerateResult:
        start = time.thread_time()
        result = super().sample_instantly(request, limits)
        TimedGenerator.seconds += time.thread_time() - start
        return result


class TimedEpisodes(EpisodeRun):
    """Adds up the CPU seconds of episodes: all that happens from their prompts to their rewards, less the generator's."""

    seconds = 0.0

    def collect(self, *arguments: Any) -> list[int]:
        start = time.process_time() - TimedGenerator.seconds
        numbers = super().collect(*arguments)
        TimedEpisodes.seconds += time.process_time() - TimedGenerator.seconds - start
        return numbers


class BackendSeconds:
    """An observer that adds up the CPU seconds inside the other calls of the backends."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def _timed(self) -> Generator[None, Any, Any]:
        start = time.thread_time()
        result = yield
        self.seconds += time.thread_time() - start
        return result

    @hookimpl(wrapper=True)
    def train_step(self, request: Any) -> Generator[None, Any, Any]:
        return (yield from self._timed())

    @hookimpl(wrapper=True)
    def get_logprobs(self, request: Any) -> Generator[None, Any, Any]:
        return (yield from self._timed())

    @hookimpl(wrapper=True)
    def refit(self, request: Any) -> Generator[None, Any, Any]:
        return (yield from self._timed())


class StepSeconds(Progress):
    """Driver CPU seconds of each step: those of the process less what the backends took."""

    def __init__(self, backends: BackendSeconds) -> None:
        self.backends = backends
        self.driver: list[float] = []
        self.episodes: list[float] = []
        self.last = time.process_time()

    def step(self, step: int, metrics: Any) -> None:
        now = time.process_time()
        self.driver.append(now - self.last - self.backends.seconds - TimedGenerator.seconds)
        self.episodes.append(TimedEpisodes.seconds)
        self.last, self.backends.seconds, TimedGenerator.seconds, TimedEpisodes.seconds = now, 0.0, 0.0, 0.0


def measure(num_rollouts: int, num_turns: int, num_steps: int) -> tuple[float, float]:
    """Median CPU seconds of a step outside the backends, and those of them that its episodes take."""
    sampler.EpisodeRun = TimedEpisodes  # type: ignore[attr-defined]
    backends = BackendSeconds()
    registry = Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [evolve(FAKE_GENERATOR, backend=f"{__name__}:TimedGenerator")],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        },
        observers=[backends],
    )
    progress = StepSeconds(backends)
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.toml"
        recipe.write_text(RECIPE)
        overrides = [
            f"run.directory={directory}",
            f"run.num_steps={num_steps}",
            f"training.prompts_per_step={num_rollouts // 32}",
            f"rollout.max_turns={num_turns}",
            f"environment.fake.num_turns={num_turns}",
            f"rollout.max_response_tokens={NUM_TOKENS}",
            f"rollout.max_turn_tokens={NUM_TOKENS if num_turns == 1 else NUM_TOKENS // num_turns - LONGEST_ANSWER}",
        ]
        prepared = prepare(recipe, overrides, registry=registry)
        train(prepared, resume=False, progress=progress, tokenizer=FakeTokenizer())
    return median(progress.driver[1:]), median(progress.episodes[1:])


def copy_floor_s(num_tokens: int) -> float:
    """CPU seconds to copy a step's columns once."""
    source = np.ones(num_tokens * BYTES_PER_TOKEN, np.uint8)
    start = time.process_time()
    source.copy()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[2048, 8192, 32_768, 65_536])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two steps of 64 rollouts, to try the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rollouts, arguments.steps = [64], 2
    print(f"{'rollouts':>10}{'driver s':>10}{'µs a rollout':>14}{'of it episodes, µs a turn':>27}{'copy floor s':>14}")
    for num_rollouts in arguments.rollouts:
        driver, episodes = measure(num_rollouts, arguments.turns, arguments.steps)
        floor = copy_floor_s(num_rollouts * 808)
        a_rollout, a_turn = driver / num_rollouts * 1e6, episodes / num_rollouts / arguments.turns * 1e6
        print(f"{num_rollouts:>10}{driver:>10.3f}{a_rollout:>14.1f}{a_turn:>27.1f}{floor:>14.3f}")


if __name__ == "__main__":
    main()
