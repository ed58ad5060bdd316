"""The environment `mcp`: the policy calls the tools of MCP servers, and its answer is rewarded by functions."""

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from rlcore.spi import (
    ConfigError,
    DataError,
    EnvironmentContext,
    Message,
    Observation,
    Problem,
    ResetResult,
    Row,
    StepResult,
    ToolCall,
    Turn,
    fails_as,
)
from rlcore_mcp.check import check
from rlcore_mcp.config import McpConfig, reward_config
from rlcore_mcp.connection import ToolResult
from rlcore_mcp.servers import McpServers
from rlcore_rewards.environment import FunctionBackend

TOOLS, TOOL_CALLS = "tools", "tool_calls"


class McpEnvironment:
    """An episode's turns call tools; a turn without a call is the answer, which the environment `function` rewards.

    The state is the row and, in its field `tool_calls`, the calls so far with their results.
    """

    def __init__(self, context: EnvironmentContext, config: McpConfig) -> None:
        if problems := [found for found in check(None, config) if isinstance(found, Problem)]:
            raise ConfigError(problems)
        self._rewards = FunctionBackend(context, reward_config(config))
        self._servers = McpServers(config.servers)

    def rows(self, split: str) -> Sequence[Row] | None:  # noqa: ARG002
        """Return None: prompts come from the recipe's data."""
        return None

    async def reset(self, row: Row, seed: int) -> ResetResult:
        """The row's prompt as messages, and the servers' tools. DataError for a row with tools of its own."""
        if own := [name for name in (TOOLS, TOOL_CALLS) if name in row]:
            raise DataError(f"found a row with {' and '.join(map(repr, own))}; expected none: the servers bring the tools")
        with fails_as("tool"):
            tools = await self._servers.tools()
        state = {**row, TOOL_CALLS: []}
        reset = await self._rewards.reset({**state, TOOLS: tools}, seed)
        return evolve(reset, state=state)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """The results of a turn's calls, in their order; or, of a turn without any, the reward of the answer."""
        if not turn.tool_calls:
            scored = await self._rewards.step(state, turn)
            return evolve(scored, metrics={**scored.metrics, "calls_per_episode": float(len(state[TOOL_CALLS]))})
        messages: list[Message] = []
        calls: list[dict[str, Any]] = []
        for call in turn.tool_calls:
            result = await self._result(call)
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.text})
            calls.append(
                {"name": call.name, "arguments": dict(call.arguments), "content": result.text, "is_error": result.is_error}
            )
        num_errors = sum(call["is_error"] for call in calls)
        return StepResult(
            reward=0.0,
            done=False,
            observation=Observation(messages=messages),
            state={**state, TOOL_CALLS: [*state[TOOL_CALLS], *calls]},
            metrics={"tool_error": num_errors / len(calls)},
        )

    def close(self) -> None:
        """End the servers and the reward functions' processes; the next call starts others."""
        try:
            self._servers.close()
        finally:
            self._rewards.close()

    async def _result(self, call: ToolCall) -> ToolResult:
        if call.error is not None:
            return ToolResult(text=f"error: {call.error}", is_error=True)
        with fails_as("tool"):
            return await self._servers.call(call.name, call.arguments)
