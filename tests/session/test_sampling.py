"""Calls from several tasks and threads, devices that trainer and generator share, and workers that die: with the fakes."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rlcore.execution import InProcessGenerator
from rlcore.run.execution.weight_sync import GeneratorSync
from rlcore.spi import WorkerError
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_TRAINER
from rlcore_session import AsyncSession, CallError, Datum
from rlcore_session.sampler import SampleCall, Sampler
from rlcore_session.training import ParkedAdapter, Training

from .session_support import FAKE_LOSS, open_fakes, without


@pytest.fixture
def streams(monkeypatch):
    """Counts the streams of generators."""
    counted = []
    stream = InProcessGenerator.stream

    def counting(self, feed, weight_version):
        counted.append(weight_version)
        stream(self, feed, weight_version)

    monkeypatch.setattr(InProcessGenerator, "stream", counting)
    return counted


def texts(groups):
    return [[one.text for one in group] for group in groups]


def test_calls_under_way_share_a_stream(streams):
    async def main(session):
        calls = [session.sample(["ab", "c"], num_samples=2, seed=seed) for seed in range(20)]
        return await asyncio.gather(*calls)

    with open_fakes() as session:
        busy = threading.Event()
        session.submit(busy.wait)
        threading.Timer(0.3, busy.set).start()
        together = asyncio.run(main(session.asynchronous))
        assert len(streams) < 20
        alone = [session.sample(["ab", "c"], num_samples=2, seed=seed) for seed in range(20)]
    assert list(map(texts, together)) == list(map(texts, alone)), "samples depend on the calls beside them"


def test_generator_without_continuous_batching_answers_too():
    with open_fakes(generator=without(FAKE_GENERATOR, "continuous", "in_flight_refit")) as session:
        expected = texts(session.sample(["ab", "c"], num_samples=3, seed=5))
    with open_fakes() as session:
        assert texts(session.sample(["ab", "c"], num_samples=3, seed=5)) == expected


def test_coroutines_of_all_calls(tmp_path):
    async def main():
        async with AsyncSession(open_fakes()) as session:
            first = await session.sample(["ab"], seed=0)
            logprobs, path = await asyncio.gather(session.logprobs([[1, 2, 3]]), session.save(tmp_path))
            assert await session.load(path) == 0
            assert await session.sync() == 0
            assert texts(await session.sample(["ab"], seed=0)) == texts(first)
            with pytest.raises(CallError):
                await session.sample("ab")
            with pytest.raises(CallError):
                await session.optim_step()
            return logprobs

    assert len(asyncio.run(main())[0]) == 3


def test_seeds_need_a_generator_that_honours_them():
    with open_fakes(generator=without(FAKE_GENERATOR, "per_sample_seeds", "top_k")) as session:
        assert session.sample(["ab"])
        with pytest.raises(CallError) as error:
            session.sample(["ab"], seed=1, top_k=3)
        assert [problem.path for problem in error.value.problems] == ["seed", "top_k"]


def test_log_probabilities_of_a_trainer_that_returns_none_with_its_steps():
    pieces = {}
    for name, provider in (("own", FAKE_TRAINER), ("asked", without(FAKE_TRAINER, "step_logprobs"))):
        with open_fakes(provider) as session:
            spec = FAKE_LOSS
            pieces[name] = session.forward_backward([Datum([1, 2, 3])], spec).logprobs[0].tolist()
    assert pieces["own"] == pieces["asked"]


@pytest.fixture
def on_one_gpu(monkeypatch):
    """Opens sessions whose trainer and generator seem to share a GPU."""
    monkeypatch.setattr("rlcore_session.plan.require_device", lambda _: None)
    return lambda **sections: open_fakes(run={"device": "cuda"}, model={"path": "none", "dtype": "float32"}, **sections)


def test_shared_device_keeps_gradients(on_one_gpu):
    with on_one_gpu() as session:
        assert session.sample(["ab"])
        session.forward_backward([Datum([1, 2, 3])], FAKE_LOSS)
        for call in (lambda: session.sample(["ab"]), session.sync):
            with pytest.raises(CallError, match="the gradients of 1 call.*Call optim_step first"):
                call()
        session.optim_step()
        with pytest.raises(CallError, match=r"sync\(\)"):
            session.sample(["ab"])
        assert session.sync() == 1
        assert session.sample(["ab"])[0][0].weight_version == 1


def test_shared_device_keeps_gradients_of_adapters_that_are_not_in_use():
    parked = {"other": ParkedAdapter(version=0, pieces=2, dropped="", incarnation=0)}
    weights = SimpleNamespace(residency=SimpleNamespace(moves=True))
    training = Training(backends=None, weights=weights, recipe=None, adapter="own", parked=parked)
    for refused in (lambda: training.require_no_gradients("sample"), training.begin_load):
        with pytest.raises(CallError, match=r"of 2 call\(s\).*'other'"):
            refused()


@pytest.fixture
def apart(monkeypatch):
    """Opens sessions whose trainer and generator have threads of their own, as with devices of their own."""
    monkeypatch.setattr("rlcore_session.session.separate", lambda _: True)
    return open_fakes


def test_samples_behind_a_sync_have_its_version(apart, monkeypatch):
    calls = []
    refit = GeneratorSync.refit

    def refit_while_samples_wait(self, weight_version, **options):
        refit(self, weight_version, **options)
        if weight_version:
            with ThreadPoolExecutor(1) as other:
                calls.extend(other.submit(session.begin_sampling, ["ab"]).result() for _ in range(4))

    with apart() as session:
        monkeypatch.setattr(GeneratorSync, "refit", refit_while_samples_wait)
        for version in range(1, 6):
            session.forward_backward([Datum([1, 2, 3])], FAKE_LOSS)
            session.optim_step()
            assert session.sync() == version
            assert [one.result(timeout=60)[0].weight_version for one in calls] == [version] * 4
            calls.clear()


def test_turns_are_answered_in_their_order():
    def fails(_):
        raise WorkerError("the engine died")

    sampler = Sampler(generator=None, refitter=None)
    calls = [SampleCall(request=None) for _ in range(2)]
    for call in calls:
        sampler.add(call)
        sampler.end_turn()
    done = []
    for latest in (0, 0, 1):
        sampler.answer(latest, fails)
        done.append([call.future.done() for call in calls])
    assert done == [[True, False], [True, False], [True, True]], "a call behind a sync is answered before it"


@pytest.mark.parametrize("is_apart", [False, True])
def test_calls_under_way_end_before_the_session(is_apart, apart):
    async def main():
        session, busy = (apart if is_apart else open_fakes)(), threading.Event()
        session.submit(busy.wait)
        calls = session.asynchronous
        under_way = [
            calls.forward_backward([Datum([1, 2, 3])], FAKE_LOSS),
            calls.optim_step(),
            calls.sync(),
            calls.sample(["ab"]),
            calls.close(),
        ]
        tasks = [asyncio.ensure_future(one) for one in under_way]
        threading.Timer(0.3, busy.set).start()
        return await asyncio.gather(*tasks)

    _, update, version, _, _ = asyncio.run(main())
    assert update.weight_version == version == 1


def test_shared_device_without_sleep_keeps_the_weights(on_one_gpu):
    with on_one_gpu(offload={"generator_sleep_mode": False}) as session:
        session.forward_backward([Datum([1, 2, 3])], FAKE_LOSS)
        session.optim_step()
        assert session.sample(["ab"])[0][0].weight_version == 0


def test_worker_that_dies_is_the_end(monkeypatch, tmp_path):
    def dies(*_):
        raise WorkerError("the engine died")

    with open_fakes() as session:
        path = session.save(tmp_path)
        session.forward_backward([Datum([1, 2, 3])], FAKE_LOSS)
        with monkeypatch.context() as patch:
            patch.setattr(InProcessGenerator, "stream", dies)
            with pytest.raises(WorkerError) as error:
                session.sample(["ab"])
        [note] = [note for note in error.value.__notes__ if "lost" in note]
        assert "weights of version 0" in note
        assert "gradients of 1 call" in note
        assert str(path) in note
        for call in (session.optim_step, session.sync, lambda: session.sample(["ab"])):
            with pytest.raises(WorkerError, match="the engine died"):
                call()
