"""Episodes of real Harbor, in a local environment without a container."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.spi import EpisodeResult, RewardError, Row, SessionEndpoint, failure_kind
from rlcore_harbor.environment import HarborBackend
from rlcore_report.failures import read_ledger
from rlcore_torchkit.testing.models import make_model

from ..serving.sessions.chat_model import END, ChatMl, Script  # type: ignore[import-not-found]
from .trials import LOCAL, ONE_ANSWER, PYTHON, REAL, Played, config_of, write_task

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ENDLESS = "sleep 600\n"


RUN = """
import asyncio
from rlcore.spi import EnvironmentContext, SessionEndpoint
from rlcore_harbor.config import HarborConfig
from rlcore_harbor.environment import HarborBackend

backend = HarborBackend(EnvironmentContext(seed=0), {config!r})
session = SessionEndpoint(base_url="http://127.0.0.1:9/v1", api_key="key", model="policy")
asyncio.run(backend.run(backend.rows("train")[0], 0, session))
"""


def turn(keys: str = "", *, is_done: bool = False) -> str:
    """An answer to terminus-2 that types keys."""
    commands = [{"keystrokes": keys, "duration": 0.5}] if keys else []
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": is_done}) + END


def shown(script: Script) -> str:
    """The last prompt of the policy."""
    return ChatMl().show(script.requests[-1].prompt.tolist())


@REAL
def test_terminus_solves_a_task_and_its_turns_are_recorded(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "a")
    said = (turn("printf yes > answer.txt\n"), turn(is_done=True), turn(is_done=True))
    script = Script(*said)
    options = {"record_terminal_session": False}
    played = Played(config_of(tmp_path / "tasks", agent="terminus-2", agent_options=options), script)
    assert (played.result.reward, played.result.success, played.result.failure) == (1.0, True, None)
    assert played.result.metrics["agent_execution_s"] > 0.5
    [segment] = played.segments
    assert ChatMl().show(segment.tokens[segment.loss_mask].tolist()) == "".join(said)
    assert "printf yes > answer.txt" in shown(script)


@REAL
def test_a_long_terminus_episode_ends_at_its_turns(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "a")
    options = {"record_terminal_session": False, "max_turns": 1}
    played = Played(config_of(tmp_path / "tasks", agent="terminus-2", agent_options=options), Script(turn("true\n")))
    assert (played.result.reward, played.result.failure) == (0.0, None)


@REAL
def test_trials_are_kept_where_the_recipe_says(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "a")
    kept = tmp_path / "trials"
    assert Played(config_of(tmp_path / "tasks", trials_folder=str(kept)), Script(f"yes{END}")).result.reward == 1.0
    [trial] = kept.iterdir()
    assert json.loads((trial / "result.json").read_text())["verifier_result"] == {"rewards": {"reward": 1.0}}


@REAL
def test_a_cancelled_trial_stops_its_environment(tmp_path: Path) -> None:
    """Its container is removed by Harbor, which needs a moment after the episode has ended."""
    mark = tmp_path / "root"
    write_task(tmp_path / "tasks" / "a", setup=f'echo "$ROOT" > {mark}\n')
    script = Script(f"yes{END}")
    script.waits = True

    async def cancel(backend: HarborBackend, row: Row, session: SessionEndpoint) -> EpisodeResult:
        episode = asyncio.create_task(backend.run(row, 0, session))
        while not script.requests:
            await asyncio.sleep(0.05)
        root = Path(mark.read_text().strip())
        assert root.is_dir()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        while root.exists():
            await asyncio.sleep(0.05)
        return EpisodeResult(reward=0.0)

    Played(config_of(tmp_path / "tasks"), script, cancel)


@REAL
def test_what_a_trial_starts_ends_with_it(tmp_path: Path) -> None:
    number = tmp_path / "process"
    write_task(tmp_path / "tasks" / "a", setup=f"setsid sleep 600 > /dev/null 2>&1 & echo $! > {number}\n")

    async def run(backend: HarborBackend, row: Row, session: SessionEndpoint) -> EpisodeResult:
        result = await backend.run(row, 0, session)
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(int(number.read_text()), 0)
                await asyncio.sleep(0.05)
        return result

    assert Played(config_of(tmp_path / "tasks"), Script(f"yes{END}"), run).result.reward == 1.0


@REAL
def test_a_killed_trial_is_one_of_the_infrastructure_and_the_next_one_runs(tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    write_task(tmp_path / "tasks" / "a", setup=f"[ -e {mark} ] && exit 0; touch {mark}; kill -9 $PPID\n")

    async def run(backend: HarborBackend, row: Row, session: SessionEndpoint) -> EpisodeResult:
        with pytest.raises(RewardError) as refused:
            await backend.run(row, 0, session)
        assert failure_kind(refused.value) == "infrastructure"
        return await backend.run(row, 0, session)

    assert Played(config_of(tmp_path / "tasks"), Script(f"yes{END}"), run).result.reward == 1.0


@REAL
def test_a_trial_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    number = tmp_path / "process"
    write_task(tmp_path / "tasks" / "a", setup=f"echo $$ > {number}.new; mv {number}.new {number}; sleep 600\n")
    program = tmp_path / "run.py"
    program.write_text(RUN.format(config=config_of(tmp_path / "tasks")))
    with subprocess.Popen([sys.executable, program]) as run:
        while not number.exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int(number.read_text()), 0)
            time.sleep(0.05)


def test_an_interpreter_without_harbor_fails_the_episode(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "a")
    with pytest.raises(RewardError, match=r"exit code 1"):
        Played(config_of(tmp_path / "tasks", python="/bin/false"), Script())


SLOW = """

