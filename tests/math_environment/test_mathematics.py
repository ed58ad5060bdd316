"""The math environment: prompts, references, and verification that no response can hang."""

import asyncio
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from attrs import evolve

from rlcore.spi import (
    ConfigError,
    DataError,
    EnvironmentContext,
    FinishReason,
    RewardError,
    Turn,
)
from rlcore_math.config import MathConfig
from rlcore_math.mathematics import MathEnvironment
from rlcore_math.provider import MATH
from rlcore_math.verifier import Verifier
from rlcore_rollout.environment_runner import EpisodeRunner

ONE_PROCESS = MathConfig(num_processes=1, verification_timeout_s=1.0, max_memory_mib=2047)
SYMBOLIC = "2^{10}"
"""A reference that an answer need not be worked out for, so that it is computed, however long that takes."""
ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


def environment(**options):
    return MathEnvironment(EnvironmentContext(seed=0), evolve(ONE_PROCESS, **options))


@pytest.fixture(scope="module")
def shared():
    """An environment whose process, which takes seconds to start, serves many tests."""
    return environment()


@pytest.fixture(scope="module")
def math_runner(shared):
    runner = EpisodeRunner(shared, 60.0)
    yield runner
    runner.close()


def turn(text, **options):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP, **options)


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
    shown = prompt_of({**row, "prompt": own, "tools": ({},)})
    assert (shown.messages, shown.tools) == (own, ({},))


@pytest.mark.parametrize(
    ("answer", "state"),
    [("#### 42", "#### 42"), (42, "42"), (0.5, "0.5"), (42.0, "42"), (1e16, str(10**16)), (0.1 + 0.2, "0.3"), (5e-05, "5e-05")],
)
def test_the_reference_is_the_rows_answer(answer, state):
    assert asyncio.run(environment().reset({"prompt": "?", "answer": answer}, 0)).state == state
    named = environment(answer_field="solution")
    assert asyncio.run(named.reset({"prompt": "?", "solution": answer}, 0)).state == state
    nested = environment(answer_field="reward_model.ground_truth")
    for row in ({"reward_model": {"ground_truth": answer}}, {"reward_model.ground_truth": answer, "reward_model": 0}):
        assert asyncio.run(nested.reset({"prompt": "?", **row}, 0)).state == state


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, r"answer_field: found only the fields 'prompt'; expected the answer in the row's field 'answer'"),
        ({"prompt": "?", "answer": " "}, "found ' '"),
        ({"prompt": "?", "answer": True}, "found True"),
        ({"prompt": "?", "answer": None}, "found None"),
        ({"prompt": "?", "answer": float("nan")}, "found nan"),
        ({"prompt": "?", "answer": float("inf")}, "found inf"),
        ({"prompt": "?", "answer": "NaN"}, "found 'NaN'"),
        ({"question": "?", "answer": "1"}, "fields 'question', 'answer'; expected a prompt"),
    ],
)
def test_rows_without_an_answer_or_a_prompt(row, message):
    with pytest.raises(DataError, match=message):
        asyncio.run(environment().reset(row, 0))


@pytest.mark.parametrize("answer", [5e-05, 1e16, 1e-07, 0.1 + 0.2])
def test_numbers_of_any_size_can_be_right(math_runner, answer):
    [reset] = math_runner.reset_all([{"prompt": "?", "answer": answer}], [0])
    right, zero = math_runner.step_all([reset.state] * 2, [turn(f"\\boxed{{{answer:.8f}}}"), turn("\\boxed{0}")])
    assert (right.success, zero.success) == (True, False)


@pytest.mark.parametrize("by_option", [True, False])
def test_an_answer_counts_behind_the_thought_that_the_prompt_began(by_option):
    runner = EpisodeRunner(environment(thought_in_prompt=by_option), 60.0)
    said = ("\\boxed{5}", "\\boxed{6}</think>\\boxed{5}", "<think>\\boxed{5}")
    results = runner.step_all(["5"] * 3, [turn(text, begins_in_thought=not by_option) for text in said])
    runner.close()
    assert [result.reward for result in results] == [0.0, 1.0, 0.0]


