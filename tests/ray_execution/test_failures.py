"""An error on its way from a worker: it keeps its kind, and what its worker printed is told."""

from pathlib import Path

import pytest

from rlcore.registry.plugin_errors import owner_of, set_error_owner
from rlcore.spi import DataError, ModelError, Problem, RlcoreError, WorkerError
from rlcore_ray.failures import RemoteError, WorkerInfo, cause_of_death


def test_a_rank_out_of_reach_has_rays_own_words_on_one_line(tmp_path: Path) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    error = exceptions.ActorUnavailableError(
        "The actor is temporarily unavailable: RpcError: keepalive\nwatchdog timeout", None
    )
    cause = cause_of_death(error, WorkerInfo(rank=1, log_file=tmp_path / "log"))
    assert cause.startswith("cannot be reached any more: its process is stopped, or")
    assert cause.endswith(" Ray says: RpcError: keepalive watchdog timeout"), "a sentence follows"


def test_an_error_keeps_its_class_and_what_it_holds(tmp_path: Path) -> None:
    error = ModelError([Problem(path="model.path", found="nothing", expected="a model")])
    error.add_note("raised while building trainer 'acme'")
    set_error_owner(error, "trainer 'acme'")
    restored = RemoteError.of(error, tmp_path / "log").restore()
    assert isinstance(restored, ModelError)
    assert (str(restored), restored.problems) == (str(error), error.problems)
    assert restored.__notes__ == error.__notes__
    assert owner_of(restored) == "trainer 'acme'"


@pytest.mark.parametrize("base", [KeyError, DataError, WorkerError])
def test_an_error_of_a_class_that_only_the_worker_has_is_one_of_its_base(tmp_path: Path, base: type[Exception]) -> None:
    """Such as one that a function defines. It is no death of a worker, after which all would be started anew."""

    class OwnError(base):  # type: ignore[misc, valid-type]
        pass

    error = OwnError("the cause")
    set_error_owner(error, "algorithm 'acme'")
    restored = RemoteError.of(error, tmp_path / "log").restore()
    assert type(restored) is base
    assert restored.args == ("the cause",)
    assert owner_of(restored) == "algorithm 'acme'"


def test_an_error_whose_state_the_driver_cannot_read_is_told_in_words(tmp_path: Path) -> None:
    from attrs import evolve

    remote = evolve(RemoteError.of(KeyError("a word"), tmp_path / "log"), pickled_state=b"no pickle")
    restored = remote.restore()
    assert type(restored) is RlcoreError
    assert str(restored) == "KeyError: 'a word'"
