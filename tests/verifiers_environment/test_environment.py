"""Rollouts of the real package against a session's server: what is sampled, rewarded and recorded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlcore_verifiers.package import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

from rlcore.spi import DataError, EnvironmentContext, EpisodeResult, RewardError, SessionEndpoint, failure_kind
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Sessions
from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.environment import VerifiersEnvironment, episode_result

from ..serving.sessions.chat_model import END, ChatMl, Script, served

CALL = '<tool_call>{"name": "add", "arguments": {"a": 0, "b": 1}}</tool_call>'


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def environment(kind: str = "single", **options: Any) -> VerifiersEnvironment:
    arguments = {name: options.pop(name) for name in ("evaluation", "training") if name in options}
    config = VerifiersConfig(name="owner/verifiers-worlds", args={"kind": kind, **arguments}, **options)
    return VerifiersEnvironment(EnvironmentContext(seed=0), config)


def played(kind: str, *texts: str, limit: int = 2000, **options: Any) -> tuple[EpisodeResult, list[str], Script]:
    """An episode on the first task, what of it is in the loss, and the script that was said."""
    backend, script, sessions = environment(kind, **options), Script(*texts), Sessions()
    with serving(served(script, max_sequence_length=limit), sessions) as address:
        session = sessions.open()
        endpoint = SessionEndpoint(base_url=f"{address}/{session.token}/v1", api_key=session.token, model="policy")
        result = asyncio.run(backend.run(backend.rows("train")[0], 0, endpoint))
        segments = sessions.finish(session)
    return result, [ChatMl().show(one.tokens[one.loss_mask].tolist()) for one in segments], script


def test_one_turn_is_rewarded_by_the_rubric() -> None:
    result, said, script = played("single", f"it is 1{END}")
    assert (result.reward, result.success) == (2.0, True)
    assert result.metrics["right"] == 1.0
    assert result.metrics["length"] == 1.0
    assert said == [f"it is 1{END}"]
    assert ChatMl().show(script.requests[0].prompt.tolist()).count("Add.") == 1


def test_a_wrong_answer_earns_nothing_and_success_has_a_threshold() -> None:
    assert played("single", f"it is 2{END}")[0].success is False
    assert played("single", f"it is 1{END}", success_reward=3.0)[0].success is False


def test_several_turns_are_one_sequence() -> None:
    result, said, _ = played("twice", f"2{END}", f"1{END}")
    assert (result.reward, result.metrics["num_turns"]) == (2.0, 2.0)
    assert said == [f"2{END}1{END}"]


def test_tools_are_called_and_their_answers_read() -> None:
    result, said, script = played("tools", f"{CALL}{END}", f"it is 1{END}")
    assert (result.reward, result.metrics["total_tool_calls"]) == (2.0, 1.0)
    assert said == [f"{CALL}{END}it is 1{END}"]
    assert "tool\n1" in ChatMl().show(script.requests[1].prompt.tolist())


def test_an_empty_answer_is_an_answer() -> None:
    result, said, _ = played("single", END)
    assert (result.reward, result.metrics["empty_answer"], said) == (0.0, 1.0, [END])


def test_a_prompt_without_room_ends_the_episode() -> None:
    result, said, script = played("twice", f"1{END}", limit=50)
    assert len(script.requests) == 1
    assert (result.reward, result.metrics["rollout_truncated"], len(said)) == (2.0, 1.0, 1)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.is_trained) == ("limit", True)


def test_what_fails_in_the_environment_is_an_error() -> None:
    with pytest.raises(RewardError, match="the sandbox is gone") as raised:
        played("broken", f"1{END}")
    assert failure_kind(raised.value) == "infrastructure"


def test_rewards_have_to_be_numbers() -> None:
    with pytest.raises(RewardError, match="reward is nan"):
        episode_result({"reward": float("nan"), "metrics": {}}, 1.0)
    assert episode_result({"reward": 1, "metrics": {"a": float("nan"), "b": 2}}, 1.0).metrics.keys() >= {"b"}


def test_rows_are_the_environments_data() -> None:
    backend = environment()
    assert [row["answer"] for row in backend.rows("train")] == ["1", "2", "3", "4"]
    assert [row["answer"] for row in backend.rows("evaluation")] == ["5", "6"]
    assert json.loads(json.dumps(backend.rows("train")[0]["prompt"]))[-1] == {"role": "user", "content": "0+1"}


def test_rows_are_held_out_where_there_are_none_for_evaluation() -> None:
    assert environment(evaluation=False).rows("evaluation") is None
    backend = environment(evaluation=False, num_evaluation=1)
    assert [row["answer"] for row in backend.rows("train")] == ["1", "2", "3"]
    assert [row["answer"] for row in backend.rows("evaluation")] == ["4"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"num_evaluation": 1}, "data of its own"),
        ({"evaluation": False, "num_evaluation": 4}, "has 4 tasks"),
        ({"training": False}, "has 0 tasks"),
    ],
)
def test_data_that_are_not_there_are_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(DataError, match=names):
        environment(**options).rows("train")


def test_rows_of_other_data_are_refused() -> None:
    session = SessionEndpoint(base_url="http://127.0.0.1:9/t/v1", api_key="t", model="policy")
    with pytest.raises(DataError, match="'prompt'.*without"):
        asyncio.run(environment().run({"prompt": "1+1"}, 0, session))
