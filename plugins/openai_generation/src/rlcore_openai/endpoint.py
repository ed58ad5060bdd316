"""One endpoint: its requests, within its limits."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from attrs import define

from rlcore.secrets import masked
from rlcore_openai.errors import LostAnswerError, WrongAnswerError
from rlcore_openai.samples import CompletionRequest, Sample

AGAIN = (408, 409, 429)
"""Statuses besides 5xx that the same request may not meet again."""
SHOWN, READ = 300, 2**16
"""Limits of an endpoint's error text: characters in a message, and bytes that are searched for secrets."""
MAX_EVENT_BYTES = 64 * 2**20
"""Longest event of a stream, and longest list of models."""


@define(kw_only=True, eq=False)
class Endpoint:
    """One address of the API. All calls are made on one event loop."""

    url: str
    session: aiohttp.ClientSession
    key: str
    """Empty where none is shown."""
    timeout_s: float
    places: asyncio.Semaphore
    model: str = ""
    """The model's name at this endpoint."""
    num_under_way: int = 0
    """Samples asked for, those that wait for their place among them."""

    async def asked(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a reply: to a POST, without a body to a GET. LostAnswerError where a retry may help, else
        WrongAnswerError."""
        options = {} if body is None else {"json": body}
        async with self.places, self._answered("GET" if body is None else "POST", path, **options) as response:
            return json.loads(await _beginning(response, MAX_EVENT_BYTES))

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that it lists."""
        listed = await self.asked("/models")
        try:
            return [dict(card) for card in listed["data"]]
        except (KeyError, TypeError, ValueError) as error:
            raise WrongAnswerError(f"no list of models ({type(error).__name__}: {error})") from error

    async def complete(self, wanted: CompletionRequest, sample: Sample) -> None:
        """Fill a sample, token by token. LostAnswerError or WrongAnswerError where it does not come to its end."""
        async with self.places, self._answered("POST", "/completions", json=wanted.body(self.model)) as response:
            async for event in _events(response):
                if event.get("error") is not None:
                    raise LostAnswerError(self._excerpt(json.dumps(event["error"])))
                for choice in event.get("choices", ()):
                    sample.add(choice)
                    if sample.has_ended(wanted.max_tokens):
                        return
        raise LostAnswerError("the answer broke off")

    @asynccontextmanager
    async def _answered(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200. LostAnswerError where a retry may help, else WrongAnswerError."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        began = time.monotonic()
        try:
            async with self.session.request(
                method, self.url + path, headers=headers, timeout=limit, allow_redirects=False, **options
            ) as response:
                if response.status != 200:
                    text = (await _beginning(response, READ)).decode(errors="replace")
                    what = f"status {response.status}: {self._excerpt(text)}"
                    if response.status in AGAIN or response.status >= 500:
                        raise LostAnswerError(what, _retry_after(response))
                    raise WrongAnswerError(what)
                yield response
        except TimeoutError as error:
            raise LostAnswerError(f"no answer within {time.monotonic() - began:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LostAnswerError(self._excerpt(f"{type(error).__name__}: {error}")) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # no JSON, or of another form
            raise WrongAnswerError(self._excerpt(f"an answer of another form ({type(error).__name__}: {error})")) from error

    def _excerpt(self, text: str) -> str:
        """Return the beginning of an endpoint's text, with secrets masked: it may repeat the key."""
        return masked(text[:READ])[:SHOWN]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. A line may be long: some servers send an answer as one."""
    line = bytearray()
    async for piece in response.content.iter_any():
        for number, part in enumerate(piece.split(b"\n")):
            if number:  # the line before has ended
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                line.clear()
                if data and data != b"[DONE]":
                    yield json.loads(data)
            line += part
            if len(line) > MAX_EVENT_BYTES:
                raise WrongAnswerError(f"an event of more than {MAX_EVENT_BYTES:,} bytes")


async def _beginning(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The first bytes of a response, at most so many."""
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) >= most:
            break
    return bytes(found[:most])


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    try:
        seconds = float(response.headers["Retry-After"])
        return max(seconds, 0.0) if seconds == seconds else None  # NaN differs from itself
    except (KeyError, ValueError):
        return None
