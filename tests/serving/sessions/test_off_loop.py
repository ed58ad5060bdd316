"""Calls beside an event loop."""

import asyncio
import threading

import pytest

from rlcore_serve.sessions.off_loop import off_loop


def test_a_call_runs_in_another_thread_and_its_error_comes_back() -> None:
    async def main() -> None:
        assert await off_loop(threading.get_ident) != threading.get_ident()
        assert await off_loop(int, "ff", base=16) == 255
        with pytest.raises(ValueError, match="invalid literal"):
            await off_loop(int, "x")

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_cancelled_is_waited_for(fails: bool) -> None:
    is_in, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        is_in.set()
        assert may_go_on.wait(300)
        ended.set()
        if fails:
            raise ValueError

    async def main() -> None:
        task = asyncio.create_task(off_loop(call))
        while not is_in.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())
