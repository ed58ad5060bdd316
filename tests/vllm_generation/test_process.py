"""Engines in processes of their own: they give the same samples, and their deaths, hangs and failed starts are told apart."""

import contextlib
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from attrs import evolve
from safetensors.torch import load_file

from rlcore.spi import (
    ContractError,
    GenerateRequest,
    RaggedTokens,
    RefitError,
    RefitRequest,
    SamplingParams,
    StreamRequest,
    WorkerError,
)
from rlcore_conformance.generators.feeds import ScriptedFeed
from rlcore_conformance.references.tensors import make_export
from rlcore_vllm.engines.sampling import Event
from rlcore_vllm.replicas import process
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.setup.config import VllmConfig

CHANNEL = "shared_memory"


def request_of(num_samples=4, max_tokens=20, version=0, **options):
    prompts = RaggedTokens.from_lists([[5, 6, 7], [9] * 20, [30, 31]])
    num = prompts.num_sequences * num_samples
    return GenerateRequest(
        prompts=prompts,
        num_samples=num_samples,
        seeds=np.arange(num),
        max_tokens=np.full(num, max_tokens, np.int32),
        sampling=SamplingParams(),
        weight_version=version,
        **options,
    )


@pytest.fixture
def backend(hosted_backend, two_models):
    """Two engines that hold the first weights as version 0, whatever a test before did to them."""
    try:
        two_models.refit(hosted_backend, 0, 0, CHANNEL)
    except WorkerError:  # one had died; all have been started anew
        two_models.refit(hosted_backend, 0, 0, CHANNEL)
    return hosted_backend


def log_of(process):
    return Path(os.readlink(f"/proc/{process.pid}/fd/1"))


def engine_processes():
    """The processes of the engines by the names of their logs: "vllm-0", "vllm-1"."""
    found = {}
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if "rlcore_vllm.replicas.host" in each.cmdline():
                found[log_of(each).stem] = each
    return found


def test_samples_do_not_depend_on_where_the_engines_are(backend, local_backend, two_models):
    two_models.refit(local_backend, 0, 0)
    streamed = {}
    hosted = backend.generate(request_of(on_finished=lambda number, sample: streamed.setdefault(number, sample)))
    local = local_backend.generate(request_of())
    assert hosted.tokens.tolist() == local.tokens.tolist()
    assert hosted.offsets.tolist() == local.offsets.tolist()
    np.testing.assert_allclose(hosted.logprobs, local.logprobs, atol=1e-4)
    assert sorted(streamed) == list(range(12))


def test_engines_import_nothing_that_no_option_asked_for(backend, torchao_imported):
    assert not torchao_imported.exists()


def stand_still(replica, engines, stand, monkeypatch):
    """All engines stand still once a first sample has ended, and this one's goes on once it is told to begin a refit."""
    generate, begin_update = replica.generate, replica.begin_update

    def deliver_to(deliver, finished):
        if not stand.is_set():
            for engine in engines.values():
                engine.suspend()
            stand.set()
        deliver(finished)

    def begin():
        begun = begin_update()
        engines[replica.name].resume()
        return begun

    monkeypatch.setattr(
        replica, "generate", lambda samples, deliver, *others: generate(samples, partial(deliver_to, deliver), *others)
    )
    monkeypatch.setattr(replica, "begin_update", begin)


def test_a_refit_in_flight_reaches_every_engine(backend, two_models, monkeypatch):
    engines, held = engine_processes(), 0
    for version in range(5, 10):  # all samples may have ended before a busy machine makes the engines stand still
        stand, results = threading.Event(), []
        request = request_of(2, 280, version=held)
        request.max_tokens[:2] = 1
        with monkeypatch.context() as patch:
            for replica in backend._replicas:
                stand_still(replica, engines, stand, patch)
            call = threading.Thread(target=lambda request=request, results=results: results.append(backend.generate(request)))
            call.start()
            assert stand.wait(300)
            two_models.refit(backend, 1, version, CHANNEL)
            call.join(300)
        spans = np.split(results[0].weight_versions, results[0].offsets[1:-1])
        assert all(set(span.tolist()) <= {held, version} and (np.diff(span) >= 0).all() for span in spans)
        held, changed = version, sum(set(span.tolist()) == {held, version} for span in spans)
        if changed >= 2:
            break
    assert changed >= 2
    assert backend.generate(request_of(version=held)).weight_versions.tolist() == [held] * 240


