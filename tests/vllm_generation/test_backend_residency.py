"""Engines that fail beside those that sleep: nobody waits for them, and they come back where the others are."""

import random
import threading
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from rlcore.spi import (
    CloseRequest,
    ContractError,
    GenerateRequest,
    RaggedTokens,
    SamplingParams,
    SetResidencyRequest,
    WorkerError,
)
from rlcore_vllm import backend as module
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.setup.config import VllmConfig

ASLEEP = SetResidencyRequest(weights="host", state="host", discard_weights=True)
AWAKE = SetResidencyRequest(weights="device", state="device")


class Engine:
    """Stands for an engine in a process of its own. It dies at the next request once `dies` is set, until it is started anew,
    and of samples where `dies_of_samples` is."""

    is_local = False
    devices = ()

    def __init__(self, name):
        self.name = name
        self.may_start = threading.Event()
        self.may_start.set()
        self.is_given_up = False
        self.awake = True
        self.error = None
        self.dies = self.dies_of_samples = False
        self.num_starts = 0
        self.num_asked = 0

    def start(self):
        assert self.may_start.wait(300)
        if self.error is not None:
            raise self.error
        self.awake, self.dies, self.num_starts = True, False, self.num_starts + 1

    restart = start

    def generate(self, samples, deliver, on_tokens=None):
        call = Future()
        if self.dies or self.dies_of_samples:
            self.dies = True
            call.set_exception(WorkerError(f"{self.name} died"))
        return call

    def begin_update(self):
        done = Future()
        if self.dies:
            done.set_exception(WorkerError(f"{self.name} died"))
        else:
            done.set_result(None)
        return done

    def end_update(self, versions):
        return self.begin_update()

    def set_residency(self, *, weights, cache, discard_weights):
        move = Future()
        self.num_asked += 1
        if self.error is None and not self.dies:
            self.awake = weights and cache
            move.set_result(int(self.awake))
        else:
            move.set_exception(self.error or WorkerError(f"{self.name} died"))
        return move

    def give_up(self):
        self.is_given_up = True
        self.may_start.set()

    def close(self):
        self.awake = False


class Transfer:
    """Stands for the channel; complains of what is sent after its end."""

    may_close = threading.Event()
    sent_bytes = None

    def __init__(self, **options):
        self.is_closed = False

    def send(self, export, delta, place):
        if self.is_closed:
            raise AssertionError("found a channel that is closed")
        return {}

    def close(self):
        assert self.may_close.wait(300)
        self.is_closed = True


@pytest.fixture
def transfer(monkeypatch):
    monkeypatch.setattr(module, "Transfer", Transfer)
    Transfer.may_close.set()
    return Transfer


@pytest.fixture
def engines(monkeypatch):
    made = [Engine("vllm-0"), Engine("vllm-1")]
    monkeypatch.setattr(module, "make_replicas", lambda context, config: made)
    return made


@pytest.fixture
def backend(two_models, engines, transfer):
    one = VllmBackend(two_models.context(channel="directory"), VllmConfig(replicas=2))
    yield one
    one.close(CloseRequest())


def join_restart():
    for thread in threading.enumerate():
        if thread.name == "rlcore-vllm-restart":
            thread.join(300)


def test_one_that_dies_as_it_goes_to_sleep_sleeps_once_it_has_started(backend, engines):
    engines[1].error = WorkerError("vllm-1 died")
    engines[1].may_start.clear()
    with pytest.raises(WorkerError, match="vllm-1 died"):
        backend.set_residency(ASLEEP)
    assert not engines[0].awake
    assert backend.set_residency(AWAKE).device_bytes == 1, "nobody waits for the other"
    backend.set_residency(ASLEEP)
    engines[1].error = None
    engines[1].may_start.set()
    join_restart()
    assert (engines[1].num_starts, engines[0].awake, engines[1].awake) == (2, False, False)
    backend.set_residency(AWAKE)
    assert (engines[0].awake, engines[1].awake) == (True, True)


