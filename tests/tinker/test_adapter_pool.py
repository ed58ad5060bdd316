"""Pieces of several clients that wait for the trainer are computed together, and none spoils another's."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rlcore_tinker.adapter_pool import AdapterPool

NAMES = ("a", "b", "c", "d")


class FakeSession:
    """Notes its calls. The first piece blocks until `goes_on` is set; the data "wrong" fails."""

    def __init__(self, *, computes_together: bool) -> None:
        self.computes_together = computes_together
        self.calls: list[Any] = []
        self.goes_on = threading.Event()
        self.adapter = ""

    def use_adapter(self, name: str) -> None:
        self.adapter = name

    def forward_backward(self, data: str, loss: str) -> tuple[str, str, str]:
        self.calls.append(self.adapter)
        assert self.goes_on.wait(60)
        if data == "wrong":
            raise ValueError(f"of {self.adapter}")
        return self.adapter, data, loss

    def forward_backward_together(self, pieces: dict[str, dict[str, str]]) -> dict[str, tuple[str, str, str]]:
        self.calls.append([*pieces])
        if any(piece["data"] == "wrong" for piece in pieces.values()):
            raise ValueError("of one of them")
        return {name: (name, piece["data"], piece["loss"]) for name, piece in pieces.items()}


async def answers(session: FakeSession, scratch: Path, data: dict[str, str], cancels: str = "") -> list[Any]:
    """Answers to the pieces of adapters, all but the first of which come while it is computed."""
    pool = AdapterPool(session, scratch)
    tasks = {}
    for name, own in data.items():
        tasks[name] = asyncio.create_task(pool.forward_backward(name, own, f"loss of {name}"))
        while not session.calls:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
    if cancels:
        tasks[cancels].cancel()
    session.goes_on.set()
    return await asyncio.gather(*tasks.values(), return_exceptions=True)


def test_pieces_that_wait_are_computed_together(tmp_path):
    session = FakeSession(computes_together=True)
    data = {name: f"data of {name}" for name in NAMES}
    found = asyncio.run(answers(session, tmp_path, data))
    assert session.calls == ["a", ["b", "c", "d"]]
    assert found == [(name, f"data of {name}", f"loss of {name}") for name in NAMES]


def test_piece_that_fails_fails_alone(tmp_path):
    session = FakeSession(computes_together=True)
    found = asyncio.run(answers(session, tmp_path, {name: "wrong" if name == "c" else "right" for name in NAMES}))
    assert session.calls == ["a", ["b", "c", "d"], "b", "c", "d"]
    assert [*map(str, found[2].args)] == ["of c"]
    assert [one[0] for number, one in enumerate(found) if number != 2] == ["a", "b", "d"]


def test_trainer_that_takes_turns_gets_one_piece_at_a_time(tmp_path):
    session = FakeSession(computes_together=False)
    asyncio.run(answers(session, tmp_path, dict.fromkeys(NAMES, "right")))
    assert session.calls == [*NAMES]


def test_piece_that_is_cancelled_before_its_turn_is_not_computed(tmp_path):
    session = FakeSession(computes_together=True)
    found = asyncio.run(answers(session, tmp_path, dict.fromkeys(NAMES, "right"), cancels="c"))
    assert session.calls == ["a", ["b", "d"]]
    assert isinstance(found[2], asyncio.CancelledError)


@pytest.mark.parametrize("computes_together", [False, True])
def test_calls_that_came_before_keep_their_turn(tmp_path, computes_together):
    """An update between two pieces is made between them, or behind both that waited with it."""

    async def run() -> list[Any]:
        session = FakeSession(computes_together=computes_together)
        pool = AdapterPool(session, tmp_path)

        async def update() -> None:
            async with pool.in_use("b"):
                session.calls.append("update of b")

        first = asyncio.create_task(pool.forward_backward("a", "right", "loss"))
        while not session.calls:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(update()), asyncio.create_task(pool.forward_backward("c", "right", "loss"))]
        await asyncio.sleep(0)
        session.goes_on.set()
        await asyncio.gather(first, *others)
        return session.calls

    assert asyncio.run(run()) == ["a", "update of b", "c"]
