"""Whether a model is on this machine, or the Hugging Face Hub in reach: its own client tries each file for half a minute."""

import socket
import time
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlcore.config.model import ModelConfig
from rlcore.model_files import CONFIG_FILE, is_hub_name
from rlcore.schema.homes import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import Problem

WAITS_S = (1.0, 2.0)
"""Pauses before another attempt where one fails at once, as while a name does not resolve for a moment."""
_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


def is_here(model: ModelConfig) -> bool:
    """Whether the tokenizer is to be read from this machine: from the model's directory, or what was fetched
    from the Hub before. True too where there is neither and the path can be no name on the Hub."""
    return _is_no_name(model) or _is_fetched(model, "tokenizer_config.json")


def hub_problem(model: ModelConfig) -> Problem | None:
    """What is wrong where a model would have to be fetched and the Hub cannot be reached; it is asked once, for all files."""
    if _is_no_name(model) or any(_is_fetched(model, name) for name in ("tokenizer_config.json", CONFIG_FILE)):
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


def absent_remedy(path: str) -> str:
    """What to do about a model that is neither here nor came from the Hub."""
    from huggingface_hub import constants

    if near := _near(path):
        return near
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and nothing of it was fetched before: fetch it, or name a directory"
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

    found = cached_file(
        model.path,
        name,
        revision=model.revision or "main",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found is not None


def why_unreachable() -> str | None:
    """Why no connection to the Hub, or to the proxy that leads there, comes about; None where one does, whatever it then says
    and however slowly, and where HF_HUB_OFFLINE forbids to ask. Takes HF_HUB_ETAG_TIMEOUT seconds at most, 10 by default.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    host, port = _address(constants.ENDPOINT)
    limit_s, said = float(constants.HF_HUB_ETAG_TIMEOUT), ["no connection"]

    def connect() -> None:
        for wait in (0.0, *WAITS_S):
            time.sleep(wait)
            try:
                socket.create_connection((host, port), timeout=limit_s).close()
            except OSError as error:
                said[:] = [error.strerror or str(error)]
            else:
                said.clear()
                return

    # A thread of its own: neither looking up a name nor trying each of its addresses has a limit for the whole.
    asking = Thread(target=connect, name="hub-reach", daemon=True)
    asking.start()
    asking.join(limit_s)
    if asking.is_alive():
        return f"{host}:{port} does not answer within {limit_s:g} s"
    return f"{host}:{port}: {said[0]}" if said else None


def _address(endpoint: str) -> tuple[str, int]:
    """Host and port of the first machine on the way to an endpoint."""
    parts = urlsplit(endpoint)
    proxies, host = getproxies(), parts.hostname or ""
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(host):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443)
