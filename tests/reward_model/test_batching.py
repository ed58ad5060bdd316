"""Calls that come while others are answered go together; whoever gives up costs nobody else."""

import asyncio

from rlcore_reward_model.batching import Batches


class Pool:
    """Doubles numbers once it is let; notes what comes together."""

    def __init__(self):
        self.batches, self.cancelled, self.gate = [], 0, asyncio.Event()

    async def call(self, request):
        self.batches.append(list(request))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if 13 in request:
            raise ValueError("thirteen")
        return [2 * number for number in request]


def test_what_comes_meanwhile_goes_together_in_batches_of_the_most():
    async def main():
        pool = Pool()
        batches = Batches(pool, 3)
        asked = [asyncio.create_task(batches.ask(number)) for number in range(6)]
        await asyncio.sleep(0)
        pool.gate.set()
        assert await asyncio.gather(*asked) == [0, 2, 4, 6, 8, 10]
        assert all(len(batch) <= 3 for batch in pool.batches)
        assert sorted(number for batch in pool.batches for number in batch) == [0, 1, 2, 3, 4, 5]
        assert len(pool.batches) <= 3

    asyncio.run(main())


def test_a_batch_goes_on_until_nobody_waits_for_it():
    async def main():
        pool = Pool()
        batches = Batches(pool, 2)
        first, second = (asyncio.create_task(batches.ask(number)) for number in (1, 2))
        for _ in range(3):
            await asyncio.sleep(0)
        assert pool.batches == [[1, 2]]
        first.cancel()
        await asyncio.wait([first])
        assert pool.cancelled == 0
        second.cancel()
        await asyncio.wait([second])
        for _ in range(3):
            await asyncio.sleep(0)
        assert pool.cancelled == 1
        pool.gate.set()
        assert await batches.ask(4) == 8

    asyncio.run(main())


def test_an_error_reaches_everyone_in_the_batch_and_no_one_else():
    async def main():
        pool = Pool()
        pool.gate.set()
        batches = Batches(pool, 8)
        found = await asyncio.gather(batches.ask(13), batches.ask(2), return_exceptions=True)
        assert all(isinstance(each, ValueError) for each in found)
        assert await batches.ask(3) == 6

    asyncio.run(main())


def test_one_answer_for_a_whole_batch_is_everyones():
    class Ending:
        async def call(self, request):
            return "ended"

    assert asyncio.run(Batches(Ending(), 2).ask(1)) == "ended"


def test_an_answer_of_another_length_reaches_all_that_wait():
    class Short(Pool):
        async def call(self, request):
            return [1]

    async def main():
        batches = Batches(Short(), 3)
        found = await asyncio.wait_for(asyncio.gather(*map(batches.ask, range(3)), return_exceptions=True), 300)
        assert [str(one) for one in found] == ["the reward model's process answered 1 of 3 samples"] * 3

    asyncio.run(main())
