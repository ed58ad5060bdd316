"""Tools that take their time: seconds of a step's episodes by rlcore, turn by turn in lockstep, and the floors under both.

    .venv/bin/python benchmarks/slow_tools.py
    .venv/bin/python benchmarks/slow_tools.py --quick         # a few short episodes, to try the script

A step is 16 prompts x 8 episodes of 4 turns, of up to 16 tokens each, from the generator `transformers` on a CPU with a tiny
shape and random weights. Each turn calls a tool, whose seconds are log-normal: 5% of the calls take less than 50 ms and 5% more
than 500. They follow from what the turn says, so that all rows wait for the same calls. Tools wait and compute nothing, so what
is measured is who waits for whom. Nothing is trained between the steps.

`lockstep` generates a turn of all episodes, calls all their tools, and begins the next turn once the slowest has answered: the
same generator, requests, seeds and environment. `chain` is the floor that tools set: those of a step's slowest episode, over
the number of steps whose episodes are open at once, since a step waits for those that it is the last to train on.
`tools at once` is rlcore with tools that take no time: the floor that the generator sets. `CPU` is that of the process.

In the rows of a straggler one tool of the third step's first prompt takes 30 s. `lost` is what the whole run takes longer than
as many steps of the row without a straggler; the median step says what the others lost.
"""

import argparse
import asyncio
import math
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist, mean, median
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from generator_setup import export_of, make_generator, refit
from model_shapes import make_model, texts, write_model

from rlcore.config.recipe import ModelConfig
from rlcore.run.execution.groups import InProcessGenerator
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import RolloutCollector
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.schedule import Schedule, SchedulePolicy
from rlcore.run.rollout.step_plans import Draws, PromptLimit, StepPlan
from rlcore.spi import (
    GenerateRequest,
    Observation,
    RaggedTokens,
    ResetResult,
    Row,
    SamplingParams,
    StepResult,
    Turn,
)
from rlcore_text.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer

FEWEST_S, MOST_S = 0.05, 0.5
"""Nine tenths of all calls take between these."""
MEDIAN_S = math.sqrt(FEWEST_S * MOST_S)
SIGMA = math.log(MOST_S / MEDIAN_S) / NormalDist().inv_cdf(0.95)
PROMPT_LENGTH = 12
STOP_TOKENS = tuple(range(448, 512))
"""Of 512 tokens that are about equally probable."""
ANSWER = " go on:"
SLOW_STEP = 2
"""The step with the straggler, counted from 0."""


@frozen(kw_only=True)
class Work:
    """Of a step."""

    num_prompts: int = 16
    group: int = 8
    num_turns: int = 4
    turn_tokens: int = 16
    tool_scale: float = 1.0
    """A factor of all tools' seconds; 0 lets them answer at once."""
    straggler_s: float = 30.0

    @property
    def num_episodes(self) -> int:
        return self.num_prompts * self.group


def tool_seconds(text: str) -> float:
    """What the tool takes that this turn calls."""
    drawn = NormalDist().inv_cdf((zlib.crc32(text.encode()) + 0.5) / 2**32)
    return MEDIAN_S * math.exp(SIGMA * drawn)


