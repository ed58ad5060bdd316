"""The fakes for several ranks, with processes of their own to be killed and ways to fail on purpose."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import numpy as np
from attrs import evolve, frozen

from rlcore.spi import (
    BoundError,
    ContractError,
    DraftCounts,
    GeneratorContext,
    NonFiniteError,
    ObserverContext,
    Provider,
    RefitError,
    RefitResult,
    SaveStateResult,
    SinkContext,
    TrainerContext,
    TrainerLayout,
    TrainStepRequest,
    WeightBucket,
    WorkerError,
    capabilities,
    hookimpl,
)
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.generator import FakeGenerator, FakeGeneratorConfig
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig

Kind = Literal[
    "", "defect", "refuse", "not_finite", "bound", "die", "hang", "native", "stop", "differ", "fail_refit", "wait", "memory"
]


@frozen(kw_only=True)
class Fault:
    """What goes wrong, once, in a call on a rank."""

    kind: Kind = ""
    """How."""
    rank: int = -1
    """Where; -1 is everywhere."""
    hook: str = ""
    """In which hook."""
    version: int = 0
    """At which weight version."""


@frozen(kw_only=True)
class RankedTrainerConfig(FakeTrainerConfig):
    """Options of the trainer."""

    helpers: int = 1
    """Ranks that get the same data."""
    fault: Fault = Fault()
    """What goes wrong."""
    folder: str = ""
    """Where processes leave their numbers, and what has gone wrong once is noted."""
    pause_s: float = 0.0
    """How long a train step takes at least."""


@frozen(kw_only=True)
class RankedGeneratorConfig(FakeGeneratorConfig):
    """Options of the generator."""

    fault: Fault = Fault()
    """What goes wrong."""
    folder: str = ""
    """As the trainer's."""
    pause_s: float = 0.0
    """How long a generation or a refit takes at least."""
    engine: bool = False
    """Whether it depends on a process of its own."""
    span: int = 1
    """Devices of one."""
    counts_drafts: bool = False
    """Whether it says of each of its samples that it guessed two tokens, of which one was accepted."""


@frozen(kw_only=True)
class JudgedEnvironmentConfig(FakeEnvironmentConfig):
    """Options of the environment."""

    folder: str = ""
    """Where its process leaves its number; none is started without."""


class Meeting:
    """Ranks that exchange objects through rank 0, as far as they all live."""

    def __init__(self, rank: int, world_size: int, rendezvous: str | None) -> None:
        self.rank, self.peers = rank, list[Connection]()
        if world_size == 1:
            return
        address = urlparse(rendezvous or "")
        where = (address.hostname or "", address.port or 0)
        if rank == 0:
            with Listener(where, backlog=world_size) as listener:
                arrived = [listener.accept() for _ in range(world_size - 1)]
            self.peers = [peer for _, peer in sorted(((peer.recv(), peer) for peer in arrived), key=lambda pair: pair[0])]
        else:
            self.peers = [connect(where)]
            self.peers[0].send(rank)

    def all_gather(self, value: Any) -> list[Any]:
        """What every rank brought, by rank; RuntimeError where a peer is gone, as process groups have it."""
        try:
            if not self.peers:
                return [value]
            if self.rank:
                self.peers[0].send(value)
                return list(self.peers[0].recv())
            gathered = [value, *(peer.recv() for peer in self.peers)]
            for peer in self.peers:
                peer.send(gathered)
            return gathered
        except (EOFError, OSError) as error:
            raise RuntimeError("connection closed by peer") from error


@cache
def meeting(rank: int, world_size: int, rendezvous: str | None) -> Meeting:
    """One for all trainers of a process, as the process groups of torch are: policy and critic never talk at once."""
    return Meeting(rank, world_size, rendezvous)


def connect(where: tuple[str, int]) -> Connection:
    for _ in range(200):
        try:
            return Client(where)
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"rank 0 is not at {where}")


def note_process(folder: str, name: str, pid: int) -> None:
    """Leave a process's number for whoever wants to kill it."""
    if folder:
        partial = Path(folder) / f".{name}"
        partial.write_text(str(pid))
        partial.rename(Path(folder) / name)


def stand_still_with_pythons_lock() -> None:
    """Sleep in C, so that no other thread of this process goes on."""
    ctypes.PyDLL(None).sleep(1000)


