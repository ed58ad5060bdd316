"""Faults that are injected into real environments: each ends in its row of the ledger, and trains as that row says."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen

from rlcore.spi import (
    ContractError,
    EnvironmentContext,
    EpisodeFailure,
    Observation,
    ResetResult,
    RewardError,
    Row,
    StepResult,
    ToolCall,
    Turn,
    fails_as,
)
from rlcore_code import sandbox
from rlcore_code.environment import CodeEnvironment
from rlcore_math.config import MathConfig
from rlcore_math.mathematics import MathEnvironment
from rlcore_mcp.config import McpConfig, McpServerConfig
from rlcore_mcp.environment import McpEnvironment
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.environment import NemoGymBackend
from rlcore_openenv.config import OpenEnvConfig
from rlcore_openenv.environment import OpenEnvBackend
from rlcore_rewards.config import FunctionConfig
from rlcore_rewards.environment import FunctionBackend
from rlcore_rewards.judge import JudgeBackend
from rlcore_rewards.judge_config import JudgeConfig
from rlcore_serve.agents.config import AgentConfig
from rlcore_serve.agents.environment import AgentBackend
from rlcore_verifiers.failures import error_kind, failure_of

from ..code_environment.sandboxes import CONFIG, needs_namespaces
from ..nemo_gym_environment.gym_servers import Gym, free_port, serving
from ..nemo_gym_environment.gym_servers import row as gym_row
from ..openenv.protocol_server import GameServer
from ..openenv.protocol_server import serving as serving_route
from ..rewards.test_judge import Endpoint
from .agent_steps import played
from .failing import CUT, Step, expected_advantages, sampled

CONTEXT = EnvironmentContext(seed=0)
TOOL_SERVER = Path(__file__).parents[1] / "mcp_tools" / "tool_server.py"
SAID = ("fault", "right", "wrong", "wronger")
"""The samples of a group; the first one meets the fault."""
ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


# One-turn environments


def scored(body: str, tmp_path: Path, *, is_async: bool = False, said: tuple[str, ...] = SAID, **options: Any) -> Step:
    """A step of the environment `function`; `body` is what it does with the completion "fault"."""
    file = tmp_path / "score.py"
    lines = [
        "import asyncio, os, signal",
        f"{'async ' if is_async else ''}def score(completion):",
        '    if completion.startswith("fault"):',
        *(f"        {line}" for line in body.splitlines()),
        '    return float(completion == "right")',
    ]
    file.write_text("\n".join(lines))
    backend = FunctionBackend(CONTEXT, FunctionConfig(path=f"{file}:score", max_concurrent=2))
    return sampled(backend, {"prompt": "a"}, said, **options)


def raises(error: str) -> Callable[..., Step]:
    return lambda tmp_path, _: scored(f"raise {error}", tmp_path)


def hangs(tmp_path: Path, _: Any) -> Step:
    return scored("await asyncio.sleep(600)", tmp_path, is_async=True, timeout_s=2.0)


def is_killed(tmp_path: Path, _: Any) -> Step:
    return scored("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)


def says(value: str, **options: Any) -> Callable[..., Step]:
    return lambda tmp_path, _: scored(f"return {value}", tmp_path, **options)


def is_cut(tmp_path: Path, _: Any) -> Step:
    return scored("return 0.0", tmp_path, said=(f"fault{CUT}", *SAID[1:]))


def is_cut_and_masked(tmp_path: Path, _: Any) -> Step:
    return scored("return 0.0", tmp_path, said=(f"fault{CUT}", *SAID[1:]), masks_truncated=True)


def episode_takes_too_long(tmp_path: Path, _: Any) -> Step:
    return scored("await asyncio.sleep(600)", tmp_path, is_async=True, episode_timeout_s=3.0, on_error="error")


def programmed(first: str, **options: Any) -> Step:
    """A step of the environment `code`, of which the first program is `first`."""
    needs_namespaces()
    config = evolve(CONFIG, prompt_format="text", **options)
    texts = [f"```python\n{program}\n```" for program in (first, "print(4)", "print(5)", "print(6)")]
    row = {"prompt": "a", "tests": [{"input": "", "output": "4\n"}]}
    return sampled(CodeEnvironment(CONTEXT, config), row, texts, timeout_s=300.0)


def program_loops(_: Path, __: Any) -> Step:
    return programmed("while True: pass", cpu_time_s=1)


def sandbox_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """Its launcher does, for the one program that sleeps in its first line."""
    launcher, real = tmp_path / "launcher.py", sandbox.LAUNCHER
    launcher.write_text(
        "import json, sys, time, runpy\n"
        "request = sys.stdin.buffer.read()\n"
        "if b'hangs' in request:\n    time.sleep(600)\n"
        "import io\n"
        "sys.stdin = io.TextIOWrapper(io.BytesIO(request))\n"
        f"sys.path.insert(0, {str(real.parent)!r})\n"
        f"runpy.run_path({str(real)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(sandbox, "LAUNCHER", launcher)
    monkeypatch.setattr(sandbox, "GRACE_S", 8.0)
    return programmed("# hangs", wall_time_s=8.0)


def answer_is_endless(_: Path, __: Any) -> Step:
    texts = (ENDLESS, "\\boxed{4}", "\\boxed{5}", "\\boxed{6}")
    config = MathConfig(num_processes=1, verification_timeout_s=1.0, prompt_format="text")
    return sampled(MathEnvironment(CONTEXT, config), {"prompt": "a", "answer": "2^{2}"}, texts, timeout_s=300.0)


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    with Endpoint() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def judged(answers: list[tuple[int, str]], endpoint: Endpoint) -> Step:
    """A step of the environment `judge`, which is asked by one sample after another."""
    endpoint.answers = answers
    config = JudgeConfig(base_url=endpoint.url, model="m", prompt="Rate {completion}.", max_attempts=1, max_concurrent=1)
    return sampled(JudgeBackend(CONTEXT, config), {"prompt": "a"}, SAID, timeout_s=120.0)


GOOD = [(200, "Score: 10"), (200, "Score: 3"), (200, "Score: 0")]


# Environments of a user's own


class Own:
    """Answers "fault" by a function, and rewards "right"."""

    def __init__(self, fault: Callable[[], Any], *, at_reset: bool = False) -> None:
        self._fault, self._at_reset = fault, at_reset

    async def reset(self, row: Row, seed: int) -> ResetResult:
        if self._at_reset and row["prompt"] == "fault":
            await self._fault()
        return ResetResult(observation=Observation(text=row["prompt"]), state=0)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        if turn.text == "fault" and not self._at_reset:
            result: StepResult = await self._fault()
            return result
        return StepResult(reward=float(turn.text == "right"), done=True)

    def rows(self, split: str) -> None:
        return None


async def loses_its_tool() -> StepResult:
    with fails_as("tool"):
        raise RuntimeError("the search index is gone")


async def waits_for_its_tool() -> StepResult:
    with fails_as("tool"):
        await asyncio.sleep(600)
    raise AssertionError


async def has_a_defect() -> StepResult:
    raise KeyError("answer")


async def rewards_nan() -> StepResult:
    return StepResult(reward=float("nan"), done=True)


async def came_to_its_own_limit() -> StepResult:
    return StepResult(reward=0.5, done=True, failure=EpisodeFailure(kind="limit", reason="100 moves were made"))


def own(fault: Callable[[], Any], **options: Any) -> Callable[..., Step]:
    return lambda _, __: sampled(Own(fault), {"prompt": "a"}, SAID, **options)


# Agents


def gym(*, reply: Any = None, verdict: dict[str, Any] | None = None, on_error: str = "mask") -> Callable[..., Step]:
    """A step of NeMo Gym, whose servers answer the first episode so."""

    def run(_: Path, __: Any) -> Step:
        servers = Gym(f"http://127.0.0.1:{free_port()}/v1")

        def before(number: int) -> None:
            servers.reply = reply if number == 0 else None
            servers.verdict = (verdict or {}) if number == 0 else {"reward": float(number)}

        with serving(servers):
            port = int(servers.policy_url.split(":")[2].removesuffix("/v1"))
            backend = NemoGymBackend(CONTEXT, NemoGymConfig(head_url=servers.url, policy_port=port))
            return played(backend, gym_row(), before=before, on_error=on_error, tool_parser=NoCalls())

    return run


class NoCalls:
    """Finds no call of a tool in any turn."""

    def parse(self, text: str, tools: Any = ()) -> tuple[str, tuple[()]]:
        return text, ()


def openenv(answer: str | None, action: str = "text") -> Callable[..., Step]:
    """A step of an OpenEnv server, which answers the first episode's steps so; None: it goes away."""

    def run(_: Path, __: Any) -> Step:
        server = GameServer(max_concurrent=1)

        def before(number: int) -> None:
            server.replies = {"step": answer if number == 0 else over(number)}

        with serving_route("GET", "/ws", server.handle) as url:
            return played(OpenEnvBackend(CONTEXT, OpenEnvConfig(urls=(url,))), {"seed": 1}, before=before)

    return run


