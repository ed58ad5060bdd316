"""The driver's overhead: a step's CPU seconds outside the backends, with fakes, from 2,048 to 65,536 rollouts.

    .venv/bin/python benchmarks/driver_overhead.py
    .venv/bin/python benchmarks/driver_overhead.py --collectors 2

Samples of 800 tokens after a prompt of 8, reference log-probabilities on, microbatches of 16,384 tokens. The floor is one copy
of the step's columns: 4 of 4 bytes and a mask for each token, read and written once. The loop is a plain one of Python, of 100
additions for each rollout, in the same process behind the steps.

With `--collectors` the run is on Ray, with as many ranks, each with an engine. The driver's seconds are then those of its whole
process, and those of the collectors are the sum of their processes' seconds.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
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
PROMPT_TOKENS = 8
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

FAKES = """
from attrs import evolve
from rlcore.spi import capabilities
from rlcore.testing.fakes import FAKE_ALGORITHM as ALGORITHM, FAKE_ENVIRONMENT as ENVIRONMENT, FAKE_GENERATOR as GENERATOR
from rlcore.testing.fakes import FAKE_TRAINER

TRAINER = evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities | {capabilities.MULTI_RANK})
"""
"""Ranks get the same data: each is a part of one data-parallel rank."""


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


class ProcessSeconds(Progress):
    """CPU seconds of each step: those of this process, and those of the collectors."""

    def __init__(self) -> None:
        self.driver: list[float] = []
        self.collectors: list[float] = []
        self.last = self.now()

    def now(self) -> tuple[float, float]:
        spent = 0.0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "CollectorActor" in "".join(process.cmdline()[:1]):
                    spent += sum(process.cpu_times()[:2])
        return time.process_time(), spent

    def step(self, step: int, metrics: Any) -> None:
        now = self.now()
        self.driver.append(now[0] - self.last[0])
        self.collectors.append(now[1] - self.last[1])
        self.last = self.now()


@contextmanager
def installed_fakes() -> Iterator[None]:
    """The fakes as a distribution that workers find."""
    with tempfile.TemporaryDirectory() as folder:
        information = Path(folder) / "overhead_fakes-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: overhead-fakes\nVersion: 1.0\n")
        groups = {"trainers": "TRAINER", "generators": "GENERATOR", "algorithms": "ALGORITHM", "environments": "ENVIRONMENT"}
        points = [f"[rlcore.{group}]\nfake = overhead_fakes:{name}\n" for group, name in groups.items()]
        (information / "entry_points.txt").write_text("".join(points))
        (Path(folder) / "overhead_fakes.py").write_text(FAKES)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.path.insert(0, folder)
        yield


def measure_apart(
    num_rollouts: int, num_turns: int, num_tokens: int, num_steps: int, num_collectors: int
) -> tuple[float, float]:
    """Median CPU seconds of a step in the driver's process, and in those that collect."""
    progress = ProcessSeconds()
    with tempfile.TemporaryDirectory() as directory:
        layout = [f"cluster.gpus_per_node={num_collectors}", f"cluster.collectors={num_collectors}", "run.device=cpu"]
        layout += ["trainer.name=fake", "generator.name=fake"]
        prepared = prepare(*recipe_of(directory, num_rollouts, num_turns, num_tokens, num_steps, layout))
        train(prepared, resume=False, progress=progress, tokenizer=FakeTokenizer())
    return median(progress.driver[1:]), median(progress.collectors[1:])


def measure(num_rollouts: int, num_turns: int, num_tokens: int, num_steps: int) -> tuple[float, float]:
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
        prepared = prepare(*recipe_of(directory, num_rollouts, num_turns, num_tokens, num_steps), registry=registry)
        train(prepared, resume=False, progress=progress, tokenizer=FakeTokenizer())
    return median(progress.driver[1:]), median(progress.episodes[1:])


def recipe_of(
    directory: str, num_rollouts: int, num_turns: int, num_tokens: int, num_steps: int, options: Sequence[str] = ()
) -> tuple[Path, list[str]]:
    """The recipe of a run, as a file, and what it has otherwise."""
    recipe = Path(directory) / "recipe.toml"
    recipe.write_text(RECIPE)
    return recipe, [
        f"run.directory={directory}",
        f"run.num_steps={num_steps}",
        f"training.prompts_per_step={num_rollouts // 32}",
        f"rollout.max_turns={num_turns}",
        f"environment.fake.num_turns={num_turns}",
        f"rollout.max_response_tokens={num_tokens}",
        f"rollout.max_turn_tokens={num_tokens if num_turns == 1 else num_tokens // num_turns - LONGEST_ANSWER}",
        *options,
    ]


def loop_s(num_rollouts: int) -> float:
    """CPU seconds of a plain loop of 100 additions for each rollout."""
    start, total = time.process_time(), 0
    for _ in range(num_rollouts):
        for number in range(100):
            total += number
    return time.process_time() - start


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
    parser.add_argument("--tokens", type=int, default=800, help="tokens of a rollout, in all turns")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--collectors", type=int, default=0, help="processes that collect, on Ray; 0 for one process without Ray"
    )
    parser.add_argument("--quick", action="store_true", help="two steps of 64 rollouts, to try the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rollouts, arguments.steps = [64], 2
    with installed_fakes() if arguments.collectors else nullcontext():
        for place, num_rollouts in enumerate(arguments.rollouts):
            sizes = num_rollouts, arguments.turns, arguments.tokens, arguments.steps
            found = measure_apart(*sizes, arguments.collectors) if arguments.collectors else measure(*sizes)
            floor = copy_floor_s(num_rollouts * (PROMPT_TOKENS + arguments.tokens))
            show(num_rollouts, *found, floor, num_turns=arguments.turns, apart=bool(arguments.collectors), titled=place == 0)


def show(num_rollouts: int, driver: float, other: float, floor: float, *, num_turns: int, apart: bool, titled: bool) -> None:
    """Print a row, the first one with titles."""
    loop = loop_s(num_rollouts)
    second = "collectors s" if apart else "of it episodes, µs a turn"
    if titled:
        titles = f"{second:>27}{'copy floor s':>14}{'loop s':>9}{'driver, × loop':>16}"
        print(f"{'rollouts':>10}{'driver s':>10}{'µs a rollout':>14}{titles}", flush=True)
    shown = other if apart else other / num_rollouts / num_turns * 1e6
    rest = f"{shown:>27.1f}{floor:>14.3f}{loop:>9.3f}{driver / loop:>16.2f}"
    print(f"{num_rollouts:>10}{driver:>10.3f}{driver / num_rollouts * 1e6:>14.1f}{rest}", flush=True)


if __name__ == "__main__":
    main()
