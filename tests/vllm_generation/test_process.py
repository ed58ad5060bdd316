"""Engines in processes of their own: they give the same samples, and their deaths, hangs and failed starts are told apart."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, GenerateRequest, RaggedTokens, SamplingParams, WorkerError
from rlcore_vllm import child, process
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.environment import child_environment
from rlcore_vllm.process import ProcessReplica
from rlcore_vllm.settings import engine_settings

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
    hosted_backend._restart([index for index, replica in enumerate(hosted_backend._replicas) if not replica._child.is_usable])
    two_models.refit(hosted_backend, 0, 0, CHANNEL)
    return hosted_backend


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


def test_a_refit_in_flight_reaches_every_engine(backend, two_models):
    started = threading.Event()
    request = request_of(2, 280, on_finished=lambda number, sample: started.set())
    request.max_tokens[:2] = 1
    results = []
    call = threading.Thread(target=lambda: results.append(backend.generate(request)))
    call.start()
    assert started.wait(30)
    two_models.refit(backend, 1, 5, CHANNEL)
    call.join(60)
    spans = np.split(results[0].weight_versions, results[0].offsets[1:-1])
    assert all(set(span.tolist()) <= {0, 5} and (np.diff(span) >= 0).all() for span in spans)
    assert sum(set(span.tolist()) == {0, 5} for span in spans) >= 2
    assert backend.generate(request_of(version=5)).weight_versions.tolist() == [5] * 240


def test_an_engine_that_dies_is_replaced_and_waits_for_a_refit(backend, two_models):
    expected = backend.generate(request_of())
    survivor, victim = (replica._child.process for replica in backend._replicas)

    def kill(number, sample):
        os.kill(victim.pid, signal.SIGKILL)

    request = request_of(4, 280, on_finished=kill)
    request.max_tokens[:2] = 1
    with pytest.raises(
        WorkerError, match=r"vllm-1 ended with signal SIGKILL\. Its output is in .*vllm-1\.log\.\nIts last lines:\n"
    ):
        backend.generate(request)
    assert survivor.poll() is None
    assert backend._replicas[1]._child.process.poll() is None
    with pytest.raises(ContractError, match="found no weights; expected version 0. Refit first"):
        backend.generate(request_of())
    two_models.refit(backend, 0, 3, CHANNEL)
    assert backend.generate(request_of(version=3)).tokens.tolist() == expected.tokens.tolist()


def test_engines_are_out_of_reach_of_the_terminal(backend):
    """^C goes to the foreground process group, of which they are no part; their output goes to a file."""
    for replica in backend._replicas:
        assert os.getpgid(replica._child.process.pid) == replica._child.process.pid != os.getpgid(0)
        assert replica.log_file.stat().st_size > 0


def test_an_engine_is_started_anew_in_its_process(backend, two_models):
    """Where the process still answers: that spares it the imports."""
    expected = backend.generate(request_of())
    processes = [replica._child.process.pid for replica in backend._replicas]
    backend._restart([0, 1])
    assert [replica._child.process.pid for replica in backend._replicas] == processes
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
    try:
        with pytest.raises(WorkerError, match=r"gave no answer to begin_update within 0.5 s and was ended; .*refit_timeout_s"):
            replica.begin_update().result(30)
    finally:
        replica._config = usual
    assert process.wait(10) == -signal.SIGKILL


def test_an_engine_ends_with_its_parent(tmp_path):
    """The parent is killed, so that it can do nothing about it."""
    script = (
        "import os, sys; from rlcore_vllm.host import _end_with; "
        "open(sys.argv[2], 'w').write(str(os.getpid())); _end_with(int(sys.argv[1]))"
    )
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {script!r}, str(os.getpid()), sys.argv[1]], start_new_session=True); "
        "time.sleep(60)"
    )
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, str(file)])
    _wait_until(lambda: file.exists() and file.read_text())
    pid = int(file.read_text())
    assert _is_alive(pid)
    process.kill()
    process.wait()
    _wait_until(lambda: not _is_alive(pid))


@pytest.fixture
def false_vllm(tmp_path, monkeypatch):
    """Puts a package in vLLM's place, for engines in processes of their own."""

    def write(source):
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


