"""The policy, as environments of `verifiers` ask it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from verifiers import OpenAIChatCompletionsClient, OverlongPromptError

from rlcore.spi import SessionEndpoint

TOO_LONG = "context_length_exceeded"
"""The code of a session's refusal of a prompt that leaves no room for an answer."""


class PolicyClient(OpenAIChatCompletionsClient):
    """Chat completions of a session; a prompt that is too long ends the episode as `verifiers` ends it."""

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        """The session's answer."""
        try:
            return await super().get_native_response(*args, **kwargs)
        except BadRequestError as error:
            if error.code == TOO_LONG:
                raise OverlongPromptError(error.message) from error
            raise


@asynccontextmanager
async def policy_client(session: SessionEndpoint) -> AsyncIterator[PolicyClient]:
    """A client of a session, whose connections are closed at the end."""
    direct = DefaultAsyncHttpxClient(trust_env=False)  # past proxies: the session is on this machine
    # The episode has its own time, of which the seconds that the generator is stopped are no part.
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=direct, timeout=None) as client:
        yield PolicyClient(client)