class Slow(OneAnswer):
    async def run(self, instruction, environment, context):
        await super().run(instruction, environment, context)
        if "wait" in instruction:
            await asyncio.sleep(600)
"""
FAILURES: dict[str, tuple[dict[str, Any], tuple[str, str, str] | None]] = {
    "good": ({}, None),
    "its verifier hangs": ({"test": ENDLESS}, ("grader", "masked", "VerifierTimeoutError")),
    "it has no reward": ({"test": "true\n"}, ("grader", "masked", "RewardFileNotFoundError")),
    "its environment does not start": ({"setup": "exit 1\n"}, ("infrastructure", "masked", "environment/setup.sh failed")),
    "it is broken": ({"toml": "[environment]\nos = 'none'\n"}, ("environment", "masked", "the trial did not start")),
    "its agent waits": ({"instruction": "wait"}, ("limit", "masked", "AgentTimeoutError")),
}


@REAL
def test_failures_of_trials_are_in_their_rows(tmp_path: Path) -> None:
    """The train step sees the tokens of the other row."""
    agent = tmp_path / "slow_agent.py"
    agent.write_text(Path(ONE_ANSWER.rpartition(":")[0]).read_text() + SLOW)
    rows = [
        {"prompt": "a", "path": str(write_task(tmp_path / str(n), **task))} for n, (task, _) in enumerate(FAILURES.values())
    ]
    model = make_model(tmp_path / "model", max_length=64)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    section = {"task_field": "path", "python": str(PYTHON), "environment": LOCAL, "agent": f"{agent}:Slow"}
    section |= {"agent_timeout_s": 20.0, "verifier_timeout_s": 20.0, "max_concurrent": 6}
    recipe = {
        "model": {"path": str(model)},
        "algorithm": {"name": "grpo"},
        "environment": {"name": "harbor", "harbor": section},
        "run": {"name": "run", "directory": str(tmp_path / "runs"), "num_steps": 1},
        "rollout": {"samples_per_prompt": 2, "max_prompt_tokens": 32, "max_response_tokens": 4, "max_failed_fraction": 1.0},
        "training": {"prompts_per_step": len(rows)},
        "evaluation": {"at_start": False, "at_end": False},
    }
    run = rlcore.train(recipe, dataset=rows, progress="silent")
    ledger = read_ledger(run.path)
    assert ledger is not None
    found: dict[str, set[Any]] = {}
    for (kind, outcome, reason), sums in ledger.reasons.items():
        for row in sums.rows:
            found.setdefault(row, set()).add((kind, outcome, reason))
    for row, (_, expected) in enumerate(FAILURES.values()):
        if expected is not None:
            [(kind, outcome, reason)] = found[f"row {row}"]
            assert (kind, outcome) == expected[:2]
            assert expected[2] in reason
    [step] = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert step["environment/failed"] == 10.0
    assert sum(sums.of_outcome["trained"] for sums in ledger.kinds.values()) == 2
    assert sum(sums.loss_tokens for sums in ledger.kinds.values()) > 0
