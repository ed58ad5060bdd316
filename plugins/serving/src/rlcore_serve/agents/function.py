"""Agents that are functions of Python: how they are called, and what they are given."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from rlcore.spi import PluginError, SessionEndpoint
from rlcore_workers.functions import FORM, load_fitting

AgentFunction: TypeAlias = Callable[[dict[str, Any], "AgentClient"], Awaitable[object]]
KEY = "environment.agent.function"
EXPECTED = f"{FORM}, an `async def` of (task, client)"


class AgentClient:
    """The policy, as an agent's function sees it."""

    def __init__(self, session: SessionEndpoint) -> None:
        self.base_url = session.base_url
        """OpenAI's API, for this episode alone."""
        self.api_key = session.api_key
        self.model = session.model
        """The name of the model, which each request has to have."""
        self._openai: Any = None

    @property
    def openai(self) -> Any:
        """An openai.AsyncOpenAI of the policy without a time-out, made where it is first used. PluginError where the package is
        missing."""
        if self._openai is None:
            try:
                from openai import AsyncOpenAI, DefaultAsyncHttpxClient
            except ImportError as error:
                raise PluginError(
                    "no package `openai`, whose client the agent uses. Install it: pip install 'rlcore[agents]'"
                ) from error
            direct = DefaultAsyncHttpxClient(trust_env=False)  # past proxies: the session is on this machine
            # The episode has its own time, of which the seconds that the generator is stopped are no part.
            self._openai = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=direct, timeout=None)
        return self._openai

    async def close(self) -> None:
        """Close the connections of the client that was made."""
        if self._openai is not None:
            await self._openai.close()


def load_agent(path: str) -> AgentFunction:
    """Return the function that "agent.py:run" or "package.module:run" names. ConfigError where there is none that fits."""
    function: AgentFunction = load_fitting(path, KEY, EXPECTED, 2, is_awaited=True)
    return function