def test_an_engine_that_dies_is_replaced_and_waits_for_a_refit(backend, two_models, monkeypatch):
    """Its death is told before another one has started."""
    expected = backend.generate(request_of())
    before = engine_processes()
    replica, may_start = backend._replicas[1], threading.Event()
    restart = replica.restart
    monkeypatch.setattr(replica, "restart", lambda: may_start.wait(300) and restart())

    def kill(number, sample):
        os.kill(before["vllm-1"].pid, signal.SIGKILL)

    request = request_of(4, 280, on_finished=kill)
    request.max_tokens[:2] = 1
    os.kill(before["vllm-1"].pid, signal.SIGSTOP)  # so that it does not end before it is killed
    with pytest.raises(WorkerError, match=r"vllm-1 .* SIGKILL\. .*vllm-1\.log\.\nIts last lines:\n"):
        backend.generate(request)
    assert engine_processes().keys() == {"vllm-0"}
    export = make_export(load_file(two_models.directories[0] / "model.safetensors"), 3)
    hurried = RefitRequest(weight_version=3, channel=CHANNEL, weights=export, may_alias=False, waits=False)
    assert backend.refit(hurried).is_starting
    may_start.set()
    with pytest.raises(ContractError, match="no weights; .* version 0"):
        backend.generate(request_of())
    after = engine_processes()
    assert (after["vllm-0"], after.keys()) == (before["vllm-0"], before.keys())
    assert after["vllm-1"] != before["vllm-1"]
    two_models.refit(backend, 0, 3, CHANNEL)
    assert backend.generate(request_of(version=3)).tokens.tolist() == expected.tokens.tolist()


def test_an_engine_that_stands_still_as_it_generates_is_ended_long_before_a_generation_may_be(backend, monkeypatch):
    """The first sample that it has ended stops it: it is at work on many others."""
    replica, stopped = backend._replicas[1], engine_processes()["vllm-1"]
    generate = replica.generate

    def stopping(samples, deliver, *others):
        return generate(samples, lambda finished: (stopped.suspend(), deliver(finished)), *others)

    request = request_of(128, 280)
    request.max_tokens[::32] = 1
    with monkeypatch.context() as patched:
        patched.setattr(replica, "generate", stopping)
        patched.setattr(replica, "_config", evolve(replica._config, refit_timeout_s=5.0, generate_timeout_s=60.0))
        with pytest.raises(WorkerError, match=r"vllm-1 .* generate within 5 s .*\.refit_timeout_s"):
            backend.generate(request)
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE


class NeverReady:
    """Stands for a process whose engine starts for ever."""

    def __init__(self, *_):
        self.given_up, self.awaited, self.ended = threading.Event(), threading.Event(), False

    def await_engine(self, timeout_s):
        self.awaited.set()
        assert self.given_up.wait(300)
        raise WorkerError("given up")

    def give_up(self):
        self.given_up.set()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_start_that_nobody_waits_for_ends(monkeypatch, tmp_path, has_begun):
    child = NeverReady()
    monkeypatch.setattr(process, "hosting", lambda *_: child)
    replica = ProcessReplica("vllm-0", None, (), VllmConfig(), tmp_path / "logs")
    if not has_begun:
        replica.give_up()
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(replica.restart)
        assert child.awaited.wait(300)
        replica.give_up()
        with pytest.raises(WorkerError, match="given up"):
            start.result(300)
    assert child.ended
    replica.close()


class Running(NeverReady):
    """Stands for a process with an engine, in which another would start for ever."""

    is_usable = True

    def await_engine(self, timeout_s):
        pass

    def call(self, function, what, timeout_s, key=None):
        if what == "restart" and not self.given_up.wait(300):
            raise AssertionError("found a start that goes on")
        raise WorkerError("ended")


def test_an_engine_that_is_given_up_is_not_started_in_the_process_that_it_has(monkeypatch, tmp_path):
    children = [Running(), NeverReady()]
    left = iter(children)
    monkeypatch.setattr(process, "hosting", lambda *_: next(left))
    replica = ProcessReplica("vllm-0", None, (), VllmConfig(), tmp_path / "logs")
    replica.start()
    replica.give_up()
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(replica.restart)
        try:
            with pytest.raises(WorkerError, match="given up"):
                start.result(120)
        finally:
            children[0].give_up()
    assert all(child.ended for child in children)
    replica.close()


@pytest.mark.wide  # above one dies in a call; tests/ray_execution has ranks that die in a stream
def test_an_engine_that_dies_in_a_stream_ends_it(backend, two_models):
    """What the other engine has is delivered, what the dead one had is not, and the next stream needs a refit."""
    request = request_of(4, 280)
    request.max_tokens[:2] = 1
    expected = backend.generate(request)
    victim = engine_processes()["vllm-1"]
    feed = ScriptedFeed(first=[request], then=lambda: os.kill(victim.pid, signal.SIGKILL) or [])
    os.kill(victim.pid, signal.SIGSTOP)  # else it may have ended everything by then
    with pytest.raises(WorkerError, match="vllm-1 ended with signal SIGKILL"):
        backend.stream(StreamRequest(feed=feed, weight_version=0))
    assert 0 < len(feed.delivered) < 12
    bounds = expected.offsets
    for number, sample in feed.delivered.items():
        whole = expected.tokens[bounds[number] : bounds[number + 1]].tolist()
        assert sample.tokens.tolist() == whole[: len(sample.tokens)]
    with pytest.raises(ContractError, match="found no weights"):
        backend.stream(StreamRequest(feed=ScriptedFeed(first=[request]), weight_version=0))
    two_models.refit(backend, 0, 3, CHANNEL)
    again = ScriptedFeed(first=[request])
    backend.stream(StreamRequest(feed=again, weight_version=3))
    tokens = [again.delivered[number].tokens.tolist() for number in range(12)]
    assert tokens == [part.tolist() for part in np.split(expected.tokens, bounds[1:-1])]


