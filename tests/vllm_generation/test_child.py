"""The process of an engine: why it does not start, and that it is waited for no longer than it may take."""

import signal

import pytest

from rlcore.spi import WorkerError
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import engine_settings
from rlcore_workers import hosted
from rlcore_workers.logged_process import LoggedProcess

CHANNEL = "shared_memory"


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
    with pytest.raises(WorkerError, match="vllm-0: there is no engine"):
        replica.begin_update().result(120)


def test_an_engine_that_takes_too_long_to_start_is_ended(false_vllm, make_replica, monkeypatch):
    started = []

    def start(*arguments, **options):
        started.append(LoggedProcess(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(hosted, "LoggedProcess", start)
    false_vllm("import time; print('still here', flush=True); time.sleep(60)")
    replica = make_replica(start_timeout_s=0.2)
    with pytest.raises(WorkerError, match="within 0.2 s .* generator.vllm.start_timeout_s"):
        replica.start()
    assert [process.poll() for process in started] == [-signal.SIGKILL]
