"""A port that another process took fails no check of two ranks."""

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from rlcore_conformance.trainers import trainer_ranks
from rlcore_conformance.trainers.rank_script import RankJob
from rlcore_rollout import serialization


@pytest.mark.parametrize(("num_failures", "fails"), [(2, False), (3, True)])
def test_a_port_that_someone_else_took_is_tried_anew(tmp_path, monkeypatch, num_failures, fails):
    addresses = []

    def launched(function, arguments, num_ranks, *, timeout_s):
        addresses.append(arguments[1])
        if len(addresses) <= num_failures:
            raise ProcessRaisedException("OSError: [Errno 98] Address already in use", 0, 1)
        for rank in range(num_ranks):
            (Path(tmp_path) / f"report-{rank}").write_bytes(serialization.dumps(rank))

    monkeypatch.setattr(trainer_ranks, "launch", launched)
    job = RankJob(
        provider=None, config=None, context=None, tolerance=0.0, directory=tmp_path, steps=(), splits=False, refused={}
    )
    if fails:
        with pytest.raises(AssertionError, match="Address already in use"):
            trainer_ranks.launched(job)
    else:
        assert trainer_ranks.launched(job) == [0, 1]
    assert len(addresses) == 3