def test_engines_are_out_of_reach_of_the_terminal(backend):
    """^C goes to the foreground process group, of which they are no part; their output goes to a file."""
    processes = engine_processes().values()
    assert len(processes) == 2
    for each in processes:
        assert os.getpgid(each.pid) == each.pid != os.getpgid(0)
        assert log_of(each).stat().st_size > 0


def test_an_engine_is_started_anew_in_its_process(backend, two_models):
    """Where the process still answers, as after a refit that fails: that spares it the imports."""
    expected = backend.generate(request_of())
    processes = engine_processes()
    weights = load_file(two_models.directories[0] / "model.safetensors")
    del weights["model.norm.weight"]
    with pytest.raises(RefitError, match=r"missing .*: model\.norm\.weight"):
        backend.refit(RefitRequest(weight_version=1, channel=CHANNEL, weights=make_export(weights, 1), may_alias=False))
    assert engine_processes() == processes
    with pytest.raises(ContractError, match="found no weights"):
        backend.generate(request_of())
    two_models.refit(backend, 0, 2, CHANNEL)
    assert backend.generate(request_of(version=2)).tokens.tolist() == expected.tokens.tolist()


def test_an_engine_that_hangs_is_ended(backend):
    """As seen by one replica: its process is stopped, and a call takes longer than it may."""
    replica = backend._replicas[0]
    process, usual = replica._child.process, replica._config
    replica._config = evolve(usual, refit_timeout_s=0.5)
    os.killpg(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)  # one of its threads takes the signal, and the others go on until it has
    try:
        with pytest.raises(WorkerError, match="begin_update within 0.5 s .*refit_timeout_s"):
            replica.begin_update().result(120)
    finally:
        replica._config = usual
    assert process.wait(300) == -signal.SIGKILL


DISTURBED = "Error in memory profiling. Initial free memory 126.14 GiB, current free memory 135.33 GiB."


@pytest.mark.parametrize(("failures", "starts"), [([DISTURBED], 2), ([DISTURBED] * 3, 3), (["another"], 1)])
def test_an_engine_that_others_disturb_is_started_again(failures, starts, monkeypatch, tmp_path):
    made = []

    class Starting:
        def __init__(self, *arguments):
            made.append(self)
            self.is_usable = True

        def await_engine(self, timeout_s):
            if len(made) <= len(failures):
                raise WorkerError(f"vllm-0 ended: {failures[len(made) - 1]}")

        def end(self):
            self.is_usable = False

    monkeypatch.setattr(process, "hosting", Starting)
    replica = ProcessReplica("vllm-0", None, (), VllmConfig(), tmp_path)
    if starts > len(failures):
        replica.start()
    else:
        with pytest.raises(WorkerError, match="vllm-0 ended"):
            replica.start()
    assert [child.is_usable for child in made] == [False] * len(failures) + [True] * (starts - len(failures))


class FakeHost:
    """Ends a call as soon as it is submitted, or cut where `holds` says so."""

    def __init__(self, holds=False):
        self.holds = holds
        self.calls, self.events = [], queue.SimpleQueue()

    def submit(self, number, samples):
        self.calls.append("submit")
        if not self.holds:
            self.end(number)

    def cut(self, numbers, sample=None):
        self.calls.append(("cut", len(numbers)))
        for number in numbers:
            self.end(number)

    def cancel(self, number):
        self.calls.append("cancel")

    def begin_update(self):
        self.calls.append("begin_update")

    def collect(self, timeout_s):
        with contextlib.suppress(queue.Empty):
            return [self.events.get(timeout=timeout_s)]
        return []

    def end(self, number, **changes):
        self.events.put(Event(number=number, finished=[number], is_last=True, **changes))


class FakeChild:
    """Calls its host in this process; `die` is what a killed process does to the calls under way."""

    def __init__(self, host, collect_s=0.02):
        self.host, self.collect_s, self.dead = host, collect_s, None
        self.expired = []
        self.is_usable = False

    def call(self, function, what, timeout_s, key):
        if self.dead is not None:
            raise WorkerError(self.dead)
        return function(self.host)

    def expire(self, what, limit_s, key):
        self.expired.append((what, limit_s, key))
        self.dead = f"gave no answer to {what}"

    def with_output(self, error):
        return WorkerError(f"its output; {error}")

    def end(self):
        self.dead = "ended"


