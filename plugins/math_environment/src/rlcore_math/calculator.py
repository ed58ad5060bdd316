"""The environment `calculator`: problems that the policy works out with a tool."""

from collections.abc import Sequence
from typing import Any

from rlcore.spi import (
    ConfigError,
    DataError,
    EnvironmentContext,
    Message,
    Observation,
    ResetResult,
    Row,
    StepResult,
    Tool,
    ToolCall,
    Turn,
)
from rlcore.thoughts import without_thoughts
from rlcore_math.checks import check_calculator
from rlcore_math.config import CalculatorConfig
from rlcore_math.expressions import evaluate
from rlcore_math.problems import ProblemSpace, problem_rows

CALCULATOR: Tool = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an expression of numbers with + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class CalculatorEnvironment:
    """Two turns at least: the policy calls the calculator, reads the result, and answers with nothing but a number.

    An answer counts only where the calculator was used before it. The state is the right answer, and whether it was.
    """

    def __init__(self, context: EnvironmentContext, config: CalculatorConfig) -> None:  # noqa: ARG002
        if problems := check_calculator(None, config):
            raise ConfigError(problems)
        self._config = config
        self._space = ProblemSpace(config)

    def rows(self, split: str) -> Sequence[Row]:
        """Problems of "train" or "evaluation", with the fields prompt, answer and completion."""
        return problem_rows(self._space, split, "text")

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """The problem as a user's message, and the tool."""
        prompt, answer = row.get("prompt"), row.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str):
            fields = ", ".join(map(repr, row))
            raise DataError(f"found a row with the fields {fields}; expected a prompt and its answer, both as text")
        system = self._config.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        observation = Observation(messages=[*messages, {"role": "user", "content": prompt}], tools=[CALCULATOR])
        return ResetResult(observation=observation, state=(answer, False))

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """The results of a turn's calls; or, of a turn without any, what the answer earns."""
        answer, used = state
        if not turn.tool_calls:
            said = without_thoughts(turn.content, is_thinking=turn.begins_in_thought).strip()
            right = used and said == answer
            reward = (1.0 - self._config.call_reward) if right else 0.0
            return StepResult(
                reward=reward,
                done=True,
                success=right,
                reward_components={"answer": reward},
                metrics={"used_calculator": float(used)},
            )
        results = [_result(call) for call in turn.tool_calls]
        works = any(is_value for _, is_value in results)
        reward = self._config.call_reward if works and not used else 0.0
        return StepResult(
            reward=reward,
            done=False,
            reward_components={"call": reward},
            observation=Observation(messages=[message for message, _ in results]),
            state=(answer, used or works),
            metrics={"readable_calls": sum(call.error is None for call in turn.tool_calls) / len(turn.tool_calls)},
        )


def _result(call: ToolCall) -> tuple[Message, bool]:
    """The tool's answer to a call, and whether it is a value."""
    try:
        if call.error is not None:
            raise ValueError(call.error)
        if call.name != "calculator":
            raise ValueError(f"there is no tool {call.name!r:.60}, only 'calculator'")
        expression = call.arguments.get("expression")
        if not isinstance(expression, str):
            raise ValueError("expected the argument 'expression', a text")
        content, is_value = evaluate(expression), True
    except ValueError as error:
        content, is_value = f"error: {error}", False
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}, is_value
