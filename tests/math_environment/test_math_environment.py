"""The math environment: prompts, references, and verification that no response can hang."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from attrs import evolve

from rlcore.run.episodes import EpisodeRunner
from rlcore.spi import ConfigError, DataError, EnvironmentContext, FinishReason, PluginError, Turn
from rlcore_math.config import MathConfig
from rlcore_math.mathematics import MathEnvironment
from rlcore_math.provider import MATH
from rlcore_math.verifier import Verifier

ONE_PROCESS = MathConfig(num_processes=1, verification_timeout_s=1.0)
ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


def environment(**options):
    return MathEnvironment(EnvironmentContext(seed=0), evolve(ONE_PROCESS, **options))


@pytest.fixture(scope="module")
def math_runner():
    runner = EpisodeRunner(environment(), 60.0)
    yield runner
    runner.close()


def turn(text):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


def prompt_of(row, **options):
    return asyncio.run(environment(**options).reset(row, 0)).observation


def test_it_brings_no_rows():
    assert environment().rows("train") is None
    assert environment().rows("evaluation") is None


def test_prompts_are_instructions_as_messages_or_text():
    row = {"prompt": "What is 6*7?", "answer": "#### 42"}
    text = "What is 6*7?\n\nReason step by step, and put the final answer within \\boxed{}."
    assert prompt_of(row).messages == [{"role": "user", "content": text}]
    assert prompt_of(row, prompt_format="text").text == text
    assert prompt_of(row, prompt_format="text", instruction="Q: {problem} A:").text == "Q: What is 6*7? A:"
    assert prompt_of(row, system_prompt="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "user", "content": "6*7?"}]
    assert prompt_of({**row, "prompt": own}).messages == own


@pytest.mark.parametrize(("answer", "state"), [("#### 42", "#### 42"), (42, "42"), (0.5, "0.5")])
def test_the_reference_is_the_rows_answer(answer, state):
    assert asyncio.run(environment().reset({"prompt": "?", "answer": answer}, 0)).state == state
    named = environment(answer_field="solution")
    assert asyncio.run(named.reset({"prompt": "?", "solution": answer}, 0)).state == state


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, r"answer_field: found only the fields 'prompt'; expected the answer in the row's field 'answer'"),
        ({"prompt": "?", "answer": " "}, "found ' '"),
        ({"prompt": "?", "answer": True}, "found True"),
        ({"prompt": "?", "answer": None}, "found None"),
        ({"question": "?", "answer": "1"}, "fields 'question', 'answer'; expected a prompt"),
    ],
)
def test_rows_without_an_answer_or_a_prompt(row, message):
    with pytest.raises(DataError, match=message):
        asyncio.run(environment().reset(row, 0))


def test_responses_are_scored(math_runner):
    results = math_runner.step_all(["#### 42"] * 3, [turn("\\boxed{42}"), turn("\\boxed{41}"), turn("I do not know")])
    assert [result.reward for result in results] == [1.0, 0.0, 0.0]
    assert [result.success for result in results] == [True, False, False]
    assert all(result.done for result in results)
    assert [result.metrics["answered"] for result in results] == [1.0, 1.0, 0.0]
    assert not any(result.metrics["verification_failed"] for result in results)


def test_an_endless_expression_is_wrong_counted_and_holds_up_no_other(math_runner):
    start = time.monotonic()
    results = math_runner.step_all(["42"] * 4, [turn("\\boxed{42}"), turn(ENDLESS), turn("\\boxed{42}"), turn("\\boxed{7}")])
    assert time.monotonic() - start < 15.0
    assert [result.reward for result in results] == [1.0, 0.0, 1.0, 0.0]
    assert [result.metrics["verification_failed"] for result in results] == [0.0, 1.0, 0.0, 0.0]


def test_a_reference_that_is_no_answer_is_an_error():
    with pytest.raises(DataError, match=r"found the reference answer 'none ####' \(answer\); expected a number, LaTeX"):
        asyncio.run(environment().step("none ####", turn("5")))


def test_a_verifier_serves_several_event_loops():
    shared = Verifier(num_processes=1, timeout_s=5.0, max_memory_mib=1024)
    assert [asyncio.run(shared.judge("1", "\\boxed{1}", require_boxed=False)) for _ in range(3)] == ["right"] * 3


def test_a_worker_that_is_killed_costs_no_verdict():
    killed = Verifier(num_processes=1, timeout_s=5.0, max_memory_mib=1024)
    assert asyncio.run(killed.judge("1", "\\boxed{1}", require_boxed=False)) == "right"
    worker = killed._idle.get()
    worker._process.kill()
    killed._idle.put(worker)
    assert asyncio.run(killed.judge("1", "\\boxed{1}", require_boxed=False)) == "right"


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="reads the limit from /proc")
def test_memory_is_limited():
    limited = Verifier(num_processes=1, timeout_s=5.0, max_memory_mib=777)
    asyncio.run(limited.judge("1", "1", require_boxed=False))
    with open(f"/proc/{limited._idle.get()._process.pid}/limits") as limits:
        assert f"Max data size             {777 * 2**20}" in limits.read()


def test_a_worker_that_does_not_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no grammar')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = Verifier(num_processes=1, timeout_s=5.0, max_memory_mib=1024)
    with pytest.raises(PluginError, match=r"(?s)worker 5\.0 1024\) does not start: .*ImportError: no grammar"):
        asyncio.run(broken.judge("1", "1", require_boxed=False))
    monkeypatch.delenv("PYTHONPATH")
    assert asyncio.run(broken.judge("1", "1", require_boxed=False)) == "right"


SCRIPT = """
import asyncio, sys
from rlcore_math.verifier import Verifier
verifier = Verifier(num_processes=1, timeout_s=2.0, max_memory_mib=1024)
asyncio.run(verifier.judge("1", "1", require_boxed=False))
print(verifier._idle.get()._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_run(sent):
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    worker = int(run.stdout.readline())
    run.send_signal(sent)
    run.wait(60)
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{worker}")
    run.stdin.close()
    run.stdout.close()


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"instruction": "Solve it."}, "instruction"),
        ({"prompt_format": "text", "system_prompt": "Be brief."}, "system_prompt"),
        ({"verification_timeout_s": 0.0}, "verification_timeout_s"),
        ({"num_processes": 0}, "num_processes"),
        ({"max_memory_mib": 1}, "max_memory_mib"),
    ],
)
def test_impossible_options_are_named(options, option):
    with pytest.raises(ConfigError, match=rf"environment\.math\.{option}: found"):
        environment(**options)


def test_the_provider_imports_nothing_heavy():
    script = (
        "import sys; from rlcore_math.provider import MATH, ARITHMETIC; "
        "print([name for name in ('math_verify', 'sympy', 'torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert MATH.config is MathConfig
    assert MATH.backend == "rlcore_math.mathematics:MathEnvironment"
    assert MATH.check == "rlcore_math.checks:check_math"
