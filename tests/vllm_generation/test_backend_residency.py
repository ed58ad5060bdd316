"""Engines that fail beside those that sleep: nobody waits for them, and they come back where the others are."""

import threading
from concurrent.futures import Future

import pytest

from rlcore.spi import CloseRequest, SetResidencyRequest, WorkerError
from rlcore_vllm import backend as module
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.config import VllmConfig

ASLEEP = SetResidencyRequest(weights="host", state="host", discard_weights=True)
AWAKE = SetResidencyRequest(weights="device", state="device")


class Engine:
    """Stands for an engine in a process of its own."""

    is_local = False
    devices = ()

    def __init__(self, name):
        self.name = name
        self.may_start = threading.Event()
        self.may_start.set()
        self.awake = True
        self.error = None
        self.num_starts = 0

    def start(self):
        assert self.may_start.wait(60)
        if self.error is not None:
            raise self.error
        self.awake, self.num_starts = True, self.num_starts + 1

    restart = start

    def set_residency(self, *, weights, cache, discard_weights):
        move = Future()
        if self.error is None:
            self.awake = weights and cache
            move.set_result(int(self.awake))
        else:
            move.set_exception(self.error)
        return move

    def give_up(self):
        self.may_start.set()

    def close(self):
        self.awake = False


@pytest.fixture
def engines(monkeypatch):
    made = [Engine("vllm-0"), Engine("vllm-1")]
    monkeypatch.setattr(module, "make_replicas", lambda context, config: made)
    return made


@pytest.fixture
def backend(two_models, engines):
    one = VllmBackend(two_models.context(channel="directory"), VllmConfig(replicas=2))
    yield one
    one.close(CloseRequest())


def join_restart():
    for thread in threading.enumerate():
        if thread.name == "rlcore-vllm-restart":
            thread.join(60)


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
