"""The environment `judge`, with OpenAI's client and a small server."""

import asyncio
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.spi import (
    CheckContext,
    ConfigError,
    DataError,
    EnvironmentContext,
    FinishReason,
    ModelSpec,
    PluginError,
    RewardError,
    StepResult,
    Turn,
)
from rlcore_rewards import bounded_replies
from rlcore_rewards.judge import JudgeBackend, check, template_of
from rlcore_rewards.judge_config import CriterionConfig, JudgeConfig
from rlcore_rewards.judge_template import score_of
from rlcore_rollout.environment_runner import EpisodeRunner

ROW = {"prompt": "1+1=", "answer": "2"}
PROMPT = "Rate {completion} for {prompt}, {row[answer]}. {example}"


class Endpoint(ThreadingHTTPServer):
    """Answers each request with the next of its answers, the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, str]] = [(200, "Score: 5")]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.body: bytes | None = None
        """Sent in place of the answers."""
        self.pause_s = 0.0
        """Seconds before each byte of a reply but the first."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["authorization"])
        status, text = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        message = {"role": "assistant", "content": text}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
        data = json.dumps(answer if status == 200 else {"error": {"message": text}}).encode()
        if self.server.body is not None:
            status, data = 200, self.server.body
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        with suppress(ConnectionError):
            for part in [data] if not self.server.pause_s else [data[place : place + 1] for place in range(len(data))]:
                self.wfile.write(part)
                time.sleep(self.server.pause_s)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def config(endpoint: Endpoint, **options: Any) -> JudgeConfig:
    return JudgeConfig(**{"base_url": endpoint.url, "model": "judge", "prompt": PROMPT, **options})


def judged(endpoint: Endpoint, text: str = "2", **options: Any) -> StepResult:
    """An answer scored, through the runner that the loop uses."""
    runner = EpisodeRunner(JudgeBackend(EnvironmentContext(seed=0), config(endpoint, **options)), 20.0)
    turn = Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)
    try:
        [result] = runner.step_all([ROW], [turn])
    finally:
        runner.close()
    assert isinstance(result, StepResult)
    return result


def test_the_judge_is_asked_and_its_score_is_the_reward(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    endpoint.answers = [(200, "At first score 9, but then: Score: 7.5")]
    result = judged(endpoint, api_key_env="JUDGE_KEY", temperature=0.5, max_tokens=9, success_reward=0.7)
    assert (result.reward, result.success, result.done, result.metrics) == (0.75, True, True, {"score": 7.5})
    [request] = endpoint.requests
    assert request["messages"] == [{"role": "user", "content": "Rate 2 for 1+1=, 2. {example}"}]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge", 0.5, 9)
    assert endpoint.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: -3", -3.0),
        ("Score: .5", 0.5),
        ("score=-0.25.", -0.25),
        ("**Score**: 7.5", 7.5),
        ("a score - 8/10", 8.0),
        ("score (0-10): 7", 7.0),
        ("Score [0 to 10]: -8.5", -8.5),
        ("the score (out of 10) - 6", 6.0),
        ("Score: 3, on score 0-10", 3.0),
        ("Score (7/10)", 7.0),
        ("Score: 2, no: Score: 10.", 10.0),
        ("Score: [7]\n\n1. The sum is right.", 7.0),
        ("Score: [[7/10]]. 2 steps are missing.", 7.0),
        ("Score: 8\n\n- 2 steps are missing", 8.0),
        ("Score: 8 - 2 steps are missing", 8.0),
        ("Score: 6, on score 0 to 10", 6.0),
        ("Score: 6, on score 0 - 10.", 6.0),
    ],
)
def test_the_score_is_read_with_its_sign_and_point(answer: str, score: float) -> None:
    config = JudgeConfig(base_url="http://judge", model="judge", score_range=(-10.0, 10.0))
    assert score_of(answer, config) == score


def replied(content: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}).encode()


def test_parts_of_a_content_are_joined(endpoint: Endpoint) -> None:
    endpoint.body = replied([{"type": "text", "text": "Score: "}, {"type": "text", "text": "5"}])
    assert judged(endpoint).reward == 0.5