def go_wrong(fault: Fault, rank: int, hook: str, version: int, folder: str) -> bool:
    """Do what the fault says; whether something subtle is still to be done."""
    if fault.kind == "" or (fault.hook, fault.version) != (hook, version) or fault.rank not in (-1, rank):
        return False
    if folder:
        done = Path(folder) / f"done-{rank}"
        if done.exists():
            return False
        done.touch()
    actions: dict[str, Callable[[], Any]] = {
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: time.sleep(1000),
        "native": stand_still_with_pythons_lock,
        "stop": stop,
        "wait": lambda: wait_for(Path(folder) / "go"),
    }
    errors = {
        "defect": ZeroDivisionError("a defect on purpose"),
        "refuse": ContractError("a contract broken on purpose"),
        "not_finite": NonFiniteError("the loss is nan on purpose"),
        "bound": BoundError("too large on purpose", {"entropy": 3.5}),
        "fail_refit": RefitError("a refit that fails on purpose"),
        "memory": MemoryError("out of memory on purpose"),
    }
    if fault.kind in errors:
        raise errors[fault.kind]
    actions.get(fault.kind, lambda: None)()
    return fault.kind == "differ"


def stop() -> None:
    """The signal may reach another thread first: this one is not to answer before the process has stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)


def wait_for(file: Path) -> None:
    """Until the test says so."""
    while not file.exists():
        time.sleep(0.02)


class RankedTrainer(FakeTrainer):
    """Data-parallel: gradients are added over the ranks, in their order."""

    def __init__(self, context: TrainerContext, config: RankedTrainerConfig) -> None:
        super().__init__(context, config)
        rank_info = context.rank_info
        self.options = config
        rank, helpers = rank_info.rank, config.helpers
        self.layout = TrainerLayout(data_parallel_rank=rank // helpers, data_parallel_size=rank_info.world_size // helpers)
        note_process(config.folder, f"trainer-{rank}", os.getpid())
        print(f"this is rank {rank}")
        self.meeting = meeting(rank, rank_info.world_size, rank_info.rendezvous)
        self.tokens_seen: list[int] = []

    @hookimpl
    def train_step(self, request):
        differs = go_wrong(self.options.fault, self.rank_info.rank, "train_step", request.weight_version, self.options.folder)
        result = FakeTrainer.train_step(self, request)
        return evolve(result, loss=result.loss + 1) if differs else result

    @hookimpl
    def get_logprobs(self, request):
        go_wrong(self.options.fault, self.rank_info.rank, "get_logprobs", request.weight_version, self.options.folder)
        self.meeting.all_gather(None)
        return FakeTrainer.get_logprobs(self, request)

    @hookimpl
    def export_weights(self, request):
        export = FakeTrainer.export_weights(self, request)
        return evolve(export, buckets=self.gathered(export.buckets, request.weight_version))

    @hookimpl
    def set_residency(self, request):
        """The second rank has most left of what its allocator keeps."""
        return evolve(FakeTrainer.set_residency(self, request), reserved_bytes=1000 + self.rank_info.rank)

    def gathered(self, buckets: Iterator[WeightBucket], version: int) -> Iterator[WeightBucket]:
        """Every bucket takes all ranks."""
        for bucket in buckets:
            if go_wrong(self.options.fault, self.rank_info.rank, "export_weights", version, self.options.folder):
                changed = evolve(bucket.tensors[0], digest=bucket.tensors[0].digest ^ 1)
                bucket = evolve(bucket, tensors=(changed, *bucket.tensors[1:]))
            self.meeting.all_gather(None)
            yield bucket

    @hookimpl
    def save_state(self, request):
        go_wrong(self.options.fault, self.rank_info.rank, "save_state", self.weight_version, self.options.folder)
        return FakeTrainer.save_state(self, request) if self.rank_info.rank == 0 else SaveStateResult(files=())

    def accumulate(self, request: TrainStepRequest) -> Any:
        self.check_shares(request)
        time.sleep(self.options.pause_s)
        mine = super().accumulate(request)
        every = self.meeting.all_gather(mine)[:: self.options.helpers]
        metrics: dict[str, float] = {}
        for _, own, _ in every:
            for name, value in own.items():
                joined = max(metrics.get(name, value), value) if name.endswith("_max") else metrics.get(name, 0.0) + value
                metrics[name] = joined
        grads = {name: sum((part[2][name] for part in every[1:]), every[0][2][name]) for name in every[0][2]}
        return sum(loss for loss, _, _ in every), metrics, grads

    def check_shares(self, request: TrainStepRequest) -> None:
        """Equally many microbatches everywhere, all loss tokens once, and helpers with the same data."""
        tokens = sum(int(batch.loss_mask.sum()) for batch in request.microbatches)
        first = np.concatenate([batch.tokens for batch in request.microbatches]).tobytes()
        shares = self.meeting.all_gather((len(request.microbatches), tokens, first))
        leaders = shares[:: self.options.helpers]
        assert len({share[0] for share in shares}) == 1, shares
        assert sum(share[1] for share in leaders) == request.counts.num_loss_tokens
        assert shares == [leaders[index // self.options.helpers] for index in range(len(shares))]


class Process:
    """A child that does nothing, but without which nothing works."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        note_process(self.folder, self.name, self.process.pid)

    def require(self) -> None:
        """WorkerError, and another process, where it has died."""
        if self.process.poll() is not None:
            self.start()
            raise WorkerError(f"{self.name} died\nits last lines")


