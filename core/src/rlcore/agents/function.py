"""Agents that are functions of Python: where they are found, and what they are given."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rlcore.spi import ConfigError, PluginError, Problem, SessionEndpoint

AgentFunction: TypeAlias = Callable[[dict[str, Any], "AgentClient"], Awaitable[object]]


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
        """An openai.AsyncOpenAI of the policy, made where it is first used. PluginError where the package is missing."""
        if self._openai is None:
            try:
                from openai import AsyncOpenAI, DefaultAsyncHttpxClient
            except ImportError as error:
                raise PluginError("no package `openai`, whose client the agent uses. Install it: pip install openai") from error
            direct = DefaultAsyncHttpxClient(trust_env=False)  # past proxies: the session is on this machine
            self._openai = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=direct)
        return self._openai

    async def close(self) -> None:
        """Close the connections of the client that was made."""
        if self._openai is not None:
            await self._openai.close()


def load_function(path: str) -> AgentFunction:
    """Return the function that "agent.py:run" or "package.module:run" names. ConfigError where there is none that fits."""
    module, _, name = path.rpartition(":")
    try:
        found = getattr(_module(module), name)
    except (Exception, SystemExit) as error:  # whatever the agent's module raises, or a script that ends by itself
        raise _problem(f"{path!r}, which does not load ({type(error).__name__}: {error})") from error
    if not inspect.iscoroutinefunction(found):
        raise _problem(f"{path!r}, which is no `async def`")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise _problem(f"{path!r}, which does not take (task, client): {error}") from error
    function: AgentFunction = found
    return function


def place_in(function: AgentFunction, error: BaseException) -> str:
    """Return where in the function's own file an error passed last, as " at agent.py:12"; nothing where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = "" if code is None else code.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" at {Path(file).name}:{lines[-1]}" if lines else ""


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name).expanduser().resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what lies beside it
    spec = importlib.util.spec_from_file_location(f"rlcore_agent_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of their annotations
    spec.loader.exec_module(module)
    return module


def _problem(found: str) -> ConfigError:
    expected = '"FILE.py:FUNCTION" or "MODULE:FUNCTION", an `async def` of (task, client)'
    return ConfigError([Problem(path="environment.agent.function", found=found, expected=expected)])
