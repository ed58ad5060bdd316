"""Requests reach the session of the episode that their metadata names."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from rlcore.spi import ConfigError, SessionEndpoint
from rlcore_nemo_gym.policy_server import KEY, PolicyServer, listening
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Sessions

from ..serving.sessions.chat_model import END, Script, served  # type: ignore[import-not-found]
from .gym_servers import free_port


class Policy:
    """A policy server, and a session that says a script."""

    def __init__(self, script: Script, sessions: Sessions, address: str, max_tokens: int = 100) -> None:
        self.script, self.sessions, self.port = script, sessions, free_port()
        self.session = sessions.open(max_tokens=max_tokens)
        self.server = PolicyServer("127.0.0.1", self.port)
        url = f"{address}/{self.session.token}/v1"
        self.endpoint = SessionEndpoint(base_url=url, api_key=self.session.token, model="policy")

    def ask(self, metadata: Any = None, path: str = "/v1/responses", **more: Any) -> tuple[int, Any]:
        return self.post(json.dumps({"model": "any", "input": "hi", "metadata": metadata} | more).encode(), path)

    def post(self, body: bytes | None, path: str = "/v1/responses") -> tuple[int, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=body)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["message"]


@pytest.fixture
def policy() -> Iterator[Policy]:
    script, sessions = Script(), Sessions()
    with serving(served(script, max_sequence_length=200), sessions) as address:
        policy = Policy(script, sessions, address)
        yield policy
        policy.server.close()


def test_a_request_is_answered_by_the_session_of_its_episode(policy: Policy) -> None:
    policy.script.texts = [f"hello{END}"]
    with policy.server.episode(policy.endpoint) as episode:
        status, reply = policy.ask({**episode.metadata, "other": "kept"})
    assert (status, reply["output"][0]["content"][0]["text"], reply["model"]) == (200, "hello", "policy")
    assert reply["metadata"]["other"] == "kept"
    assert (episode.num_answers, episode.is_too_long, episode.refusal) == (1, False, None)


def test_a_request_of_no_episode_is_refused(policy: Policy) -> None:
    with policy.server.episode(policy.endpoint) as ended:
        pass
    with policy.server.episode(policy.endpoint) as episode:
        for metadata in (None, {}, "text"):
            status, message = policy.ask(metadata)
            assert status == 401
            assert KEY in message
        assert policy.ask(ended.metadata)[0] == 401
        assert policy.ask({KEY: 3})[0] == 401
        assert policy.post(b"[]")[0] == 401
        assert policy.post(b"{")[0] == 400
        with policy.server.episode(policy.endpoint) as later:
            assert (episode.num_strangers, episode.num_answers, later.num_strangers) == (4, 0, 0)


def test_other_routes_are_refused_and_remembered(policy: Policy) -> None:
    with policy.server.episode(policy.endpoint) as episode:
        assert policy.ask(episode.metadata, path="/v1/chat/completions")[0] == 404
        assert (episode.refusal or "").startswith("found POST /v1/chat/completions; expected POST /v1/responses")
        assert episode.stray is None
        status, message = policy.post(None, "/v1/models")
        assert (status, message) == (404, episode.stray)
        assert message.startswith("found GET /v1/models")
        assert policy.post(None, "/v1/responses")[1].startswith("found GET /v1/responses")
        with policy.server.episode(policy.endpoint) as later:
            assert later.stray is None


def test_every_answer_is_the_episodes(policy: Policy) -> None:
    policy.script.texts = [f"a{END}"]
    with policy.server.episode(policy.endpoint) as episode:
        assert policy.ask(episode.metadata, record=False)[0] == 200
    assert len(policy.sessions.finish(policy.session)) == 1


def test_a_refusal_is_kept_and_a_prompt_without_room_is_answered_with_nothing(policy: Policy) -> None:
    with policy.server.episode(policy.endpoint) as episode:
        status, message = policy.ask(episode.metadata, background=True)
        assert (status, message) == (400, episode.refusal)
        assert "background" in message
        status, reply = policy.ask(episode.metadata, input="x" * 300)
    assert (status, reply["status"], reply["incomplete_details"]["reason"]) == (200, "incomplete", "max_output_tokens")
    assert reply["output"][0]["content"][0]["text"] == ""
    assert (episode.is_too_long, episode.num_answers) == (True, 0)


def test_a_session_that_is_gone_is_no_reason_to_ask_again(policy: Policy) -> None:
    nowhere = SessionEndpoint(base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="key", model="policy")
    with policy.server.episode(nowhere) as episode:
        assert policy.ask(episode.metadata)[0] == 410


def test_a_server_that_was_closed_listens_again_for_another_episode(policy: Policy) -> None:
    for text in ("a", "b"):
        policy.script.texts = [f"{text}{END}"]
        with policy.server.episode(policy.endpoint) as episode:
            assert policy.ask(episode.metadata)[0] == 200
        policy.server.close()
        with pytest.raises(urllib.error.URLError):
            policy.ask(episode.metadata)


def test_an_address_that_is_taken_is_said(policy: Policy) -> None:
    with pytest.raises(ConfigError) as at_the_start:
        PolicyServer("127.0.0.1", policy.port)  # the first one's episodes have not begun
    policy.server.close()
    with (
        listening("127.0.0.1", policy.port),
        pytest.raises(ConfigError) as at_an_episode,
        policy.server.episode(policy.endpoint),
    ):
        pass
    for caught in (at_the_start, at_an_episode):
        (problem,) = caught.value.problems
        assert problem.path == "environment.nemo_gym.policy_port"
        assert str(policy.port) in problem.found