class CallsInFault:
    """Finds a call of one tool in the turn "fault" alone."""

    def __init__(self, tool: str) -> None:
        self._tool = tool

    def parse(self, text: str, tools: Any = ()) -> tuple[str, tuple[ToolCall, ...]]:
        return text, (ToolCall(id="1", name=self._tool, text=text),) if text == "fault" else ()


def mcp(tool: str, **options: Any) -> Callable[..., Step]:
    """A step of an MCP server, of which the first sample calls a tool."""

    def run(_: Path, __: Any) -> Step:
        server = McpServerConfig(command=(sys.executable, str(TOOL_SERVER)), **options)
        backend = McpEnvironment(CONTEXT, McpConfig(servers={"sums": server}))
        try:
            return sampled(backend, {"prompt": "a", "answer": "right"}, SAID, tool_parser=CallsInFault(tool))
        finally:
            backend.close()

    return run


def over(number: int) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "reward": number, "done": True}})


def agent(body: str, **options: Any) -> Callable[..., Step]:
    """A step of an agent that is a function; `body` is what it does in its first episode."""

    def run(tmp_path: Path, _: Any) -> Step:
        file = tmp_path / "agent.py"
        lines = [
            "import asyncio, json, openai",
            "number = 0",
            "async def run(task, client):",
            "    global number",
            "    number += 1",
            "    own = number",
            '    messages = [{"role": "user", "content": "a"}]',
            "    await client.openai.chat.completions.create(model=client.model, messages=messages)",
            "    if own == 1:",
            *(f"        {line}" for line in body.splitlines()),
            "    return float(own)",
        ]
        file.write_text("\n".join(lines))
        return played(AgentBackend(CONTEXT, AgentConfig(function=f"{file}:run")), {"task": "a"}, **options)

    return run