class SlowTools:
    """The environment. A state is the number of turns so far, and the seconds that their tools took."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.slow_prompt: str | None = None
        """The prompt of which one tool, the first that is called, takes a straggler's seconds."""
        self.longest_s = 0.0
        """The tools of the slowest episode so far, without the straggler's."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return ResetResult(observation=Observation(text=row["prompt"]), state=(row["prompt"], 0, 0.0))

    async def step(self, state: Any, turn: Turn) -> StepResult:
        prompt, number, before_s = state
        seconds = tool_seconds(turn.text) * self._work.tool_scale
        is_straggler, done = prompt == self.slow_prompt, number + 1 == self._work.num_turns
        if is_straggler:
            self.slow_prompt = None
        await asyncio.sleep(self._work.straggler_s if is_straggler else seconds)
        self.longest_s = max(self.longest_s, before_s + seconds)
        return StepResult(
            reward=float(len(turn.tokens)),
            done=done,
            observation=None if done else Observation(text=ANSWER),
            state=None if done else (prompt, number + 1, before_s + seconds),
        )


@frozen(kw_only=True)
class Taken:
    """What some steps took."""

    seconds: Sequence[float]
    chain_s: float
    """The tools of the slowest episode of those that ended in a step, in the mean."""
    cpu_s: float
    """Of the process, a step."""


@frozen(kw_only=True, eq=False)
class Bench:
    """One generator for all rows."""

    generator: InProcessGenerator
    tokenizer: PretrainedTokenizer
    work: Work
    rows: Sequence[Row]
    sampling: SamplingParams = field(factory=lambda: SamplingParams(stop_token_ids=STOP_TOKENS))

    def plan(self, step: int) -> StepPlan:
        """What the episodes of a step begin with."""
        number = self.work.num_prompts
        rows = [self.rows[(step * number + place) % len(self.rows)] for place in range(number)]
        return StepPlan(rows=rows, draws=Draws((0, step), number, self.work.group))

    def lockstep(self, num_steps: int) -> Taken:
        """Steps that go from turn to turn together."""
        environment = SlowTools(self.work)
        runner = EpisodeRunner(environment, timeout_s=600.0)
        taken = measure(lambda step: self._lockstep_step(runner, self.plan(step)), environment, num_steps)
        runner.close()
        return taken

    def _lockstep_step(self, runner: EpisodeRunner, plan: StepPlan) -> None:
        work, members = self.work, range(self.work.num_episodes)
        resets: list[Any] = runner.reset_all(plan.rows, plan.draws.reset_seeds)
        prompts = self.tokenizer.encode_batch([reset.observation.text for reset in resets])
        contexts = [prompts[member // work.group] for member in members]
        states = [resets[member // work.group].state for member in members]
        answer = self.tokenizer.encode(ANSWER)
        for number in range(work.num_turns):
            shared = work.group if number == 0 else 1
            result = self.generator.handle.generate(
                GenerateRequest(
                    prompts=RaggedTokens.from_lists(contexts[::shared]),
                    num_samples=shared,
                    seeds=np.array([plan.draws.seed(number, *divmod(member, work.group)) for member in members], np.int64),
                    max_tokens=np.full(len(members), work.turn_tokens, np.int32),
                    sampling=self.sampling,
                    weight_version=0,
                )
            )
            said = np.split(result.tokens, result.offsets[1:-1])
            said_texts = self.tokenizer.decode_batch(said)
            turns = [
                Turn(text=said_texts[member], tokens=said[member], finish_reason=result.finish_reasons[member])
                for member in members
            ]
            answers: list[Any] = runner.step_all(states, turns)
            states = [one.state for one in answers]
            contexts = [[*contexts[member], *said[member].tolist(), *answer] for member in members]

    def rlcore(self, policy: SchedulePolicy, num_steps: int, *, straggler: bool = False) -> Taken:
        """As `lockstep`, by the collector that a run has."""
        work, environment = self.work, SlowTools(self.work)
        if straggler:
            environment.slow_prompt = str(self.plan(SLOW_STEP).rows[0]["prompt"])
        runner = EpisodeRunner(environment, timeout_s=600.0)
        progress = Progress()
        collector = RolloutCollector(
            generator=self.generator,
            episodes=runner,
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            samples_per_prompt=work.group,
            prompt_limit=PromptLimit(max_tokens=PROMPT_LENGTH, drops=False, key="data.train"),
            max_response_tokens=work.num_turns * (work.turn_tokens + len(ANSWER)),
            max_turns=work.num_turns,
            max_turn_tokens=work.turn_tokens,
            max_failed_fraction=0.0,
            clock=PhaseClock(progress),
            progress=progress,
        )
        run = collector.run_of(Schedule(policy), self.plan)

        def collect(_: int) -> None:
            collected = collector.collect_step(run, 0)
            assert collected is not None
            assert len(collected.rewards) == work.num_episodes
            run.train()

        taken = measure(collect, environment, num_steps)
        run.close()
        runner.close()
        return taken


def measure(make_step: Callable[[int], None], environment: SlowTools, num_steps: int) -> Taken:
    """So many steps after a first one."""
    seconds, chains, cpu_s = [], [], 0.0
    for step in range(num_steps + 1):
        start, start_cpu, environment.longest_s = time.perf_counter(), time.process_time(), 0.0
        make_step(step)
        if step:
            seconds.append(time.perf_counter() - start)
            chains.append(environment.longest_s)
            cpu_s += time.process_time() - start_cpu
    return Taken(seconds=seconds, chain_s=mean(chains), cpu_s=cpu_s / num_steps)


def make_bench(directory: Path, work: Work) -> Bench:
    model = write_model(directory, "tiny", "cpu", "float32")
    length = PROMPT_LENGTH + work.num_turns * (work.turn_tokens + len(ANSWER))
    handle = make_generator("transformers", model, "cpu", "float32", "in_process", length, {})
    refit(handle, export_of(make_model("tiny", "cpu", "float32"), 0), "in_process")
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    rows = [{"prompt": text} for text in texts(64 * work.num_prompts, PROMPT_LENGTH)]
    return Bench(generator=InProcessGenerator(handle=handle, decoder=tokenizer), tokenizer=tokenizer, work=work, rows=rows)


def policy_of(work: Work, num_steps: int, staleness: int, on_stale: Any = "wait") -> SchedulePolicy:
    """Of a run that goes on behind the steps that are measured: the last of them is one like the others."""
    return SchedulePolicy(
        groups_per_step=work.num_prompts, num_steps=num_steps + staleness + 2, max_staleness=staleness, on_stale=on_stale
    )


def compare(bench: Bench, num_steps: int, num_ahead_steps: int) -> dict[int, float]:
    """Print the table of rows without a straggler; the mean seconds of a step by staleness."""
    print(f"{'':24}{'mean step s':>13}{'longest':>10}{'× lockstep':>12}{'chain s':>10}{'CPU s':>8}")
    lockstep = bench.lockstep(num_steps)
    print_row("lockstep", lockstep, lockstep, lockstep.chain_s)
    means = {}
    for staleness, number in ((0, num_steps), (1, num_ahead_steps)):
        taken = bench.rlcore(policy_of(bench.work, number, staleness), number)
        means[staleness] = mean(taken.seconds)
        print_row(f"rlcore, staleness {staleness}", taken, lockstep, lockstep.chain_s / (staleness + 1))
    at_once = evolve(bench, work=evolve(bench.work, tool_scale=0.0))
    print_row("tools at once", at_once.rlcore(policy_of(bench.work, num_steps, 0), num_steps), lockstep, 0.0)
    return means


def print_row(name: str, taken: Taken, lockstep: Taken, chain_s: float) -> None:
    """Print a row of the first table."""
    ratio = mean(lockstep.seconds) / mean(taken.seconds)
    columns = f"{mean(taken.seconds):>13.2f}{max(taken.seconds):>10.2f}{ratio:>12.2f}{chain_s:>10.2f}{taken.cpu_s:>8.2f}"
    print(f"{name:24}{columns}", flush=True)


def with_straggler(bench: Bench, means: dict[int, float], num_steps: int, num_ahead_steps: int) -> None:
    """Print the table of rows with one."""
    print(f"\nwith one tool of {bench.work.straggler_s:g} s")
    print(f"{'':24}{'median step s':>15}{'longest':>10}{'steps':>8}{'lost s':>10}")
    for staleness, on_stale, number in (
        (0, "wait", num_steps),
        (1, "wait", num_ahead_steps),
        (1, "drop", num_ahead_steps),
        (1, "rescore", num_ahead_steps),
    ):
        policy = policy_of(bench.work, number, staleness, on_stale)
        seconds = bench.rlcore(policy, number, straggler=True).seconds
        lost = sum(seconds) - number * means[staleness]
        name = f"staleness {staleness}" + (f', "{on_stale}"' if staleness else "")
        print(f"{name:24}{median(seconds):>15.2f}{max(seconds):>10.2f}{number:>8}{lost:>10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="at a staleness of 0, after the first")
    parser.add_argument("--ahead-steps", type=int, default=36, help="at a staleness of 1, after the first")
    parser.add_argument("--quick", action="store_true", help="a few short episodes, to try the script")
    arguments = parser.parse_args()
    work = Work()
    if arguments.quick:
        work = Work(num_prompts=2, group=2, num_turns=2, turn_tokens=4, tool_scale=0.1, straggler_s=0.3)
        arguments.steps, arguments.ahead_steps = 2, 4
    with tempfile.TemporaryDirectory() as directory:
        bench = make_bench(Path(directory), work)
        means = compare(bench, arguments.steps, arguments.ahead_steps)
        with_straggler(bench, means, arguments.steps, arguments.ahead_steps)


if __name__ == "__main__":
    main()
