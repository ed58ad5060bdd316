"""The cores of the ranks of an engine."""

from rlcore_vllm.environment import omp_threads_bind


def test_ranks_share_the_cores_out(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5, 8, 9})
    assert omp_threads_bind(2) == "2,3|5,8"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {7})
    assert omp_threads_bind(2) == "7|7"
