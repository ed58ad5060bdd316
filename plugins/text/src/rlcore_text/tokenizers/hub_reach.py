"""Checks whether a model is on this machine, or else the Hub in reach. The Hub's client would try for minutes."""

import asyncio
import socket
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from rlcore.config.model import ModelConfig
from rlcore.model_files import CONFIG_FILE
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import Problem
from rlcore_model_files.directory import is_hub_name

WAITS_S = (1.0, 2.0)
"""Pauses before another attempt where one fails at once, as while a name does not resolve for a moment."""
NO_CONNECTION = "no connection within {:g} s"
READ_S = 0.5
"""Seconds for an answer: one that is slow is no matter."""


def is_here(model: ModelConfig) -> bool:
    """Return whether the tokenizer is to be read from this machine: from the model's directory, or what was fetched from the
    Hub before. True too where there is neither and the path can be no name on the Hub."""
    return _is_no_name(model) or _is_fetched(model, "tokenizer_config.json")


def hub_problem(model: ModelConfig) -> Problem | None:
    """Return a problem where a model would have to be fetched and the Hub cannot be reached; it is asked once, for all
    files."""
    if _is_no_name(model) or _is_known(model):
        return None
    reason = why_unreachable()
    if reason is None:
        return None
    remedy = "Name a directory, or set HF_ENDPOINT to a mirror; HF_HUB_ETAG_TIMEOUT is how many seconds an answer may take."
    return Problem(
        path="model.path",
        found=f"{model.path!r}, which is no directory here, while the Hub cannot be reached ({reason})",
        expected="a model directory, or a name on a Hub that can be reached",
        remedy=_near(model.path) or remedy,
    )


def is_shown(model: ModelConfig) -> bool:
    """Return whether the Hub has shown a model: some of it was fetched, and the rest may be asked for."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _is_known(model)


def _is_known(model: ModelConfig) -> bool:
    return any(_is_fetched(model, name) for name in ("tokenizer_config.json", CONFIG_FILE))


def absent_remedy(path: str) -> str:
    """Return the remedy for a model that is neither here nor on the Hub."""
    from huggingface_hub import constants

    if near := _near(path):
        return near
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and what is missing was not fetched before: fetch it, or name a directory"
    return "Look for a slip in the name; a model that is private or gated needs HF_TOKEN, or: hf auth login"


def _near(path: str) -> str:
    there = expanded(path)
    return similar_path(there) if there.parent.is_dir() else ""


def _is_no_name(model: ModelConfig) -> bool:
    return expanded(model.path).exists() or not is_hub_name(model.path)


def _is_fetched(model: ModelConfig, name: str) -> bool:
    try:
        from transformers.utils import cached_file
    except ImportError:
        return True  # load_tokenizer says what is missing

    try:
        found = cached_file(
            model.path,
            name,
            revision=model.revision or "main",
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except OSError:  # no name that the Hub could have, such as a path; or a cache that cannot be read
        return False
    return found is not None


def why_unreachable() -> str | None:
    """Why no connection to the Hub comes about, through a proxy where one is set; None where one does, whatever it then says,
    and where HF_HUB_OFFLINE forbids to ask. Takes HF_HUB_ETAG_TIMEOUT seconds at most, 10 by default."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    limit_s, said = float(constants.HF_HUB_ETAG_TIMEOUT), SimpleQueue[str | None]()
    # A thread of its own: looking up a name has no limit.
    Thread(target=lambda: said.put(_asked(constants.ENDPOINT, limit_s)), name="hub-reach", daemon=True).start()
    try:
        reason = said.get(timeout=limit_s)
    except Empty:
        reason = NO_CONNECTION.format(limit_s)
    return None if reason is None else f"{constants.ENDPOINT}: {reason}"


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up in its own thread: Python waits at its end for the threads that asyncio takes for it."""

    async def getaddrinfo(self, host: Any, port: Any, **options: int) -> list[Any]:
        return socket.getaddrinfo(host, port, **options)


def _asked(endpoint: str, limit_s: float) -> str | None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(_ask(endpoint, limit_s))


async def _ask(endpoint: str, limit_s: float) -> str | None:
    """Ask the Hub as its own client would, but of all addresses of a host at once: one may lead nowhere."""
    from huggingface_hub import get_async_session

    reason = None
    for wait in (0.0, *WAITS_S):
        await asyncio.sleep(wait)
        try:
            async with get_async_session() as client:
                await client.head(endpoint, follow_redirects=False, timeout=(limit_s, READ_S, limit_s, limit_s))
        except Exception as error:
            # By name: the library of the Hub's client depends on its version. What comes of no URL, the client tells itself.
            match type(error).__name__:
                case "ConnectTimeout":
                    return NO_CONNECTION.format(limit_s)
                case "ConnectError" | "ProxyError":
                    reason = _innermost(error)
                case _:
                    return None
        else:
            return None
    return reason


def _innermost(error: BaseException) -> str:
    """Return what an error goes back to, in words."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
    return str(error) or type(error).__name__
