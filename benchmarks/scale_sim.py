"""What the driver costs when many ranks stand behind it: seconds of a step, and memory, for 8 to 1,024 ranks.

    .venv/bin/python benchmarks/scale_sim.py
    .venv/bin/python benchmarks/scale_sim.py --ranks 64 --profile

The real driver (`rlcore.run.train`, its loop, rollouts and metrics), the algorithm `grpo`, the real balancing and the real
cutting and joining of what travels (`rlcore_ray`), with workers that answer at once in place of GPUs: 256
rollouts a rank and step, in groups of 32, four updates, with log-probabilities of the policy and of a reference policy. Lengths
are log-normal with a mean of 795 tokens, cut at 3,946, after a prompt of about 8. There is a generator for every rank, and
eight ranks a node. What goes to a generator and what workers answer is pickled and unpickled as on the way through Ray. What
the workers take to make up their answers, and to decode them, is left out, and so are the network and Ray itself:
`--object-store` sends the parts through its store on this machine, and measures what one call of an actor costs the driver.

Seconds are CPU seconds of the driver's process, which other work on the machine does not change much: it does one thing at a
time, so that on a machine of its own they pass on the clock, of which `wall` is what was seen. `generation` contains the fake
environment's own code, which `environment` shows: the same calls without a driver. `system` is the kernel's share of the CPU
seconds: above all memory that is new to the process. `--keep-memory` tells the C library to keep what is freed for the next
step, in large pages. Each row runs in a process of its own. Memory is the process's peak above what it held before the first
step: the step's columns in whatever copies there are at a time, the workers' answers included; one copy is that of the step's
columns. The floor in time is what leaves for the workers, copied once, at the rate measured beside.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from scale_workers import LIMIT, LocalCalls, Workers, clocks

import rlcore.run.report.timing as timing
import rlcore.run.train as driver
from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.rollout import request_queue
from rlcore.spi import EnvironmentContext, FinishReason, Turn
from rlcore.spi.execution import Backends, RefitCommand, Refitted
from rlcore.testing.fakes import FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore_grpo.provider import PROVIDER as GRPO
from rlcore_ray.engines import Engines
from rlcore_ray.pool_groups import PoolGenerator, PoolTrainer

GROUP = 32
ROLLOUTS_PER_RANK = 256
MAX_TOKENS = 16_384
STEP_S = 60.0
MIB = 2**20
BYTES_PER_TOKEN = 4 * 4 + 1
BYTES_SENT = 1.75 * (4 + 1) + (4 + 1 + 3 * 4 + 0.75 * 4)
"""A token: for log-probabilities its number and mask, once and for three of four updates; for an update also its advantage and
log-probabilities of generator, reference and, for three of four, policy."""
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**46),
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
TIMED = ("generation", "logprobs", "train", "other", "rewards")
RECIPE = f"""
[model]
path = "none"
[algorithm]
name = "grpo"
[algorithm.grpo]
kl_coefficient = 0.1
previous_logprobs = "trainer"
[environment]
name = "fake"
[environment.fake]
num_train_rows = 16384
[rollout]
samples_per_prompt = {GROUP}
max_prompt_tokens = 16
max_response_tokens = {LIMIT}
stop_token_ids = []
[training]
minibatches_per_step = 4
max_tokens_per_microbatch = {MAX_TOKENS}
max_token_mult_prob_error = inf
warn_token_mult_prob_error = inf
[logging]
rollouts_every_n_steps = 0
[sinks]
names = []
[checkpoint]
at_end = false
"""


class NoRoute:
    """Weights do not pass through the driver."""

    def sync_weights(self, order: RefitCommand) -> Refitted:
        return Refitted()


class StepSeconds(Progress):
    """Driver seconds of each step, by phase."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.steps: list[dict[str, float]] = []
        self.base_bytes = 0
        self.last = clocks()

    def started(self, run_directory: Path, step: int, num_steps: int) -> None:
        self.base_bytes = peak_bytes()
        self.last = clocks()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        found = {phase: metrics[f"time/{phase}_s"] - self.workers.seconds.get(phase, 0.0) for phase in TIMED}
        now = clocks()
        own = dict(zip(("cpu", "system", "wall"), (now - self.last - self.workers.clocks).tolist(), strict=True))
        self.steps.append({**found, **own, "tokens": metrics["mean_generated_tokens"]})
        self.workers.seconds.clear()
        self.workers.clocks[:], self.last = 0.0, now


def environment_seconds(num_rollouts: int, num_tokens: float) -> float:
    """What the fake environment takes for a step's rollouts without a driver."""
    environment = FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig())
    text = FakeTokenizer().decode(1 + np.arange(int(num_tokens)) % 26)
    turn = Turn(text=text, tokens=np.zeros(0, np.int32), finish_reason=FinishReason.LENGTH)

    async def all_steps(number: int) -> None:
        for _ in range(number):
            await environment.step(0, turn)

    return num_rollouts * min(timeit.repeat(lambda: asyncio.run(all_steps(8192)), number=1, repeat=3)) / 8192


