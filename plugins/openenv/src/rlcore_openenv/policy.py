"""The policy, as an episode asks it: OpenAI's chat completions of its session."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlcore.spi import Message, RewardError, SessionEndpoint, fails_as

OK, BUSY, TOO_LONG = 200, 429, "context_length_exceeded"
RETRY_S = 1.0


class Policy:
    """Answers conversations within one session."""

    def __init__(self, http: aiohttp.ClientSession, session: SessionEndpoint) -> None:
        self._http = http
        self._session = session

    async def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the choice with the assistant's message that follows; None where the conversation has no room for one.
        RewardError where the request is refused."""
        body: dict[str, Any] = {"model": self._session.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        with fails_as("infrastructure"):
            return await self._answered(body)

    async def _answered(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        while True:
            status, text, retry_s = await self._post(body)
            if status == BUSY:
                await asyncio.sleep(retry_s)
                continue
            reply = json.loads(text)
            if status == OK:
                choice: dict[str, Any] = reply["choices"][0]
                return choice
            if reply["error"]["code"] == TOO_LONG:
                return None
            raise RewardError(f"the policy did not answer: status {status}: {reply['error']['message']}")

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, str, float]:
        headers = {"Authorization": f"Bearer {self._session.api_key}"}
        url = f"{self._session.base_url}/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            return response.status, await response.text(), float(response.headers.get("Retry-After", RETRY_S))
