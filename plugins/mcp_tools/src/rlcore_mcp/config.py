"""Options of the environment `mcp`."""

from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Finite, FunctionText, Positive, Seconds, Text
from rlcore_rewards.config import FunctionConfig

_AT_LEAST_ONE = Constraint("of one server at least", bool)


@frozen(kw_only=True)
class McpServerConfig:
    """`[environment.mcp.servers.NAME]`: a server, by its command or by its address."""

    command: tuple[Text, ...] = ()
    """A program with its arguments, which the run starts and speaks to over standard input and output."""
    url: str | None = None
    """The address of a server with streamable HTTP, such as "http://127.0.0.1:8000/mcp"; in place of `command`."""
    tools: tuple[Text, ...] = ()
    """Names of the tools that the policy gets. None named: all that the server lists."""
    pass_environment: tuple[Text, ...] = ()
    """Names of further environment variables of the run that the program gets. It always gets those that programs need, such
    as PATH, HOME and LANG."""
    api_key_env: str | None = None
    """The environment variable with the bearer token of the address; none where the server asks for none."""
    start_timeout_s: Seconds = 30.0
    """Most seconds until the server lists its tools."""
    call_timeout_s: Seconds = 30.0
    """Most seconds of one call."""


@frozen(kw_only=True)
class McpConfig:
    """`[environment.mcp]`: servers whose tools the policy calls, and the reward of its answer; prompts come from `[data]`."""

    servers: Annotated[Mapping[str, McpServerConfig], _AT_LEAST_ONE]
    """The servers, by names of your own. All episodes share them."""
    path: FunctionText | tuple[FunctionText, ...] = "rlcore_mcp.answers:exact_answer"
    """A function that rewards the last turn, or an array of several, as `environment.function.path`. It may also take
    `tool_calls`. The default returns 1 where the answer without thoughts equals the row's `answer`."""
    weights: Mapping[str, Finite] = field(factory=dict)
    """The weight of each part of the reward, as `environment.function.weights`."""
    system_prompt: str | None = None
    """A system message before a prompt that is a text."""
    success_reward: Finite = 1.0
    """The reward from which on a sample counts as solved, where no function says it."""
    pass_environment: tuple[Text, ...] = ()
    """Names of further environment variables of the run that the reward functions' processes get."""
    max_concurrent: Positive | None = None
    """Most calls of the environment at once, as `environment.function.max_concurrent`."""


def reward_config(config: McpConfig) -> FunctionConfig:
    """The options of the environment `function`, which rewards the last turn."""
    return FunctionConfig(
        prompt_format="chat",
        path=config.path,
        weights=config.weights,
        system_prompt=config.system_prompt,
        success_reward=config.success_reward,
        pass_environment=config.pass_environment,
        max_concurrent=config.max_concurrent,
    )
