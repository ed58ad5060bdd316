"""Tokens of sessions: random, for one session each, and no longer good once it is finished."""

import pytest

from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.session import Session, Sessions


def test_a_token_has_128_random_bits() -> None:
    sessions = Sessions()
    tokens = {sessions.open().token for _ in range(100)}
    assert len(tokens) == 100
    assert {len(bytes.fromhex(token)) for token in tokens} == {16}


def test_a_session_is_found_by_its_path_and_by_its_bearer_token() -> None:
    sessions = Sessions()
    one, two = sessions.open(), sessions.open()
    assert sessions.find(one.token, None) is one
    assert sessions.find(None, f"Bearer {two.token}") is two
    assert sessions.find(one.token, f"bearer {two.token}") is one


@pytest.mark.parametrize(("path", "header"), [(None, None), ("", None), ("x", None), (None, "Bearer x"), (None, "Basic {}")])
def test_no_token_and_a_wrong_one_are_refused(path: str | None, header: str | None) -> None:
    sessions = Sessions()
    token = sessions.open().token
    with pytest.raises(RequestError) as caught:
        sessions.find(path, None if header is None else header.format(token))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_finished_session_is_told_from_one_that_never_was() -> None:
    sessions = Sessions(Session(token="", record=None))
    session = sessions.open()
    assert sessions.finish(session) == []
    for path, header in ((session.token, None), (None, f"Bearer {session.token}")):
        with pytest.raises(RequestError) as caught:
            sessions.find(path, header)
        assert (caught.value.status, caught.value.code) == (401, "session_finished")


def test_seeds_are_random_where_nothing_sets_them_and_else_repeatable() -> None:
    free = Session(token="")
    assert free.next_seed(None, 0) != free.next_seed(None, 0)
    assert free.next_seed(5, 1) == Session(token="").next_seed(5, 1) != free.next_seed(5, 2)
    one, same, other = Session(token="", seed=(1,)), Session(token="", seed=(1,)), Session(token="", seed=(2,))
    assert [one.next_seed(None, 0) for _ in range(3)] == [same.next_seed(None, 0) for _ in range(3)]
    assert one.next_seed(5, 0) == same.next_seed(5, 0) != other.next_seed(5, 0)
    assert 0 <= one.next_seed(None, 0) < 2**63