def test_responses_are_scored(math_runner):
    results = math_runner.step_all(["#### 42"] * 3, [turn("\\boxed{42}"), turn("\\boxed{41}"), turn("I do not know")])
    assert [result.reward for result in results] == [1.0, 0.0, 0.0]
    assert [result.success for result in results] == [True, False, False]
    assert all(result.done for result in results)
    assert [result.metrics["answered"] for result in results] == [1.0, 1.0, 0.0]
    assert not any(result.metrics["verification_failed"] for result in results)


def test_an_endless_expression_is_wrong_counted_and_holds_up_no_other(math_runner):
    answers = ["\\boxed{42}", ENDLESS, "\\boxed{42}", "\\boxed{7}"]
    results = math_runner.step_all(["42", SYMBOLIC, "42", "42"], [turn(answer) for answer in answers])
    assert [result.reward for result in results] == [1.0, 0.0, 1.0, 0.0]
    assert [result.metrics["verification_timed_out"] for result in results] == [0.0, 1.0, 0.0, 0.0]
    assert not any(result.metrics["verification_failed"] for result in results)


def test_a_reference_that_is_no_answer_is_an_error(shared):
    with pytest.raises(DataError, match=r"'none ####' \(answer\)"):
        asyncio.run(shared.step("none ####", turn("5")))


def test_a_verifier_serves_several_event_loops(shared):
    assert [asyncio.run(shared.step("1", turn("\\boxed{1}"))).success for _ in range(3)] == [True] * 3


class CountedCalls(MathEnvironment):
    """Counts the calls that are at work at the same time."""

    at_work = most_at_work = 0

    async def step(self, state, turn):
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            return await super().step(state, turn)
        finally:
            self.at_work -= 1


def test_rewards_do_not_depend_on_how_many_slow_answers_are_judged_beside_them():
    """A call's time begins once a process is free for it: no more calls are at work than there are processes."""
    config = evolve(ONE_PROCESS, num_processes=2, verification_timeout_s=0.1)
    made = CountedCalls(EnvironmentContext(seed=0), config)
    runner = EpisodeRunner(made, 600.0, max_concurrent=MATH.max_concurrent(config))
    slow = [index % 5 != 4 for index in range(20)]
    results = runner.step_all(
        [SYMBOLIC if late else "42" for late in slow], [turn(ENDLESS if late else "\\boxed{42}") for late in slow]
    )
    assert [result.success for result in results] == [not late for late in slow]
    assert [bool(result.metrics["verification_timed_out"]) for result in results] == slow
    assert made.most_at_work == 2
    runner.close()


def test_as_many_processes_as_cores_unless_the_recipe_says(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert MATH.max_concurrent(MathConfig()) == 7
    assert MATH.max_concurrent(MathConfig(num_processes=3)) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(256)))
    assert MATH.max_concurrent(MathConfig()) == 32


def the_process():
    """The only one of ONE_PROCESS, by its limits."""
    [process] = [each for each in psutil.Process().children() if each.cmdline()[-1:] == ["math-1s-2047MiB"]]
    return process


@pytest.mark.parametrize("of", ["the worker", "its child"])
def test_a_process_that_is_killed_costs_no_verdict(of, shared):
    assert asyncio.run(shared.step("1", turn("\\boxed{1}"))).success
    process = the_process()
    (process if of == "the worker" else process.children()[0]).kill()
    assert asyncio.run(shared.step("1", turn("\\boxed{1}"))).success
    assert (the_process().pid == process.pid) is (of == "its child")


def test_a_machine_that_kills_what_judges_gives_no_reward(monkeypatch):
    made = environment()

    async def killed(*_, **__):
        return "killed"

    monkeypatch.setattr(Verifier, "judge", killed)
    with pytest.raises(RewardError, match="killed from outside"):
        asyncio.run(made.step("1", turn("1")))


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="reads the limit from /proc")
def test_memory_is_limited(shared):
    asyncio.run(shared.step("1", turn("1")))
    [child] = the_process().children()
    with open(f"/proc/{child.pid}/limits") as limits:
        assert f"Max data size             {2047 * 2**20}" in limits.read()


@pytest.mark.parametrize(
    ("options", "option", "found"),
    [
        ({"instruction": "Solve it."}, "instruction", "'Solve it.'"),
        ({"prompt_format": "text", "system_prompt": "Be brief."}, "system_prompt", "a text"),
    ],
)
def test_impossible_options_are_named(options, option, found):
    with pytest.raises(ConfigError) as raised:
        environment(**options)
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [(f"environment.math.{option}", found)]


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
