"""The environment `function`: prompts as the policy reads them, rewards from functions here and in worker processes."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlcore.spi import ConfigError, DataError, EnvironmentContext, FinishReason, RewardError, StepResult, Turn
from rlcore_rewards.config import FunctionConfig
from rlcore_rewards.environment import FunctionBackend, check, max_concurrent
from rlcore_rewards.provider import FUNCTION
from rlcore_rollout.environment_results import Failure
from rlcore_rollout.environment_runner import EpisodeRunner

ROW = {"prompt": "1+1=", "answer": "2"}
SOURCE = """
import asyncio, os, time

def score(completion, answer):
    return completion == answer

def where(completion):
    if completion == "hang":
        time.sleep(3600)
    if completion == "crash":
        os.abort()
    return {"reward": 0.5, "process": os.getpid()}

def sees(completion):
    return sum(2**place for place, name in enumerate(("WANDB_API_KEY", "NAMED_KEY", "SOMETHING", "PATH")) if name in os.environ)

async def later(completion, row):
    await asyncio.sleep(3600 if completion == "hang" else 0)
    if completion == "fail":
        raise ValueError("bad")
    return {"short": len(completion) < 3, "process": os.getpid()}
"""


def turn(text: str) -> Turn:
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rewards.py").write_text(SOURCE)
    return f"{tmp_path}/rewards.py"


@pytest.fixture
def backend(source: str) -> Iterator[Callable[..., FunctionBackend]]:
    """Makes an environment from names in the source, or from functions."""
    made: list[FunctionBackend] = []

    def make(*names: Any, **options: Any) -> FunctionBackend:
        named = [f"{source}:{name}" for name in names if isinstance(name, str)]
        config = FunctionConfig(path=tuple(named) or None, **options)
        made.append(FunctionBackend(EnvironmentContext(seed=0, reward_functions=() if named else names), config))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not [child for child in psutil.Process().children() if child.cmdline()[-1:] == ["rewards"]]


def step(environment: FunctionBackend, text: str) -> StepResult:
    return asyncio.run(environment.step(ROW, turn(text)))


def test_a_function_in_a_file_rewards_an_answer(backend: Callable[..., FunctionBackend]) -> None:
    environment = backend("score")
    right, wrong = step(environment, "2"), step(environment, "3")
    assert (right.reward, right.success, right.done, right.metrics) == (1.0, True, True, {})
    assert (wrong.reward, wrong.success) == (0.0, False)


def test_worker_processes_get_no_variable_that_the_recipe_does_not_name(
    backend: Callable[..., FunctionBackend], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "NAMED_KEY", "SOMETHING"):
        monkeypatch.setenv(name, "value")
    assert step(backend("sees", pass_environment=("NAMED_KEY",)), "2").reward == 10.0
    (problem,) = check(None, FunctionConfig(path=f"{source}:sees", pass_environment=("NOT_SET",)))
    assert problem.path == "environment.function.pass_environment"


def test_several_functions_add_up_and_only_those_to_be_awaited_run_here(backend: Callable[..., FunctionBackend]) -> None:
    result = step(backend("score", "later", weights={"score": 2.0, "short": 0.5}), "2")
    assert result.reward == 2.5
    assert result.metrics["process"] == psutil.Process().pid
    assert step(backend("where"), "2").metrics["process"] != psutil.Process().pid


def test_given_functions_are_called_in_a_thread_of_this_process(backend: Callable[..., FunctionBackend]) -> None:
    threads = []

    def score(completion: str) -> float:
        threads.append(threading.current_thread())
        return float(completion)

    assert step(backend(score), "2").reward == 2.0
    assert threads != [threading.main_thread()]


def test_given_functions_of_one_name_are_refused_before_anything_runs(backend: Callable[..., FunctionBackend]) -> None:
    with pytest.raises(ConfigError, match="more than once"):
        backend(lambda completion: 1.0, lambda completion: 2.0)


@pytest.mark.parametrize("kind", ["where", "later"])
def test_one_that_hangs_costs_its_sample_alone(
    backend: Callable[..., FunctionBackend], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = backend(kind, weights={"short": 1.0} if kind == "later" else {}, max_concurrent=2)
    now, answered, environment_step, work = [0.0], [], environment.step, EpisodeRunner.work

    async def step_and_count(state: Any, answer: Turn) -> StepResult:
        """Time goes on once all others have answered, however long that takes."""
        result = await environment_step(state, answer)
        answered.append(result)
        if len(answered) == 3:
            asyncio.get_running_loop().call_soon(now.append, 1000.0)
        return result

    monkeypatch.setattr(environment, "step", step_and_count)
    monkeypatch.setattr(EpisodeRunner, "work", lambda runner, begin: work(runner, begin, lambda: now[-1]))
    runner = EpisodeRunner(environment, 60.0, "mask", max_concurrent=2)
    outcomes = runner.step_all([ROW] * 4, [turn(text) for text in ("hang", "2", "3", "4")])
    runner.close()
    assert isinstance(outcomes[0], Failure)
    assert "environment_timeout_s" in outcomes[0].reason
    assert all(isinstance(outcome, StepResult) for outcome in outcomes[1:])


def test_one_that_crashes_or_raises_says_so(backend: Callable[..., FunctionBackend]) -> None:
    with pytest.raises(RewardError, match="'where'.*SIGABRT"):
        step(backend("where"), "crash")
    with pytest.raises(RewardError, match=r"'later' raised ValueError at rewards\.py:\d+: bad"):
        step(backend("later"), "fail")


def test_a_function_that_is_gone_when_a_process_loads_it(backend: Callable[..., FunctionBackend], source: str) -> None:
    environment = backend("score")
    Path(source).unlink()
    with pytest.raises(RewardError, match="rewards.py:score.*FileNotFoundError"):
        step(environment, "2")


@pytest.mark.parametrize(
    ("prompt", "options", "messages"),
    [
        ("1+1=", {"prompt_format": "chat"}, [{"role": "user", "content": "1+1="}]),
        (
            "1+1=",
            {"prompt_format": "chat", "system_prompt": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}],
        ),
        ([{"role": "user", "content": "1+1="}], {}, [{"role": "user", "content": "1+1="}]),
        ("1+1=", {}, None),
    ],
)
def test_prompts(backend: Callable[..., FunctionBackend], prompt: Any, options: Any, messages: Any) -> None:
    tools = () if messages is None else ({"type": "function", "function": {"name": "f"}},)
    row = {"prompt": prompt, "answer": "2", "tools": tools}
    observation = asyncio.run(backend("score", **options).reset(row, 0)).observation
    assert observation.tools == tools
    assert observation.text == (prompt if messages is None else None)
    assert messages is None or list(observation.messages or ()) == messages


def test_rows_have_what_functions_take(backend: Callable[..., FunctionBackend]) -> None:
    with pytest.raises(DataError, match="'score' takes answer.*'prompt', 'level'"):
        asyncio.run(backend("score").reset({"prompt": "1+1=", "level": 1}, 0))
    with pytest.raises(DataError, match="'question'"):
        asyncio.run(backend("score").reset({"question": "1+1="}, 0))


def test_what_is_wrong_with_a_section(source: str) -> None:
    problems = check(None, FunctionConfig(path=f"{source}:none", system_prompt="Be brief."))
    assert [problem.path for problem in problems] == ["environment.function.system_prompt", "environment.function.path"]
    assert check(None, FunctionConfig(path=f"{source}:score")) == []
    with pytest.raises(ConfigError, match=r"environment\.function\.path: found no function"):
        FunctionBackend(EnvironmentContext(seed=0), FunctionConfig())


def test_as_many_calls_as_processes_or_as_can_wait(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore_rewards.environment.default_processes", lambda: 3)
    both = (f"{source}:score", f"{source}:later")
    assert FUNCTION.max_concurrent(FunctionConfig(path=both)) == 3
    assert max_concurrent(FunctionConfig(path=both[1:])) == 64
    assert max_concurrent(FunctionConfig(path=both, max_concurrent=5)) == 5