@pytest.fixture
def make_replica(two_models, tmp_path):
    replicas = []

    def make(**options):
        config = VllmConfig(cpu_kv_cache_gib=0.1, **options)
        replicas.append(ProcessReplica("vllm-0", engine_settings(two_models.context(CHANNEL), config), (), config, tmp_path))
        return replicas[-1]

    yield make
    for replica in replicas:
        replica.close()


def test_an_engine_that_does_not_start_says_why(false_vllm, make_replica):
    """The failure in the recipe's terms, and the process's own last words."""
    false_vllm("raise ValueError('No available memory for the cache blocks. Try increasing it.')")
    replica = make_replica()
    with pytest.raises(WorkerError) as raised:
        replica.start()
    message = str(raised.value)
    assert message.startswith("vllm-0 ended while it started with exit code 1: the model's weights and activations leave no")
    assert message.endswith("ValueError: No available memory for the cache blocks. Try increasing it.")
    assert "Raise generator.vllm.gpu_memory_utilization" in message
    with pytest.raises(WorkerError, match="vllm-0: there is no engine: it could not be started"):
        replica.begin_update().result(10)


def test_an_engine_that_takes_too_long_to_start_is_ended(false_vllm, make_replica, monkeypatch):
    started = []

    def start(*arguments, **options):
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT))
    false_vllm("import time; print('still here', flush=True); time.sleep(60)")
    replica = make_replica(start_timeout_s=0.2)
    with pytest.raises(WorkerError, match=r"was not ready within 0.2 s and was ended; .* raise generator.vllm.start_timeout_s"):
        replica.start()
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_children_see_their_own_devices(two_models, monkeypatch):
    settings = evolve(engine_settings(two_models.context(CHANNEL), VllmConfig()), device="cuda", eager=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    environment = child_environment(settings, (2, 0))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "TORCHDYNAMO_DISABLE" not in environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    assert child_environment(settings, (2, 0))["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-a"


def _is_alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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

    monkeypatch.setattr(process, "Child", Starting)
    replica = ProcessReplica("vllm-0", None, (), VllmConfig(), tmp_path)
    if starts > len(failures):
        replica.start()
    else:
        with pytest.raises(WorkerError, match="vllm-0 ended"):
            replica.start()
    assert [child.is_usable for child in made] == [False] * len(failures) + [True] * (starts - len(failures))


def test_a_refit_does_not_overtake_a_request_that_was_made_before_it(monkeypatch, tmp_path):
    """Else the engine would begin the request with other weights than those that were asked for."""
    calls = []

    class Host:
        def submit(self, samples):
            calls.append("submit")
            return 0

        def collect(self, number, timeout_s):
            return [], True

        def begin_update(self):
            calls.append("begin_update")

    class SlowChild:
        def call(self, function, what, timeout_s, key):
            if what == "generate":
                time.sleep(0.2)
            return function(Host())

    replica = ProcessReplica("vllm-0", None, (), VllmConfig(), tmp_path)
    replica._child = SlowChild()
    done = replica.generate(None, lambda finished: None)
    replica.begin_update().result(10)
    done.result(10)
    assert calls == ["submit", "begin_update"]


def test_a_socket_that_does_not_listen_yet_is_waited_for(tmp_path):
    address = str(tmp_path / "host.socket")
    manager = child.HostManager(address=address, authkey=b"key")
    assert not child._connects(manager, address)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(address)
        assert not child._connects(manager, address)
    Path(address).unlink()
    with child.HostManager(address=address, authkey=b"key"):
        assert child._connects(manager, address)
