"""What the driver costs: a step's seconds outside the backends' calls, with fakes, from 2,048 to 65,536 rollouts.

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

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import hookimpl
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer

BYTES_PER_TOKEN = 4 * 4 + 1
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
max_response_tokens = 800
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


class BackendSeconds:
    """An observer that adds up the seconds inside the backends."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def _timed(self) -> Generator[None, Any, Any]:
        start = time.perf_counter()
        result = yield
        self.seconds += time.perf_counter() - start
        return result

    @hookimpl(wrapper=True)
    def generate(self, request: Any) -> Generator[None, Any, Any]:
        return (yield from self._timed())

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
    """Driver seconds of each step: its total less what the backends took."""

    def __init__(self, backends: BackendSeconds) -> None:
        self.backends = backends
        self.driver: list[float] = []
        self.rewards: list[float] = []

    def step(self, step: int, metrics: Any) -> None:
        self.driver.append(metrics["time/total_s"] - self.backends.seconds)
        self.rewards.append(metrics["time/rewards_s"])
        self.backends.seconds = 0.0


def measure(num_rollouts: int, num_steps: int) -> tuple[float, float]:
    """Median seconds of a step outside the backends, and those of them in the environment's calls."""
    backends = BackendSeconds()
    registry = Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [FAKE_GENERATOR],
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
        ]
        prepared = prepare(recipe, overrides, registry=registry)
        train(prepared, resume=False, progress=progress, tokenizer=FakeTokenizer())
    return median(progress.driver[1:]), median(progress.rewards[1:])


def copy_floor_s(num_tokens: int) -> float:
    """Seconds to copy a step's columns once."""
    source = np.ones(num_tokens * BYTES_PER_TOKEN, np.uint8)
    start = time.perf_counter()
    source.copy()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[2048, 8192, 32_768, 65_536])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two steps of 64 rollouts, to try the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rollouts, arguments.steps = [64], 2
    print(f"{'rollouts':>10}{'driver s':>10}{'of it environment':>19}{'µs a rollout':>14}{'copy floor s':>14}")
    for num_rollouts in arguments.rollouts:
        driver, rewards = measure(num_rollouts, arguments.steps)
        floor = copy_floor_s(num_rollouts * 808)
        print(f"{num_rollouts:>10}{driver:>10.3f}{rewards:>19.3f}{driver / num_rollouts * 1e6:>14.1f}{floor:>14.3f}")


if __name__ == "__main__":
    main()
