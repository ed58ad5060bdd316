"""Options of the environment `agent`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import Finite, FunctionText, Text, at_least


@frozen(kw_only=True)
class AgentConfig:
    """`[environment.agent]`: what runs an episode, a function or a command."""

    function: FunctionText | None = None
    """An `async def run(task, client)` that returns the episode's reward, as "agent.py:run" or "package.module:run". `task` is
    the row; `client` has `base_url`, `api_key`, `model`, and `openai`, an openai.AsyncOpenAI."""
    command: tuple[str, ...] = ()
    """A program with its arguments. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Its standard input
    has the task as JSON; so has RLCORE_TASK, up to 100 KiB. The last line that it prints is the reward."""
    pass_environment: tuple[Text, ...] = ()
    """Names of further environment variables of the run that a command gets. It always gets those that programs need, such as
    PATH, HOME and LANG. A function runs in the process of the run, and sees all variables."""
    max_concurrent: Annotated[int, at_least(1)] = 64
    """Most episodes at once."""
    success_reward: Finite = 1.0
    """The reward from which on a task counts as solved, where the agent itself does not say."""
