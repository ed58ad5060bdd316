"""Waiting for every rank of every replica: the first that fails is named."""

from concurrent.futures import Future

import pytest

from rlcore.spi import RefitError, WorkerError
from rlcore_vllm.refit.transfer import Receivers


class Replica:
    """A replica whose ranks answer as they are told to."""

    def __init__(self, name, answer):
        self.name = name
        self.answer = answer

    def call_workers(self, method, kwargs):
        assert method == "rlcore_refit"
        future = Future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


GOOD = Replica("good", [{}, {}])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (Replica("bad", [{}, {"refused": "refit: no"}]), RefitError, r"^refit: no \(replica bad, rank 1\)$"),
        (Replica("bad", [{"failed": "lost"}, {"refused": "refit: no"}]), RefitError, r"^refit: no \(replica bad, rank 1\)$"),
        (Replica("bad", [{"failed": "OSError: x"}, {}]), RefitError, "bucket failed on replica bad, rank 0:\nOSError: x"),
        (Replica("bad", EOFError("gone")), WorkerError, r"replica bad failed in a refit \(bucket\): gone"),
        (Replica("bad", None), WorkerError, r"replica bad did not answer in a refit \(bucket\) within 0.1 s"),
    ],
)
def test_the_first_replica_that_fails_is_named(bad, error, message, monkeypatch):
    monkeypatch.setattr("rlcore_vllm.refit.transfer.GRACE_S", 0.0)
    with pytest.raises(error, match=message):
        Receivers([GOOD, bad], 0.1).start_all("bucket", {}).wait()
    with pytest.raises(error, match=message):
        Receivers([bad, Replica("silent", None)] if bad.answer is not None else [bad], 0.1).start_all("bucket", {}).wait()


def test_a_channel_that_broke_is_noticed_while_waiting():
    def check():
        raise WorkerError("broken")

    with pytest.raises(WorkerError, match="broken"):
        Receivers([Replica("silent", None)], 60.0).start_all("bucket", {}).wait(check)