ASK = """
import json, os, pathlib, signal, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "a"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
begun = pathlib.Path(__file__).with_name("begun")
number = int(begun.read_text()) + 1 if begun.exists() else 1
begun.write_text(str(number))
"""


def program(body: str) -> Callable[..., Step]:
    """A step of an agent that is a program; `body` is what it does in its first episode."""

    def run(tmp_path: Path, _: Any) -> Step:
        script = tmp_path / "agent.py"
        script.write_text(f"{ASK}if number == 1:\n    {body}\nprint(number)\n")
        backend = AgentBackend(CONTEXT, AgentConfig(command=(sys.executable, str(script))))
        return played(backend, {"task": "a"}, before=lambda number: None, timeout_s=120.0)

    return run


HARBOR = '{{"reward": 0.0, "exception_info": {{"exception_type": "{}", "exception_message": "of a trial"}}}}'


def harbor(name: str, **options: Any) -> Callable[..., Step]:
    return agent(f"return {HARBOR.format(name)}", **options)


@frozen
class Fault:
    """A fault, and its row."""

    inject: Callable[[Path, Any], Step]
    kind: str
    outcome: str
    words: str
    """Words of its reason."""


FAULTS = {
    "a reward function raises": Fault(raises('ValueError("no number")'), "grader", "masked", "ValueError"),
    "a reward function loses its service": Fault(raises('ConnectionError("gone")'), "infrastructure", "masked", "gone"),
    "a reward function hangs": Fault(hangs, "grader", "masked", "took longer than 2 s"),
    "a reward function is killed": Fault(is_killed, "infrastructure", "masked", "SIGKILL"),
    "a reward function returns NaN": Fault(says('float("nan")'), "grader", "masked", "finite"),
    "a reward function returns a failure": Fault(
        says('{"failure": {"kind": "tool", "reason": "no compiler"}}', on_error="error"), "tool", "masked", "no compiler"
    ),
    "a program runs for ever": Fault(program_loops, "policy", "trained", "cpu_time_s"),
    "a sandbox hangs": Fault(sandbox_hangs, "infrastructure", "masked", "sandbox"),
    "an answer cannot be checked": Fault(answer_is_endless, "policy", "trained", "to check"),
    "an environment raises": Fault(own(has_a_defect), "environment", "masked", "KeyError"),
    "an environment rewards NaN": Fault(own(rewards_nan), "environment", "masked", "nan"),
    "an environment has a limit": Fault(own(came_to_its_own_limit), "limit", "trained", "100 moves"),
    "a tool raises": Fault(own(loses_its_tool), "tool", "masked", "index is gone"),
    "a tool hangs": Fault(own(waits_for_its_tool, timeout_s=2.0), "tool", "masked", "took longer than 2 s"),
    "no token is left": Fault(is_cut, "limit", "trained", "max_response_tokens"),
    "no token is left, and that is masked": Fault(is_cut_and_masked, "limit", "masked", "max_response_tokens"),
    "an episode takes too long": Fault(episode_takes_too_long, "limit", "masked", "episode_timeout_s"),
    "NeMo Gym masks a sample": Fault(
        gym(verdict={"mask_sample": True, "eval_timed_out": True}, on_error="error"), "grader", "masked", "eval_timed_out"
    ),
    "NeMo Gym's agent is out of time": Fault(
        gym(verdict={"mask_sample": True, "agent_timed_out": True}, on_error="error"), "limit", "masked", "agent_timed_out"
    ),
    "NeMo Gym's judge fails": Fault(gym(verdict={"_ng_failure_class": "judge_failed"}), "grader", "masked", "judge_failed"),
    "NeMo Gym is overloaded": Fault(gym(reply=(503, "busy")), "infrastructure", "masked", "status 503"),
    "an OpenEnv server goes away": Fault(openenv(None), "infrastructure", "masked", "closed the connection"),
    "an OpenEnv server fails": Fault(
        openenv('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "crash"}}'),
        "environment",
        "masked",
        "EXECUTION_ERROR",
    ),
    "an MCP server dies": Fault(mcp("die"), "tool", "masked", "the disk is full"),
    "a tool of an MCP server hangs": Fault(mcp("hang", call_timeout_s=1.0), "tool", "masked", "call_timeout_s"),
    "an agent's function raises": Fault(agent('raise LookupError("no page")'), "environment", "masked", "LookupError"),
    "an agent's model is not there": Fault(
        agent('await openai.AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="x", max_retries=0).models.list()'),
        "infrastructure",
        "masked",
        "APIConnectionError",
    ),
    "an agent hangs": Fault(agent("await asyncio.sleep(600)", timeout_s=8.0), "limit", "masked", "took longer than 8 s"),
    "an agent's program fails": Fault(program("sys.exit(3)"), "environment", "masked", "exit code 3"),
    "an agent's program is killed": Fault(
        program("os.kill(os.getpid(), signal.SIGKILL)"), "infrastructure", "masked", "SIGKILL"
    ),
    "Harbor's verifier is out of time": Fault(
        harbor("VerifierTimeoutError", on_error="error"), "grader", "masked", "VerifierTimeoutError: of a trial"
    ),
    "Harbor's agent is out of time": Fault(harbor("AgentTimeoutError", on_error="error"), "limit", "masked", "AgentTimeout"),
    "Harbor's sandbox is not built": Fault(
        harbor("SandboxBuildFailedError", on_error="error"), "infrastructure", "masked", "SandboxBuild"
    ),
    "Harbor's agent exits with an error": Fault(
        harbor("NonZeroAgentExitCodeError"), "policy", "trained", "NonZeroAgentExitCodeError"
    ),
}