@pytest.mark.parametrize(
    "body",
    [
        *(json.dumps(one).encode() for one in ({"choices": None}, {"choices": []}, {"choices": [{"message": None}]}, [1], "x")),
        *(b"null", b"{}", replied(5), replied([5]), replied([{"type": "text"}]), replied({"a": 1}), b"[" * 100_000, b"\xff"),
        replied("Score: 5" + " " * 2000),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_reply_of_another_form_is_an_error_of_the_judge(
    endpoint: Endpoint, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_replies, "MAX_REPLY_BYTES", 1000 if body.endswith(b' "}}]}') else 10**6)
    endpoint.body = body
    with pytest.raises(RewardError, match=f"the judge 'judge' at {endpoint.url}"):
        judged(endpoint, max_attempts=1)


def test_the_limit_of_time_is_for_the_whole_reply(endpoint: Endpoint) -> None:
    endpoint.body, endpoint.pause_s = replied("Score: 5"), 0.05
    with pytest.raises(RewardError, match=r"reply .* 0\.2 s"):
        judged(endpoint, max_attempts=1, timeout_s=0.2)


def test_a_field_of_json_and_a_range(endpoint: Endpoint) -> None:
    endpoint.answers = [(200, 'I say {"why": "so", "points": -1} to that')]
    assert judged(endpoint, score_field="points", score_range=(-2.0, 2.0)).reward == 0.25


def test_what_passes_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.answers = [(429, "slowly"), (503, "busy"), (200, "Score: 10")]
    assert judged(endpoint, max_attempts=3).success
    assert len(endpoint.requests) == 3
    endpoint.answers = [(503, "busy")]
    with pytest.raises(RewardError, match="'judge' at http.*InternalServerError.*busy"):
        judged(endpoint, max_attempts=2)
    assert len(endpoint.requests) == 5


@pytest.mark.parametrize("status", [401, 500])
def test_a_key_that_the_endpoint_repeats_stands_in_no_error(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OF_JUDGE", "short7!")  # not a name that tells of a secret
    endpoint.answers = [(status, "no such key: short7!, Bearer short7!")]
    with pytest.raises((PluginError, RewardError), match="no such key") as raised:
        judged(endpoint, api_key_env="OF_JUDGE", max_attempts=1)
    assert "short7" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_the_endpoint_refuses_ends_the_run(endpoint: Endpoint, status: int) -> None:
    endpoint.answers = [(status, "no")]
    with pytest.raises(PluginError, match=f"'judge'.*{status}"):
        judged(endpoint)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("Splendid.", {}),
        ("Score: 11", {}),
        ("Score: 5", {"score_field": "score"}),
        ('{"score": "5"}', {"score_field": "score"}),
        ('{"score": 5', {"score_field": "score"}),
        ("Score: 5", {"score_pattern": "(Score)"}),
    ],
)
def test_answers_without_a_score(endpoint: Endpoint, answer: str, options: dict[str, Any]) -> None:
    endpoint.answers = [(200, answer)]
    with pytest.raises(RewardError, match="the judge gave.* from 0 to 10"):
        judged(endpoint, **options)


def test_a_chat_is_told_with_its_roles_and_rows_have_what_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("{prompt} | {completion}")
    backend = JudgeBackend(EnvironmentContext(seed=0), config(endpoint, prompt=None, prompt_file=str(tmp_path / "judge.txt")))
    turn = Turn(text="2", tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)
    parts = [{"type": "image", "image": b"PNG"}, {"type": "text", "text": "1+1="}]
    chat = {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": parts}]}
    function = {"name": "add", "arguments": {"a": 1}}
    chat["prompt"].append({"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [{"function": function}]})
    asyncio.run(backend.step(chat, turn))
    assert endpoint.requests[0]["messages"][0]["content"] == (
        f"system: Count.\nuser: [image]1+1=\nassistant: Hm.\n{json.dumps(function)} | 2"
    )
    with pytest.raises(DataError, match=r"row\[answer\].*'prompt'"):
        asyncio.run(JudgeBackend(EnvironmentContext(seed=0), config(endpoint)).reset({"prompt": "1+1="}, 0))


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"base_url": "localhost:1"}, ".base_url"),
        ({"api_key_env": "NO_SUCH_KEY"}, ".api_key_env"),
        ({"prompt": "Rate it."}, ".prompt"),
        ({"prompt": None}, ""),
        ({"prompt_file": "too"}, ""),
        ({"prompt": None, "prompt_file": "/no/such/file"}, ".prompt_file"),
        ({"score_pattern": "("}, ".score_pattern"),
        ({"score_pattern": r"\d+"}, ".score_pattern"),
        ({"timeout_s": 60.0}, ".timeout_s"),
        ({"system_prompt": "Be brief."}, ".system_prompt"),
    ],
)
def test_what_is_wrong_with_a_section(endpoint: Endpoint, options: dict[str, Any], path: str) -> None:
    model = ModelSpec(path="none", dtype="float32")
    context = CheckContext(model=model, device="cpu", world_size=1, max_sequence_length=8, environment_timeout_s=60.0)
    assert [problem.path for problem in check(context, config(endpoint, **options))] == [f"environment.judge{path}"]
    assert check(context, config(endpoint)) == []