@pytest.fixture
def make_fake(monkeypatch, tmp_path):
    """A replica whose process is a fake one."""
    monkeypatch.setattr(process, "COLLECT_S", 0.02)
    replicas = []

    def make(host, **options):
        replica = ProcessReplica("vllm-0", None, (), VllmConfig(**options), tmp_path)
        replica._child = FakeChild(host)
        replicas.append(replica)
        return replica

    yield make
    for replica in replicas:
        replica.close()


def test_a_refit_does_not_overtake_a_request_that_was_made_before_it(make_fake):
    """Else the engine would begin the request with other weights than those that were asked for."""
    host = FakeHost()
    submit = host.submit
    host.submit = lambda *arguments: (time.sleep(0.2), submit(*arguments))
    replica = make_fake(host)
    done = replica.generate(None, lambda finished: None)
    replica.begin_update().result(120)
    done.result(120)
    assert host.calls == ["submit", "begin_update"]


def test_calls_share_a_thread_that_ends_with_the_last_of_them(make_fake):
    host = FakeHost(holds=True)
    replica = make_fake(host)
    delivered = []
    calls = [replica.generate(None, delivered.append) for _ in range(3)]
    collector = replica._receiver
    replica.cut(calls[:2])
    for call in calls[:2]:
        call.result(120)
    assert collector.is_alive()
    assert host.calls == ["submit"] * 3 + [("cut", 2)]
    replica.cut(calls)
    calls[2].result(120)
    collector.join(300)
    assert not collector.is_alive()
    assert len(delivered) == 3
    call = replica.generate(None, delivered.append)
    replica.cut([call])
    call.result(120)
    assert len(delivered) == 4


def test_calls_that_cannot_be_cut_end_with_the_reason(make_fake):
    def fail(numbers, sample):
        raise WorkerError(f"planted in the cut of {len(numbers)}")

    host = FakeHost(holds=True)
    host.cut = fail
    replica = make_fake(host)
    calls = [replica.generate(None, lambda finished: None) for _ in range(3)]
    replica.cut(calls[:2])
    for call in calls[:2]:
        with pytest.raises(WorkerError, match="cut of 2"):
            call.result(120)
    host.end(2)
    calls[2].result(120)


def test_a_cancelled_call_gets_no_samples_any_more(make_fake):
    host = FakeHost(holds=True)
    replica = make_fake(host)
    delivered = []
    cancelled, kept = (replica.generate(None, delivered.append) for _ in range(2))
    assert cancelled.cancel()
    replica.begin_update().result(120)
    assert host.calls == ["submit", "submit", "cancel", "begin_update"]
    first, second = range(2)
    host.end(first)
    host.end(second)
    kept.result(120)
    assert delivered == [[second]]


def test_a_call_that_fails_says_what_the_process_wrote(make_fake):
    host = FakeHost(holds=True)
    replica = make_fake(host)
    failing, fine = (replica.generate(None, lambda finished: None) for _ in range(2))
    host.end(0, error=WorkerError("the device is on fire"))
    with pytest.raises(WorkerError, match="its output; .* on fire"):
        failing.result(120)
    host.end(1)
    fine.result(120)


def test_a_call_under_way_for_too_long_ends_the_process(make_fake):
    replica = make_fake(FakeHost(holds=True), generate_timeout_s=0.1)
    child = replica._child
    calls = [replica.generate(None, lambda finished: None) for _ in range(2)]
    for call in calls:
        with pytest.raises(WorkerError, match="no answer to generate"):
            call.result(120)
    assert child.expired == [("generate", 0.1, "generate_timeout_s")]


def test_calls_of_a_process_that_was_ended_do_not_end_those_of_the_next(make_fake):
    replica = make_fake(FakeHost(holds=True))
    lost = replica.generate(None, lambda finished: None)
    collector = replica._receiver
    replica._end()
    assert not collector.is_alive()
    with pytest.raises(WorkerError, match="ended"):
        lost.result(0)
    replica._child = FakeChild(FakeHost())
    replica.generate(None, lambda finished: None).result(120)


@pytest.mark.parametrize("place", ["deliver", "collect"])
@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit("planted")], ids=["Exception", "SystemExit"])
def test_an_error_in_the_thread_that_delivers_ends_all_calls_with_it(make_fake, place, error):
    def fail(*_):
        raise error

    host = FakeHost()
    host.collect = fail if place == "collect" else host.collect
    replica = make_fake(host)
    calls = [replica.generate(None, fail) for _ in range(2)]
    for call in calls:
        assert call.exception(120) is error
