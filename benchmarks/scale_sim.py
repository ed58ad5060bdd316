"""What the driver costs when many ranks stand behind it: seconds of a step, and memory, for 8 to 1,024 ranks.

    .venv/bin/python benchmarks/scale_sim.py
    .venv/bin/python benchmarks/scale_sim.py --ranks 64 --profile

The real driver (`rlcore.run.train`, its loop, rollouts and metrics), the algorithm `grpo`, the real balancing and the real
cutting and joining of what travels (`rlcore.run.cluster`), with workers that answer at once in place of GPUs: 256 rollouts a
rank and step, in groups of 32, four updates, with log-probabilities of the policy and of a reference policy. Lengths are
log-normal with a mean of 795 tokens, cut at 3,946, after a prompt of about 8. There is a generator for every rank. What the
workers take to make up their answers is left out, and so are Ray's object store (`--object-store` puts it in) and the network.
Two columns are the fakes' own: `rewards`, where the environment is called once a rollout, and `texts`, where a tokenizer of
single characters decodes what it judges.

Each row runs in a process of its own. Memory is the process's peak above what it held before the first step: the step's columns
in whatever copies there are at a time, the workers' answers included. The floor is one copy of the step's columns.
"""

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from response_lengths import lengths_of

import rlcore.run.train as driver
from rlcore.plugins.discovery import Registry
from rlcore.run.cluster.dispatch import RankPart
from rlcore.run.cluster.orders import LogprobsOrder, StepOrder
from rlcore.run.cluster.pool_groups import PoolGenerator, PoolTrainer
from rlcore.run.groups import Backends, RefitOrder
from rlcore.run.progress import SilentProgress
from rlcore.run.setup import prepare
from rlcore.spi import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    TrainStepResult,
)
from rlcore.spi.arrays import Float32Array, Int32Array
from rlcore.testing.fakes import FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer
from rlcore_grpo.provider import PROVIDER as GRPO

