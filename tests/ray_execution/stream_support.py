"""Pools of the fakes on two ranks of real Ray, and streams over them."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define

from rlcore.execution import ExecutionContext
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    ExportWeightsRequest,
    FinishReason,
    LossSpec,
    SamplingParams,
    TokenBatch,
    TrainStepResult,
)
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import Backends, Minibatch, RefitCommand
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.algorithm import FakePolicyGradientConfig
from rlcore_ray.pool import open_pool
from rlcore_ray.pool_groups import PoolGenerator
from rlcore_rollout.episode import Completion, CompletionRequest
from rlcore_rollout.request_queue import RequestQueue

from .conftest import ensure_ray, write_recipe  # type: ignore[import-not-found]

LIMIT = 20000
"""More tokens than a fake makes while a test does its part."""
PROMPTS = [np.array([prompt + 1], np.int32) for prompt in range(6)]
LOSS = LossSpec(
    path="rlcore.testing.fakes.algorithm:fake_policy_gradient", config=FakePolicyGradientConfig(), token_columns=(ADVANTAGES,)
)


class Pools(Progress):
    """Keeps what the pools do, and warnings."""

    def __init__(self) -> None:
        self.doing: dict[str, list[str]] = {"trainer": [], "reference": [], "generator": []}
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def pool(self, name: str, doing: str) -> None:
        self.doing[name].append(doing)


@define
class Pool:
    """What is open, and its way to other weights."""

    backends: Backends
    channel: str
    progress: Pools

    @property
    def generator(self) -> PoolGenerator:
        assert isinstance(self.backends.generator, PoolGenerator)
        return self.backends.generator

    def refit(self, version: int) -> None:
        assert self.backends.route is not None
        export = ExportWeightsRequest(weight_version=version, dtype="float32", max_bucket_bytes=2**20)
        self.backends.route.sync_weights(RefitCommand(export=export, channel=self.channel, may_alias=False))

    def train(self, **options: Any) -> TrainStepResult:
        """Make the step from version 0; `options` are those of TrainerGroup.train_step."""
        lengths = [3] * 4
        mask = np.tile([False, True, True], 4)
        batch = TokenBatch(
            tokens=np.arange(1, 13, dtype=np.int32),
            offsets=offsets_of(lengths),
            loss_mask=mask,
            token_columns={ADVANTAGES: mask.astype(np.float32), GENERATION_LOGPROBS: np.zeros(12, np.float32)},
            sequence_columns={"group_ids": np.zeros(4, np.int32)},
        )
        minibatch = Minibatch.of(batch, np.arange(4), batch.loss_lengths, 0)
        return self.backends.trainer.train_step(minibatch, LOSS, 0, bounds={}, logprobs=False, **options)[0]


@contextmanager
def opened(folder: Path, *overrides: str) -> Iterator[Pool]:
    """Two ranks, each with a generator at version 0."""
    ensure_ray()
    options = ("cluster.gpus_per_node=2", f"rollout.max_response_tokens={LIMIT}", "trainer.ranked.initial_scale=0.5")
    plan = prepare(write_recipe(folder), [f"run.directory={folder / 'runs'}", *options, *overrides])
    assert plan.channel is not None
    progress = Pools()
    context = ExecutionContext.of(plan, FakeTokenizer(), folder / "run" / "logs", progress)
    with open_pool(context, plan.config("execution")) as backends:
        pool = Pool(backends, plan.channel, progress)
        pool.refit(0)
        yield pool


class Feed(RequestQueue):
    """Keeps what is handed out, and does something after."""

    def __init__(self, then: Callable[["Feed"], None]) -> None:
        super().__init__(self.keep)
        self.then, self.changed = then, threading.Condition()
        self.found: dict[int, Completion] = {}
        """By seed."""

    def keep(self, handed: Sequence[Completion]) -> None:
        with self.changed:
            self.found |= {one.request.seed: one for one in handed}
            self.then(self)
            self.changed.notify_all()

    def wait_for(self, seed: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: seed in self.found, 300.0)

    def of(self, reason: FinishReason) -> set[int]:
        return {seed for seed, one in self.found.items() if one.finish_reason == reason}


def end_after(num_samples: int) -> Callable[[Feed], None]:
    """End the stream once so many samples have ended."""

    def then(feed: Feed) -> None:
        if len(feed.found) >= num_samples:
            feed.end()

    return then


def wanted(seed: int, max_tokens: int) -> CompletionRequest:
    return CompletionRequest(prompt=PROMPTS[seed % 6], seed=seed, max_tokens=max_tokens, sampling=SamplingParams(), owner=seed)


def alone(generator: PoolGenerator, limits: Mapping[int, int]) -> dict[int, tuple[list[int], str]]:
    """What the generator makes of the seeds with these limits, one after another, each in a stream of its own."""
    found: dict[int, tuple[list[int], str]] = {}
    for seed, limit in limits.items():
        feed = Feed(end_after(1))
        feed.begin(0)
        feed.ask([wanted(seed, limit)])
        generator.stream(feed, 0)
        found[seed] = feed.found[seed].tokens.tolist(), feed.found[seed].text
    return found


@contextmanager
def streaming(pool: Pool, feed: Feed) -> Iterator[Future[None]]:
    """A stream beside the block."""
    feed.begin(0)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(pool.generator.stream, feed, 0)
        try:
            yield running
        finally:
            feed.end()


def assert_nothing_runs(pool: Pool) -> None:
    assert not {"collect", "standby"} & {thread.name for thread in threading.enumerate()}
    assert pool.generator.calls.query(pool.generator.hosts, "where", "?") == ["idle", "idle"]
    assert pool.progress.doing["generator"][-1] == "idle"
