"""Samples in the making, without an engine."""

from concurrent.futures import Future

from rlcore_torchkit.generation import FinishedSample
from rlcore_vllm.engines.unfinished import Job, Sample, settle


def test_each_token_has_the_version_that_it_was_sampled_under() -> None:
    job = Job(lambda _: None, 1)
    sample = Sample(job, 0, prompt_length=2, limit=8, weight_version=3)
    sample.change_version(4)  # nothing was sampled under 3
    sample.tokens, sample.logprobs = [5, 6], [-1.0, -2.0]
    sample.change_version(7)
    sample.tokens, sample.logprobs = [5, 6, 8], [-1.0, -2.0, -0.5]
    sample.change_version(9)  # and nothing yet under this one
    assert sample.finish().weight_versions.tolist() == [4, 4, 7]


def test_a_call_is_done_with_its_last_sample() -> None:
    delivered: list[FinishedSample] = []
    job = Job(delivered.extend, 3)
    ended = [Sample(job, number, prompt_length=1, limit=4, weight_version=0).finish() for number in range(3)]
    job.hand_out(ended[:2])
    assert not job.done.done()
    job.hand_out(ended[2:])
    assert [sample.number for sample in delivered] == [0, 1, 2]
    assert job.done.result(timeout=0) is None


def test_a_call_that_was_cut_off_stays_so() -> None:
    done: Future[None] = Future()
    cut = RuntimeError("cut")
    settle(done, cut)
    settle(done, None)
    assert done.exception(timeout=0) is cut