def check(step: Step, kind: str, outcome: str, words: str) -> None:
    """Look at the ledger's one fault, and at what the step trains on."""
    (found,) = step.faults()
    assert (found.kind, found.outcome, found.episodes) == (kind, outcome, 1)
    assert words in found.reason
    others = [one for one in step.entries if not one.reason]
    assert [(one.kind, one.outcome, one.episodes) for one in others] == [("policy", "trained", 3)]
    collected, batch = step.collected, step.collected.batch
    (fault,) = [number for number, ending in enumerate(collected.failures) if ending is not None]
    of_fault = collected.episode_of == fault
    is_trained = outcome == "trained"
    assert (collected.valid == (~of_fault | is_trained)).all()
    masks = np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int64) > 0
    assert (masks == (~of_fault | is_trained)).all()
    assert collected.rewards[of_fault & ~collected.valid].tolist() == [0.0] * int((of_fault & ~collected.valid).sum())
    np.testing.assert_allclose(step.advantages, expected_advantages(step), rtol=1e-5, atol=1e-6)
    assert np.abs(step.advantages).max() > 0
    weights = [one.weight for one in step.entries]
    total = np.abs(step.advantages * batch.loss_lengths).sum()
    assert sum(weight or 0.0 for weight in weights) == pytest.approx(total, rel=1e-5)
    assert (found.weight == 0.0) == (not is_trained or not step.advantages[of_fault].any())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_in_its_row_and_trains_as_the_row_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    check(fault.inject(tmp_path, monkeypatch), fault.kind, fault.outcome, fault.words)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [((503, "busy"), "infrastructure", "503"), ((200, "I cannot say."), "grader", "no score")],
    ids=["judge is overloaded", "judge gives no score"],
)
def test_a_judges_fault_ends_in_its_row(endpoint: Endpoint, answer: tuple[int, str], kind: str, words: str) -> None:
    check(judged([answer, *GOOD], endpoint), kind, "masked", words)