def test_one_that_does_not_start_is_not_asked(backend, engines):
    engines[1].error = WorkerError("vllm-1 died")
    with pytest.raises(WorkerError):
        backend.set_residency(ASLEEP)
    join_restart()
    assert backend.set_residency(AWAKE).device_bytes == 1
    assert backend.set_residency(ASLEEP).device_bytes == 0


@contextmanager
def held_back(*events):
    for event in events:
        event.clear()
    try:
        yield
    finally:
        for event in events:
            event.set()


def test_one_that_has_failed_is_asked_for_nothing_while_the_channel_closes(backend, engines, transfer):
    with held_back(transfer.may_close):
        engines[1].dies = True
        with pytest.raises(WorkerError, match="vllm-1 died"):
            backend.set_residency(ASLEEP)
        num_asked = engines[1].num_asked
        assert backend.set_residency(AWAKE).device_bytes == 1
        assert backend.set_residency(ASLEEP).device_bytes == 0
        assert engines[1].num_asked == num_asked, "it is about to be started anew"
    join_restart()
    assert ([engine.num_starts for engine in engines], [engine.awake for engine in engines]) == ([1, 2], [False, False])


def test_nobody_waits_for_one_that_is_started_where_another_fails_meanwhile(backend, engines):
    with held_back(*(engine.may_start for engine in engines)):
        for engine in engines:
            engine.dies = True
            with pytest.raises(WorkerError, match="died"):
                backend.set_residency(ASLEEP)
        assert backend.set_residency(AWAKE).device_bytes == 0, "both are being started"
        backend.set_residency(ASLEEP)
    join_restart()
    assert [engine.num_starts for engine in engines] == [2, 2]
    assert [engine.awake for engine in engines] == [False, False]


@pytest.mark.usefixtures("transfer")
def test_a_start_that_begins_as_the_backend_closes_is_given_up(two_models, engines):
    """None is under way when it begins to close."""
    backend = VllmBackend(two_models.context(channel="directory"), VllmConfig(replicas=2))
    assert not any(engine.is_given_up for engine in engines)
    backend.close(CloseRequest())
    assert all(engine.is_given_up for engine in engines)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_when_they_end_where_the_others_are(backend, engines, two_models, seed):
    """A thread generates, and has engines die of it, while another moves and refits them."""
    chance, version, has_ended = random.Random(seed), [0], threading.Event()
    starts = [engine.num_starts for engine in engines]

    def generate():
        killing = random.Random(seed + 100)
        while not has_ended.wait(0.001):
            killed = engines[killing.randrange(2)]
            # Both: a start that ends right now takes the one back, and nobody would answer the samples.
            killed.dies = killed.dies_of_samples = True
            with suppress(WorkerError, ContractError, CancelledError):
                backend.generate(request_of(version[0]))
            killed.dies_of_samples = False

    thread = threading.Thread(target=generate)
    thread.start()
    for _ in range(300):
        moves = [ASLEEP, SetResidencyRequest(weights="device", state="host"), AWAKE]
        for move in moves[: chance.randint(1, 3)]:
            with suppress(WorkerError):
                backend.set_residency(move)
        with suppress(WorkerError):
            two_models.refit(backend, 0, version[0] + 1, channel="directory")
            version[0] += 1
    has_ended.set()
    thread.join()
    for engine in engines:
        engine.dies = False
    last = chance.choice([ASLEEP, AWAKE])
    backend.set_residency(last)
    join_restart()
    assert [engine.awake for engine in engines] == [last is AWAKE] * 2
    assert all(engine.num_starts > start for engine, start in zip(engines, starts, strict=True))
    two_models.refit(backend, 0, version[0] + 1, channel="directory")


def request_of(version):
    prompts = RaggedTokens.from_lists([[1, 2], [3, 4]])
    limits = np.full(2, 8, np.int32)
    sampling = SamplingParams()
    return GenerateRequest(
        prompts=prompts, num_samples=1, seeds=np.arange(2), max_tokens=limits, sampling=sampling, weight_version=version
    )
