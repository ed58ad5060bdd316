"""An engine in this process as a replica: what its start says where it fails, and that it can be closed and replaced."""

import pytest

from rlcore.spi import ContractError, WorkerError
from rlcore_vllm.replicas import replica
from rlcore_vllm.replicas.replica import LocalReplica


class Engine:
    """Notes that it was closed; `failure` is what its start raises."""

    failure = None

    def __init__(self, settings):
        if self.failure is not None:
            raise self.failure
        self.settings, self.num_closed = settings, 0

    def close(self):
        self.num_closed += 1


@pytest.fixture
def engine_class(monkeypatch):
    class Own(Engine):
        pass

    monkeypatch.setattr(replica, "Engine", Own)
    return Own


def test_a_failed_start_is_told_in_the_recipes_terms(engine_class):
    engine_class.failure = ValueError("No available memory for the cache blocks. Try increasing it.")
    one = LocalReplica("vllm-3", "settings", ())
    with pytest.raises(WorkerError, match="vllm-3 did not start: ") as raised:
        one.start()
    assert raised.value.__cause__ is engine_class.failure
    with pytest.raises(WorkerError, match="vllm-3: there is no engine"):
        one.begin_update()
    one.close()


def test_an_unknown_failure_is_told_with_its_class(engine_class):
    engine_class.failure = KeyError("something else")
    with pytest.raises(WorkerError, match="vllm-0 did not start: KeyError: 'something else'"):
        LocalReplica("vllm-0", "settings", ()).start()


def test_what_is_in_the_recipes_terms_already_passes_through(engine_class):
    engine_class.failure = ContractError("found an engine in this process already")
    with pytest.raises(ContractError) as raised:
        LocalReplica("vllm-0", "settings", ()).start()
    assert raised.value is engine_class.failure


def test_a_restart_closes_one_engine_and_starts_another_with_the_same_settings(engine_class):
    one = LocalReplica("vllm-0", "settings", ())
    one.start()
    first = one.engine
    one.restart()
    second = one.engine
    assert second is not first
    assert (first.num_closed, second.num_closed, second.settings) == (1, 0, "settings")
    one.close()
    one.close()
    assert second.num_closed == 1