GROUP = 32
ROLLOUTS_PER_RANK = 256
MAX_TOKENS = 16_384
LIMIT = 3946
STEP_S = 60.0
MIB = 2**20
BYTES_PER_TOKEN = 4 * 4 + 1
TIMED = ("generation", "logprobs", "train", "other", "rewards")
PHASES = (*TIMED, "texts")
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
updates_per_step = 4
max_tokens_per_microbatch = {MAX_TOKENS}
max_token_mult_prob_error = inf
warn_token_mult_prob_error = inf
[logging]
rollouts_every_n_steps = 0
curve = false
[checkpoint]
at_end = false
"""


class Workers:
    """Time that passes in workers, which the driver does not spend."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_s = 0.0

    @contextmanager
    def work(self, phase: str) -> Iterator[None]:
        start, start_cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu_s += time.process_time() - start_cpu
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class LocalCalls:
    """The calls of a pool, answered at once in this process."""

    is_usable = True

    def __init__(self, workers: Workers, num_ranks: int) -> None:
        self.workers = workers
        self.ranks = range(num_ranks)
        self.places = [f"rank {rank}" for rank in self.ranks]

    def together(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One answer a rank."""
        with self.workers.work({"train_step": "train"}.get(name, name)):
            return [getattr(self, name)(*given) for given in arguments]

    def apart(self, name: str, arguments: Mapping[int, tuple[Any, ...]], **_: Any) -> list[Any]:
        """One answer of each of some ranks."""
        with self.workers.work("generation"):
            return [getattr(self, name)(*given) for given in arguments.values()]

    def train_step(self, order: StepOrder, part: Any) -> TrainStepResult:
        received(part)
        metrics = {"token_mult_prob_error": 1.0}
        version = order.weight_version + 1
        return TrainStepResult(weight_version=version, loss=0.0, grad_norm=1.0, learning_rate=1e-6, metrics=metrics)

    def logprobs(self, order: LogprobsOrder, part: Any, leads: bool) -> Float32Array:
        return np.full(received(part).batch.num_tokens, -1.0, np.float32)

    def generate(self, request: GenerateRequest) -> GenerateResult:
        lengths = lengths_of(request.seeds, mean=795, limit=LIMIT)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        num_tokens = int(offsets[-1])
        return GenerateResult(
            tokens=(1 + np.arange(num_tokens, dtype=np.int32) % 26),
            offsets=offsets,
            logprobs=np.full(num_tokens, -1.0, np.float32),
            weight_versions=np.full(num_tokens, request.weight_version, np.int32),
            finish_reasons=np.full(len(lengths), FinishReason.LENGTH, np.uint8),
        )


def received(part: Any) -> RankPart:
    """What a worker gets: from Ray's object store, or as it is."""
    return ray.get(part) if isinstance(part, ray.ObjectRef) else part


class TimedTokenizer(FakeTokenizer):
    """A character tokenizer; the seconds that it takes for texts are counted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def decode_batch(self, sequences: Sequence[Sequence[int] | Int32Array]) -> list[str]:
        start = time.perf_counter()
        texts = super().decode_batch(sequences)
        self.seconds += time.perf_counter() - start
        return texts


class NoRoute:
    """Weights do not pass through the driver."""

    def hand_over(self, order: RefitOrder) -> None:
        """Nothing."""


class StepSeconds(SilentProgress):
    """Driver seconds of each step, by phase."""

    def __init__(self, workers: Workers, tokenizer: TimedTokenizer) -> None:
        self.workers, self.tokenizer = workers, tokenizer
        self.steps: list[dict[str, float]] = []
        self.base_bytes = 0
        self.last_cpu = 0.0

    def started(self, run_directory: Path, step: int, num_steps: int) -> None:
        self.base_bytes = peak_bytes()
        self.last_cpu = time.process_time()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        found = {phase: metrics[f"time/{phase}_s"] - self.workers.seconds.get(phase, 0.0) for phase in TIMED}
        found["texts"], self.tokenizer.seconds = self.tokenizer.seconds, 0.0
        found["other"] -= found["texts"]
        now = time.process_time()
        cpu_s = now - self.last_cpu - self.workers.cpu_s
        self.steps.append({**found, "cpu": cpu_s, "tokens": metrics["mean_generated_tokens"]})
        self.workers.seconds.clear()
        self.workers.cpu_s, self.last_cpu = 0.0, now


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_ranks: int, num_rollouts: int, num_steps: int) -> dict[str, float]:
    """The quickest of the steps after the first."""
    workers = Workers()

    @contextmanager
    def execution(*_: object) -> Iterator[Callable[[], Any]]:
        @contextmanager
        def opened() -> Iterator[Backends]:
            calls: Any = LocalCalls(workers, num_ranks)
            trainer = PoolTrainer(
                calls=calls,
                entry=registry.of("trainer")[0],
                members=[[rank] for rank in range(num_ranks)],
                max_tokens_per_microbatch=MAX_TOKENS,
                temperature=1.0,
            )
            generator = PoolGenerator(calls=calls, entry=registry.of("generator")[0], hosts=range(num_ranks))
            yield Backends(trainer=trainer, generator=generator, route=NoRoute())

        yield opened

    driver.execution = execution  # type: ignore[assignment]
    providers = {
        "trainer": [FAKE_TRAINER],
        "generator": [FAKE_GENERATOR],
        "algorithm": [GRPO],
        "environment": [FAKE_ENVIRONMENT],
    }
    tokenizer = TimedTokenizer()
    registry = Registry.from_providers(providers)
    progress = StepSeconds(workers, tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.toml"
        recipe.write_text(RECIPE)
        keys = {"run.directory": directory, "run.num_steps": num_steps, "training.prompts_per_step": num_rollouts // GROUP}
        overrides = [f"{key}={value}" for key, value in keys.items()]
        prepared = prepare(recipe, overrides, registry=registry)
        driver.train(prepared, resume=False, progress=progress, tokenizer=tokenizer)
    steps = progress.steps[1:] or progress.steps
    return {
        **min(steps, key=lambda step: sum(step[phase] for phase in PHASES)),
        "cpu": min(step["cpu"] for step in steps),
        "peak_mib": (peak_bytes() - progress.base_bytes) / MIB,
    }


def start_store(real: bool) -> None:
    """Ray's object store, or nothing in its place."""
    if not real:
        ray.put = lambda value: value
        return
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=2 * 2**30, log_to_driver=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rollouts", type=int, help="a step, instead of 256 a rank")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where a step goes, for the first number of ranks")
    parser.add_argument("--object-store", action="store_true", help="send the parts through Ray, on this machine")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row or arguments.profile:
        start_store(arguments.object_store)
        profile = cProfile.Profile(time.process_time) if arguments.profile else None
        (num_ranks,) = arguments.ranks[:1]
        call = (num_ranks, arguments.rollouts or ROLLOUTS_PER_RANK * num_ranks, arguments.steps)
        found = measure(*call) if profile is None else profile.runcall(measure, *call)
        print(json.dumps(found))
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        return
    heads = ("driver s", "of 60 s", "CPU s", *PHASES, "µs a rollout", "peak MiB", "one copy MiB")
    print(f"{'ranks':>7}{'rollouts':>10}" + "".join(f"{head:>14}" for head in heads))
    for num_ranks in arguments.ranks:
        num_rollouts = arguments.rollouts or ROLLOUTS_PER_RANK * num_ranks
        own = ["--row", "--ranks", str(num_ranks), "--steps", str(arguments.steps), "--rollouts", str(num_rollouts)]
        own += ["--object-store"] if arguments.object_store else []
        output = subprocess.run([sys.executable, __file__, *own], check=True, capture_output=True, text=True).stdout
        row = json.loads(output.splitlines()[-1])
        seconds = sum(row[phase] for phase in PHASES)
        copy = num_rollouts * (row["tokens"] + 12) * BYTES_PER_TOKEN / MIB
        print(
            f"{num_ranks:>7}{num_rollouts:>10}{seconds:>14.3f}{seconds / STEP_S:>14.1%}{row['cpu']:>14.3f}"
            + "".join(f"{row[phase]:>14.3f}" for phase in PHASES)
            + f"{seconds / num_rollouts * 1e6:>14.1f}{row['peak_mib']:>14,.0f}{copy:>14,.0f}"
        )


if __name__ == "__main__":
    main()
