"""The environment `code`: problems from a data set, answered by Python programs that are run against tests."""

from collections.abc import Sequence
from typing import Any

from rlcore import spi
from rlcore_code.cases import read_cases
from rlcore_code.checks import check_code
from rlcore_code.config import PROBLEM, CodeConfig
from rlcore_code.fences import last_program
from rlcore_code.judge import Judge, Verdict
from rlcore_code.sandbox import Sandbox


class CodeEnvironment:
    """One turn an episode: 1.0 where the program in the last code block passes all tests."""

    def __init__(self, context: spi.EnvironmentContext, config: CodeConfig) -> None:  # noqa: ARG002
        if problems := [found for found in check_code(None, config) if isinstance(found, spi.Problem)]:
            raise spi.ConfigError(problems)
        self._config = config
        self._sandbox = Sandbox(config)

    def rows(self, split: str) -> Sequence[spi.Row] | None:  # noqa: ARG002
        """None: the rows come from `[data]`."""
        return None

    async def reset(self, row: spi.Row, seed: int) -> spi.ResetResult:  # noqa: ARG002
        """The instruction with the row's prompt in it; the tests are the state."""
        if "prompt" not in row:
            raise spi.DataError(f"found a row with the fields {', '.join(map(repr, row))}; expected a prompt")
        return spi.ResetResult(observation=self._observation(row), state=read_cases(row, self._config))

    async def step(self, state: Any, turn: spi.Turn) -> spi.StepResult:
        """1.0, `partial_credit` of what has been passed, or 0.0. PluginError where programs cannot be run."""
        program = last_program(turn.text, is_thinking=turn.begins_in_thought or self._config.thought_in_prompt)
        if program is None:
            return spi.StepResult(reward=0.0, done=True, metrics={"answered": 0.0})
        credit = self._config.partial_credit
        judge = Judge(self._sandbox, self._config.wall_time_s, to_the_end=credit > 0)
        with spi.fails_as("grader"):
            verdict = await judge.judge(program, state)
        right = verdict.num_passed == len(state)
        return spi.StepResult(
            reward=1.0 if right else credit * verdict.num_passed / len(state),
            done=True,
            success=right,
            metrics={
                "answered": 1.0,
                "program_timed_out": float(verdict.timed_out),
                "answered_object": float(verdict.answered_object),
            },
            failure=_failure(verdict),
        )

    def _observation(self, row: spi.Row) -> spi.Observation:
        prompt = row["prompt"]
        instruction = self._config.instruction.replace(PROBLEM, prompt) if isinstance(prompt, str) else prompt
        form, system = self._config.prompt_format, self._config.system_prompt
        return spi.Observation.of_prompt(instruction, prompt_format=form, system_prompt=system, tools=row.get("tools"))


def _failure(verdict: Verdict) -> spi.EpisodeFailure | None:
    if verdict.is_lost:
        return spi.EpisodeFailure(kind="infrastructure", reason="the sandbox of its program did not end in time")
    reason = "its program ran longer than environment.code.cpu_time_s or wall_time_s"
    return spi.EpisodeFailure(kind="policy", reason=reason) if verdict.timed_out else None
