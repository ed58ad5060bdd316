"""The environment `math`: problems from a data set, answers checked by math-verify."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rlcore import spi
from rlcore.thoughts import without_thoughts
from rlcore_math.checks import check_math
from rlcore_math.config import PROBLEM, MathConfig, num_processes
from rlcore_math.verifier import Verifier

UNCHECKED = {
    "too_slow": "its answer took more processor time to check than environment.math.verification_timeout_s",
    "failed": "its answer ended the process that checked it",
}
"""Verdicts on answers that cost too much to check, in words: whatever the machine does, these earn nothing."""


class MathEnvironment:
    """One turn an episode: 1.0 where its answer equals the reference's mathematically, else 0.0."""

    def __init__(self, context: spi.EnvironmentContext, config: MathConfig) -> None:  # noqa: ARG002
        if problems := check_math(None, config):
            raise spi.ConfigError(problems)
        self._config = config
        self._verifier = Verifier(
            num_processes=num_processes(config), timeout_s=config.verification_timeout_s, max_memory_mib=config.max_memory_mib
        )

    def rows(self, split: str) -> Sequence[spi.Row] | None:  # noqa: ARG002
        """None: the rows come from `[data]`."""
        return None

    async def reset(self, row: spi.Row, seed: int) -> spi.ResetResult:  # noqa: ARG002
        """The instruction with the row's prompt in it; the reference answer is the state."""
        if "prompt" not in row:
            raise spi.DataError(f"found a row with the fields {', '.join(map(repr, row))}; expected a prompt")
        return spi.ResetResult(observation=self._observation(row), state=self._reference(row))

    async def step(self, state: Any, turn: spi.Turn) -> spi.StepResult:
        """1.0 or 0.0. DataError where the reference is no answer; RewardError where the process that checks was killed."""
        response = without_thoughts(turn.text, is_thinking=turn.begins_in_thought or self._config.thought_in_prompt)
        with spi.fails_as("grader"):
            verdict = await self._verifier.judge(state, response, require_boxed=self._config.require_boxed)
        if verdict == "unreadable_reference":
            field = self._config.answer_field
            raise spi.DataError(
                f"found the reference answer {state!r:.200} ({field}); expected a number, LaTeX, or one after ####"
            )
        if verdict == "killed":
            with spi.fails_as("infrastructure"):
                raise spi.RewardError(
                    "the process that checks the response was killed from outside, again and again: look whether the machine "
                    "runs out of memory, and lower environment.math.num_processes or max_memory_mib"
                )
        right = verdict == "right"
        metrics = {
            "answered": float(verdict in ("right", "wrong")),
            "verification_timed_out": float(verdict == "too_slow"),
            "verification_failed": float(verdict == "failed"),
        }
        reason = UNCHECKED.get(verdict)
        failure = None if reason is None else spi.EpisodeFailure(kind="policy", reason=reason)
        return spi.StepResult(reward=float(right), done=True, success=right, metrics=metrics, failure=failure)

    def close(self) -> None:
        """End the processes that check answers; the next call starts others."""
        self._verifier.close()

    def _observation(self, row: spi.Row) -> spi.Observation:
        prompt = row["prompt"]
        instruction = self._config.instruction.replace(PROBLEM, prompt) if isinstance(prompt, str) else prompt
        form, system = self._config.prompt_format, self._config.system_prompt
        return spi.Observation.of_prompt(instruction, prompt_format=form, system_prompt=system, tools=row.get("tools"))

    def _reference(self, row: spi.Row) -> str:
        name = self._config.answer_field
        answer = value_at(row, name)
        if isinstance(answer, (int, float)) and not isinstance(answer, bool) and isfinite(answer):
            # A float as it was meant: 0.1 + 0.2 is 0.3.
            return str(int(answer)) if answer == int(answer) else f"{answer:.15g}"
        if not isinstance(answer, str) or answer.strip().casefold() in ("", "nan"):
            found = f"{answer!r:.60}" if name in row or answer is not None else f"only the fields {', '.join(map(repr, row))}"
            raise spi.DataError(
                f"environment.math.answer_field: found {found}; expected the answer in the row's field {name!r}"
            )
        return answer


def value_at(row: spi.Row, path: str) -> Any:
    """Return the value of a row's field, or of a field in a struct, such as "reward_model.ground_truth"; None without one."""
    value: Any = row
    for name in (path,) if path in row else path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
