"""The HTTP client of a judge: it reads replies in limited time, and up to a limit of bytes."""

import asyncio
from collections.abc import AsyncIterator

import httpx

MAX_REPLY_BYTES = 16 * 2**20
"""Most bytes of a reply. A judge writes some thousand."""


def bounded_client(timeout_s: float) -> httpx.AsyncClient:
    """Return a client whose requests take, and whose replies' bodies take, at most so many seconds."""

    async def bound(response: httpx.Response) -> None:
        codings = response.headers.get_list("content-encoding", split_commas=True)
        if {one.strip().lower() for one in codings} & {"gzip", "deflate", "br", "zstd"}:  # a small reply may become a huge text
            raise httpx.DecodingError("found a compressed reply; expected a plain one, as the request says")
        response.stream = _BoundedBody(response.stream, timeout_s)

    return httpx.AsyncClient(
        timeout=timeout_s,
        limits=httpx.Limits(max_connections=None),
        follow_redirects=True,
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [bound]},
    )


class _BoundedBody(httpx.AsyncByteStream):
    def __init__(self, body: object, timeout_s: float) -> None:
        assert isinstance(body, httpx.AsyncByteStream)
        self._body, self._timeout_s = body, timeout_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        ends, num_bytes = asyncio.get_running_loop().time() + self._timeout_s, 0
        parts = aiter(self._body)
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise httpx.ReadTimeout(f"the reply had not come in {self._timeout_s:g} s") from error
            num_bytes += len(part)
            if num_bytes > MAX_REPLY_BYTES:
                raise httpx.ReadError(f"found a reply of more than {MAX_REPLY_BYTES:,} bytes")
            yield part

    async def aclose(self) -> None:
        """See AsyncByteStream."""
        await self._body.aclose()
