"""Checks whether a model is on this machine, or else the Hub in reach. The Hub's client would try for minutes."""

import os
import selectors
import socket
import time
from contextlib import ExitStack
from threading import Event, Thread
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from rlcore.config.model import ModelConfig
from rlcore.model_files import CONFIG_FILE
from rlcore.schema.homes import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import Problem
from rlcore_model_files.directory import is_hub_name

WAITS_S = (1.0, 2.0)
"""Pauses before another attempt where one fails at once, as while a name does not resolve for a moment."""
LOOK_S = 0.05
"""Seconds between two looks at what is being tried."""
_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_Address: TypeAlias = tuple[str, int]


def is_here(model: ModelConfig) -> bool:
    """Whether the tokenizer is to be read from this machine: from the model's directory, or what was fetched
    from the Hub before. True too where there is neither and the path can be no name on the Hub."""
    return _is_no_name(model) or _is_fetched(model, "tokenizer_config.json")


def hub_problem(model: ModelConfig) -> Problem | None:
    """What is wrong where a model would have to be fetched and the Hub cannot be reached; it is asked once, for all files."""
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
    """Whether the Hub has shown a model: some of it was fetched, and the rest may be asked for."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _is_known(model)


def _is_known(model: ModelConfig) -> bool:
    return any(_is_fetched(model, name) for name in ("tokenizer_config.json", CONFIG_FILE))


def absent_remedy(path: str) -> str:
    """What to do about a model that is neither here nor came from the Hub."""
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
    """Why no connection to the Hub, or to the proxy that leads there, comes about; None where one does, whatever it then says
    and however slowly, and where HF_HUB_OFFLINE forbids to ask. Takes HF_HUB_ETAG_TIMEOUT seconds at most, 10 by default.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    ways = _ways(constants.ENDPOINT)
    if not ways:
        return None
    limit_s, said, is_reached = float(constants.HF_HUB_ETAG_TIMEOUT), dict[_Address, str](), Event()
    # Threads of their own: looking up a name has no limit.
    asking = [Thread(target=_ask, args=(way, limit_s, said, is_reached), name="hub-reach", daemon=True) for way in ways]
    until = time.monotonic() + limit_s
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking) and time.monotonic() < until:
        if is_reached.wait(LOOK_S):
            break
    if is_reached.is_set():
        return None
    host, port = ways[0]
    return f"{host}:{port}: {said[ways[0]]}" if ways[0] in said else f"{host}:{port} does not answer within {limit_s:g} s"


def _ask(way: _Address, limit_s: float, said: dict[_Address, str], is_reached: Event) -> None:
    reason = ""
    for wait in (0.0, *WAITS_S):
        time.sleep(wait)
        try:
            _connect(*way, limit_s)
        except TimeoutError:
            return
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:  # such as a name that no host can have
            reason = str(error)
        else:
            is_reached.set()
            return
    said[way] = reason


def _connect(host: str, port: int, limit_s: float) -> None:
    """Reach one address of a host; OSError where none can be. All are tried at once: one that does not answer, as where IPv6
    leads nowhere, would take the time of the others."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    until, code = time.monotonic() + limit_s, 0
    with ExitStack() as opened, selectors.DefaultSelector() as under_way:
        for family, kind, protocol, _, address in found:
            try:
                connection = opened.enter_context(socket.socket(family, kind, protocol))
                connection.setblocking(False)
                connection.connect(address)
            except BlockingIOError:
                under_way.register(connection, selectors.EVENT_WRITE, connection)
            except OSError as error:  # such as no way to any address of IPv6
                code = error.errno or code
            else:
                return
        while under_way.get_map():
            ready = under_way.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                connection = under_way.unregister(key.fileobj).data
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    return
    raise OSError(code, os.strerror(code))


def _ways(endpoint: str) -> list[_Address]:
    """Host and port of the first machine on the way to an endpoint, the likely one first: what is said in `no_proxy`, the Hub's
    client reads otherwise than Python does. None of what is no URL, of which the client tells."""
    try:
        parts, proxies = urlsplit(endpoint), getproxies()
        straight = _address(parts)
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if straight is None or not proxy:
            return [] if straight is None else [straight]
        through = _address(urlsplit(proxy if "://" in proxy else f"http://{proxy}"))
    except ValueError:  # such as a port that is no number, as a password's # makes it
        return []
    if through is None or "no" not in proxies:
        return [] if through is None else [through]
    return [straight, through] if proxy_bypass(":".join(map(str, straight))) else [through, straight]


def _address(parts: SplitResult) -> _Address | None:
    return None if parts.hostname is None else (parts.hostname, parts.port or _PORTS.get(parts.scheme, 443))
