"""Servers that are not there, go away, or reply with something else."""

import asyncio
from typing import Any

import aiohttp
import pytest

from rlcore.spi import RewardError
from rlcore_openenv.connection import Observed, RefusedError, connected, fault_text

from .protocol_server import GameServer, serving


def ask(url: str, timeout_s: float = 30.0, *actions: str) -> list[Observed]:
    """A reset and steps on a connection of its own."""

    async def run() -> list[Observed]:
        async with aiohttp.ClientSession() as http, connected(http, url, timeout_s) as connection:
            return [await connection.reset({"seed": 1}), *[await connection.step({"message": text}) for text in actions]]

    return asyncio.run(asyncio.wait_for(run(), 300))


def ask_scripted(request: str, reply: str | None) -> list[Observed]:
    server = GameServer(replies={request: reply})
    with serving("GET", "/ws", server.handle) as url:
        return ask(url + "/", 30.0, "a")


def test_a_reply_has_observation_reward_and_done() -> None:
    server = GameServer()
    with serving("GET", "/ws", server.handle) as url:
        first, second, third, last = ask(url, 30.0, "?", "a", "b")
    assert (first.observation, first.reward, first.done) == ({"text": "guess", "left": 3}, None, False)
    assert (second.reward, third.reward) == (None, 0.25)
    assert (last.observation["text"], last.reward, last.done) == ("right", 1.0, True)
    assert (server.heard[-1], server.num_open) == ({"type": "close"}, 0)


def test_a_server_that_is_not_there_is_named() -> None:
    with serving("GET", "/ws", GameServer().handle) as url:
        pass
    with pytest.raises(RewardError, match=f"{url}.*environment.openenv.urls"):
        ask(url)


def test_a_server_of_something_else_is_named() -> None:
    with serving("GET", "/other", GameServer().handle) as url, pytest.raises(RewardError, match=f"{url}.*/ws: status 404"):
        ask(url)


def test_a_server_that_does_not_answer_is_given_up() -> None:
    async def hang(_: Any) -> Any:
        await asyncio.sleep(60)

    with serving("GET", "/ws", hang) as url, pytest.raises(RewardError, match=f"{url}.*0.2 s"):
        ask(url, 0.2)


@pytest.mark.parametrize("request_type", ["reset", "step"])
def test_a_server_that_goes_away_is_named(request_type: str) -> None:
    with pytest.raises(RewardError, match=f"127.0.0.1.*code 1000.*{request_type}"):
        ask_scripted(request_type, None)


@pytest.mark.parametrize(
    "reply",
    [
        *("garbage", "[]", "{}", '{"type": "state", "data": {}}', '{"type": "observation", "data": {"observation": 3}}'),
        *('{"type": "observation", "data": {"observation": {}, "reward": "1"}}', '{"type": "error"}'),
        '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
        '{"type": "observation", "data": {"observation": {}, "reward": 1, "done": 1}}',
    ],
)
def test_garbage_is_shown(reply: str) -> None:
    with pytest.raises(RewardError, match="replied to a step.*expected") as caught:
        ask_scripted("step", reply)
    assert reply in str(caught.value)


def test_an_error_has_its_code_and_what_does_not_fit() -> None:
    errors = '[{"type": "missing", "loc": ["a", 0], "msg": "Field required"}, 3]'
    with pytest.raises(RefusedError, match="refused a step: Bad; a.0: Field required.*VALIDATION_ERROR") as caught:
        ask_scripted(
            "step", f'{{"type": "error", "data": {{"message": "Bad", "code": "VALIDATION_ERROR", "errors": {errors}}}}}'
        )
    assert caught.value.code == "VALIDATION_ERROR"
    assert [fault["type"] for fault in caught.value.faults] == ["missing"]


def test_an_error_without_details_is_one_message() -> None:
    with pytest.raises(RefusedError, match="no message.*no code"):
        ask_scripted("reset", '{"type": "error", "data": {"errors": "?"}}')
    assert fault_text({}) == "does not fit"