def test_a_prompt_that_cannot_begin_fails_its_whole_group() -> None:
    step = sampled(Own(has_a_defect, at_reset=True), {"prompt": "fault"}, SAID, max_failed_fraction=1.0)
    (found,) = step.entries
    assert (found.kind, found.outcome, found.episodes, found.weight) == ("environment", "masked", 4, 0.0)
    assert not step.collected.batch.loss_mask.any()


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ({"error": "SandboxError", "error_chain_repr": "SandboxError('gone')"}, "infrastructure"),
        ({"error": "InfraError", "error_chain_repr": "InfraError()"}, "infrastructure"),
        ({"error": "ToolCallError", "error_chain_repr": "ToolCallError() -> OSError()"}, "tool"),
        ({"error": "Error", "error_chain_repr": "Error() -> ToolError()"}, "tool"),
        ({"error": "Error", "error_chain_repr": "Error('bad world')"}, "environment"),
    ],
)
def test_an_error_of_verifiers_has_its_kind(output: dict[str, str], kind: str) -> None:
    assert error_kind(output) == kind


def test_a_rollout_of_verifiers_whose_time_was_over_is_masked_though_it_has_a_reward() -> None:
    late, cut, done = {"stop_condition": "timeout_reached", "reward": 1.0}, {"is_truncated": True}, {"is_truncated": False}
    assert failure_of(late) == EpisodeFailure(
        kind="limit", reason="its time was over (stop_condition timeout_reached)", masked=True
    )
    ending = failure_of(cut)
    assert ending is not None
    assert (ending.kind, ending.is_trained) == ("limit", True)
    assert failure_of(done) is None


BAD: list[tuple[Any, str]] = [
    (EpisodeFailure(kind="weather"), "weather"),  # type: ignore[arg-type]
    (EpisodeFailure(kind="tool", reason=3), "reason"),  # type: ignore[arg-type]
    (EpisodeFailure(kind="tool", masked=1), "masked"),  # type: ignore[arg-type]
    ("tool", "EpisodeFailure"),
]


@pytest.mark.parametrize(("failure", "words"), BAD)
def test_what_is_no_failure_ends_the_run(failure: Any, words: str) -> None:
    async def fault() -> StepResult:
        return StepResult(reward=0.0, done=True, failure=failure)

    with pytest.raises(ContractError, match=words):
        sampled(Own(fault), {"prompt": "a"}, SAID)


def test_all_that_is_wrong_with_a_failure_is_told_at_once() -> None:
    async def fault() -> StepResult:
        bad = EpisodeFailure(kind="weather", reason=3, masked=1)  # type: ignore[arg-type]
        return StepResult(reward=0.0, done=True, failure=bad)

    with pytest.raises(ContractError) as raised:
        sampled(Own(fault), {"prompt": "a"}, SAID)
    assert all(word in str(raised.value) for word in ("weather", "reason", "masked", "infrastructure"))


def test_a_failure_of_an_episode_that_goes_on_ends_the_run() -> None:
    async def fault() -> StepResult:
        failure = EpisodeFailure(kind="tool")
        return StepResult(reward=0.0, done=False, observation=Observation(text="b"), failure=failure)

    with pytest.raises(ContractError, match="done=False"):
        sampled(Own(fault), {"prompt": "a"}, SAID)


def test_an_error_that_is_raised_ends_a_run_that_does_not_mask() -> None:
    with pytest.raises(RewardError, match="index is gone"):
        sampled(Own(loses_its_tool), {"prompt": "a"}, SAID, on_error="error")


def test_more_returned_failures_than_the_recipe_lets_pass_end_the_run() -> None:
    async def fault() -> StepResult:
        return StepResult(reward=0.0, done=True, failure=EpisodeFailure(kind="infrastructure", reason="no disk"))

    with pytest.raises(RewardError, match="max_failed_fraction"):
        sampled(Own(fault), {"prompt": "a"}, ("fault", "fault", "fault", "right"), on_error="error")