def test_a_template_that_is_gone(endpoint: Endpoint, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in ("/no/such/file", str(tmp_path / "pipe")):
        with pytest.raises(ConfigError, match="prompt_file"):
            template_of(config(endpoint, prompt=None, prompt_file=file))


RUBRIC = "Criteria:\n{criteria}\nAnswer: {completion}"
CRITERIA = {"right": CriterionConfig(text="Is it right?", weight=3.0), "short": CriterionConfig(text="Is it short?")}


def test_a_rubric_is_judged_in_one_request(endpoint: Endpoint) -> None:
    endpoint.answers = [(200, 'Thus {"right": 10, "short": 5}.')]
    result = judged(endpoint, prompt=RUBRIC, criteria=CRITERIA)
    assert result.reward == pytest.approx(0.75 * 1.0 + 0.25 * 0.5)
    assert result.reward_components == {"right": pytest.approx(0.75), "short": pytest.approx(0.125)}
    (request,) = endpoint.requests
    assert request["messages"][0]["content"] == "Criteria:\nright: Is it right?\nshort: Is it short?\nAnswer: 2"


def test_a_rubric_is_judged_criterion_by_criterion(endpoint: Endpoint) -> None:
    endpoint.answers = [(200, "Score: 5")]
    result = judged(endpoint, prompt=RUBRIC, criteria=CRITERIA, criteria_requests="each")
    assert result.reward == pytest.approx(0.5)
    asked = sorted(request["messages"][0]["content"] for request in endpoint.requests)
    assert asked == ["Criteria:\nIs it right?\nAnswer: 2", "Criteria:\nIs it short?\nAnswer: 2"]


@pytest.mark.parametrize("answer", ['{"right": 10}', '{"right": 10, "short": 11}', "right: 10, short: 5"])
def test_a_rubric_with_a_missing_score_is_no_reward(endpoint: Endpoint, answer: str) -> None:
    endpoint.answers = [(200, answer)]
    with pytest.raises(RewardError, match="short"):
        asyncio.run(stepped(endpoint, prompt=RUBRIC, criteria=CRITERIA))


async def stepped(endpoint: Endpoint, *texts: str, row: Any = None, **options: Any) -> list[StepResult]:
    """Answers to a row, scored at once."""
    backend = JudgeBackend(EnvironmentContext(seed=0), config(endpoint, **options))
    reset = await backend.reset(ROW if row is None else row, 0)
    turns = [Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP) for text in texts or ("2",)]
    return await asyncio.gather(*(backend.step(reset.state, turn) for turn in turns))


def test_a_rows_own_rubric_is_taken(endpoint: Endpoint) -> None:
    endpoint.answers = [(200, '{"1": 10, "2": 0}')]
    row = {**ROW, "rubric": [{"criterion": "It says 2.", "weight": 4}, {"criterion": "It is polite."}]}
    [result] = asyncio.run(stepped(endpoint, row=row, prompt=RUBRIC, criteria_field="rubric"))
    assert result.reward == pytest.approx(0.8)
    assert result.reward_components == {}
    for wrong in (None, [], "text", [{"criterion": ""}], [{"criterion": "a", "weight": 0}]):
        with pytest.raises(DataError, match="criteri"):
            asyncio.run(stepped(endpoint, row={**ROW, "rubric": wrong}, prompt=RUBRIC, criteria_field="rubric"))


def test_replies_that_are_kept_are_asked_for_once(endpoint: Endpoint) -> None:
    endpoint.answers = [(200, "Score: 5")]
    results = asyncio.run(stepped(endpoint, "2", "2", "3", "2", cache_size=8))
    assert [result.reward for result in results] == [0.5] * 4
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"cache_size": 4, "temperature": 0.5}, "cache_size"),
        ({"prompt": RUBRIC, "criteria": CRITERIA, "criteria_field": "rubric"}, "criteria_field"),
        ({"criteria_requests": "each"}, "criteria_requests"),
        ({"criteria": CRITERIA}, "prompt"),
    ],
)
def test_rubrics_that_do_not_go_together_are_named(endpoint: Endpoint, options: dict[str, Any], key: str) -> None:
    (problem,) = check(None, config(endpoint, **options))
    assert problem.path == f"environment.judge.{key}"