class RankedGenerator(FakeGenerator):
    """With an engine in a process of its own."""

    def __init__(self, context: GeneratorContext, config: RankedGeneratorConfig) -> None:
        super().__init__(context, config)
        self.options = config
        print(f"a generator on devices {context.devices}")
        self.engine = Process(config.folder, f"generator-{context.rank_info.rank}") if config.engine else None
        self.num_samples = 0

    @hookimpl
    def generate(self, request):
        go_wrong(self.options.fault, self.rank_info.rank, "generate", request.weight_version, self.options.folder)
        return FakeGenerator.generate(self, request)

    @hookimpl
    def stream(self, request):
        go_wrong(self.options.fault, self.rank_info.rank, "stream", request.weight_version, self.options.folder)
        return FakeGenerator.stream(self, request)

    def begin(self, request):
        time.sleep(self.options.pause_s)
        return super().begin(request)

    def step(self, samples):
        self.require_engine()
        ended = super().step(samples)
        if ended.size and self.options.folder:
            (Path(self.options.folder) / f"generated-{self.rank_info.rank}").touch()
        self.num_samples += ended.size
        return ended

    @hookimpl
    def refit(self, request):
        self.require_engine()
        if not request.waits and (Path(self.options.folder) / f"starting-{self.rank_info.rank}").exists():
            return RefitResult(weight_version=request.weight_version, digests={}, is_starting=True)
        go_wrong(self.options.fault, self.rank_info.rank, "refit", request.weight_version, self.options.folder)
        time.sleep(self.options.pause_s)
        result = FakeGenerator.refit(self, request)
        count, self.num_samples = self.num_samples, 0
        drafts = DraftCounts(num_drafts=count, num_draft_tokens=2 * count, num_accepted_tokens=count)
        return evolve(result, drafts=drafts if self.options.counts_drafts else None)

    @hookimpl
    def set_residency(self, request):
        self.require_engine()
        return FakeGenerator.set_residency(self, request)

    @hookimpl
    def close(self, request):
        if self.engine is not None:
            self.engine.process.kill()
        return FakeGenerator.close(self, request)

    def require_engine(self) -> None:
        if self.engine is not None:
            self.engine.require()


class JudgedEnvironment(FakeEnvironment):
    """With a judge in a process of its own."""

    def __init__(self, context: Any, config: JudgedEnvironmentConfig) -> None:
        super().__init__(context, config)
        self.judge = Process(config.folder, "environment") if config.folder else None

    async def step(self, state, turn):
        if self.judge is not None:
            self.judge.require()
        return await super().step(state, turn)


@frozen(kw_only=True)
class NoOptions:
    """Options of the sink."""


TRAINER = evolve(
    FAKE_TRAINER,
    name="ranked",
    config=RankedTrainerConfig,
    backend="ranked_fakes:RankedTrainer",
    capabilities=FAKE_TRAINER.capabilities | {capabilities.MULTI_RANK},
)
GENERATOR = evolve(
    FAKE_GENERATOR,
    name="ranked",
    config=RankedGeneratorConfig,
    backend="ranked_fakes:RankedGenerator",
    num_devices=attrgetter("span"),
)
ALGORITHM = evolve(FAKE_ALGORITHM, name="ranked")
ENVIRONMENT = evolve(FAKE_ENVIRONMENT, name="ranked", config=JudgedEnvironmentConfig, backend="ranked_fakes:JudgedEnvironment")
RECORDED = Provider(name="recorded", spi=(2, 0), config=NoOptions, backend="ranked_fakes:Recorded")


@frozen(kw_only=True)
class WatchConfig:
    """Options of the observers."""

    word: str = "nothing"
    """What they write."""


class Recorded:
    """Sink: leaves the recipe that it is given, and takes the figures."""

    def __init__(self, context: SinkContext, config: object) -> None:
        (context.run_directory / "recorded.toml").write_text(context.recipe)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing is kept of a step."""

    def close(self, summary: Mapping[str, object] | None) -> None:
        """Nothing is open."""


class Watch:
    """Observer: each process leaves a file with its option."""

    config = WatchConfig

    def __init__(self, context: ObserverContext) -> None:
        assert context.run_directory is not None
        (context.run_directory / f"watch-{context.rank}").write_text(context.options.word)

    @hookimpl(wrapper=True)
    def train_step(self, request: TrainStepRequest) -> Iterator[TrainStepRequest]:
        return (yield)


class Failing:
    """Observer: raises around the first step, with its option."""

    config = WatchConfig

    def __init__(self, context: ObserverContext) -> None:
        self.word = context.options.word

    @hookimpl(wrapper=True)
    def train_step(self, request: TrainStepRequest) -> Iterator[TrainStepRequest]:
        raise KeyError(self.word)
        yield request