def copy_rate() -> float:
    """Bytes a second that one thread copies."""
    source = np.ones(2**27, np.uint8)
    target = np.ones_like(source)
    return source.nbytes / min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=5))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_ranks: int, num_rollouts: int, num_steps: int) -> dict[str, float]:
    """The step after the first that took the least CPU time."""
    workers = Workers()

    @contextmanager
    def execution(*_: object) -> Iterator[Callable[[], Any]]:
        @contextmanager
        def opened() -> Iterator[Backends]:
            calls: Any = LocalCalls(workers, num_ranks)
            trainer = PoolTrainer(
                calls=calls,
                capabilities=FAKE_TRAINER.capabilities,
                model="policy",
                members=[[rank] for rank in range(num_ranks)],
                max_tokens_per_microbatch=MAX_TOKENS,
                temperature=1.0,
            )
            engines = Engines(calls=calls, hosts=range(num_ranks))
            generator = PoolGenerator(calls=calls, capabilities=FAKE_GENERATOR.capabilities, engines=engines)
            yield Backends(trainer=trainer, generator=generator, route=NoRoute())

        yield opened

    providers = {
        "trainer": [FAKE_TRAINER],
        "generator": [FAKE_GENERATOR],
        "algorithm": [GRPO],
        "environment": [FAKE_ENVIRONMENT],
    }
    registry = Registry.from_providers(providers)
    progress = StepSeconds(workers)
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.toml"
        recipe.write_text(RECIPE)
        keys = {"run.directory": directory, "run.num_steps": num_steps, "training.prompts_per_step": num_rollouts // GROUP}
        overrides = [f"{key}={value}" for key, value in keys.items()]
        prepared = prepare(recipe, overrides, registry=registry)
        clock = SimpleNamespace(perf_counter=time.process_time, monotonic=time.monotonic)
        clocked = patch.object(timing, "time", clock), patch.object(request_queue, "time", clock)
        with clocked[0], clocked[1], patch.object(driver, "execution", execution):
            driver.train(prepared, resume=False, progress=progress, tokenizer=FakeTokenizer())
    steps = progress.steps[1:] or progress.steps
    peak_mib = (peak_bytes() - progress.base_bytes) / MIB
    found = min(steps, key=lambda step: step["cpu"])
    return {
        **found,
        "wall": min(step["wall"] for step in steps),
        "environment": environment_seconds(num_rollouts, found["tokens"]),
        "floor": num_rollouts * (found["tokens"] + 12) * BYTES_SENT / copy_rate(),
        "peak_mib": peak_mib,
    }


def store(real: bool) -> AbstractContextManager[Any]:
    """Ray's object store, or nothing in its place for as long."""
    if not real:
        return patch.object(ray, "put", lambda value: value)
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=3 * 2**30, log_to_driver=False)
    return nullcontext()


def call_microseconds() -> float:
    """CPU time that a call of a Ray actor and its answer take in the driver, all its threads together."""

    class Actor:
        def call(self, name: str, part: Any) -> str:
            return name

    remote: Any = ray.remote(num_cpus=0)(Actor)
    actors = [remote.remote() for _ in range(2)]
    part = ray.put(np.zeros(10_000))
    ray.get([actor.call.remote("", part) for actor in actors])
    found = []
    for _ in range(4):
        start = time.process_time()
        references = [actors[number % 2].call.remote("train_step", part) for number in range(1024)]
        ray.wait(references, num_returns=len(references))
        ray.get(references)
        found.append((time.process_time() - start) / 1024 * 1e6)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rollouts", type=int, help="a step, instead of 256 a rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where a step goes, for the first number of ranks")
    parser.add_argument("--object-store", action="store_true", help="send the parts through Ray, on this machine")
    parser.add_argument("--keep-memory", action="store_true", help="let the C library keep what is freed")
    parser.add_argument("--quick", action="store_true", help="two steps of 128 rollouts for 8 ranks, to try the script")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.rollouts, arguments.steps = [8], 128, 2
    if arguments.row or arguments.profile:
        profile = cProfile.Profile(time.process_time) if arguments.profile else None
        (num_ranks,) = arguments.ranks[:1]
        call = (num_ranks, arguments.rollouts or ROLLOUTS_PER_RANK * num_ranks, arguments.steps)
        with store(arguments.object_store):
            found = measure(*call) if profile is None else profile.runcall(measure, *call)
        if arguments.object_store:
            print(f"a call of a Ray actor: {call_microseconds():.0f} µs of CPU time in the driver", file=sys.stderr)
        print(json.dumps(found))
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    names = ("wall", *TIMED, "system", "environment", "floor")
    heads = ("driver s", "of 60 s", *names, "µs a rollout", "peak MiB", "one copy MiB")
    print(f"{'ranks':>7}{'rollouts':>10}" + "".join(f"{head:>14}" for head in heads))
    for num_ranks in arguments.ranks:
        num_rollouts = arguments.rollouts or ROLLOUTS_PER_RANK * num_ranks
        own = ["--row", "--ranks", str(num_ranks), "--steps", str(arguments.steps), "--rollouts", str(num_rollouts)]
        own += ["--object-store"] if arguments.object_store else []
        surroundings = os.environ | (KEEP_MEMORY if arguments.keep_memory else {})
        row = json.loads(
            subprocess.check_output([sys.executable, __file__, *own], text=True, env=surroundings).splitlines()[-1]
        )
        seconds = row["cpu"]
        copy = num_rollouts * (row["tokens"] + 12) * BYTES_PER_TOKEN / MIB
        print(
            f"{num_ranks:>7}{num_rollouts:>10}{seconds:>14.3f}{seconds / STEP_S:>14.1%}"
            + "".join(f"{row[name]:>14.3f}" for name in names)
            + f"{seconds / num_rollouts * 1e6:>14.1f}{row['peak_mib']:>14,.0f}{copy:>14,.0f}"
        )


if __name__ == "__main__":
    main()
