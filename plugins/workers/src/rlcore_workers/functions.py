"""Load functions that a user names as "file.py:function" or "package.module:function", and find the line that failed."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from rlcore.schema.file_limits import MAX_BYTES, expanded, require_file
from rlcore.spi import ConfigError, Problem, RewardError
from rlcore.time_limit import loading

Function: TypeAlias = Callable[..., Any]

FORM = '"FILE.py:FUNCTION" or "MODULE:FUNCTION"'
_TIMES = 10.0
"""Multiple of the usual time limit for an import of a user's module, which may load models."""
_FILES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
"""Loaded modules by their file, with the file's time and size. Functions of one file share a module; a changed file loads
anew."""


class _FromSource(SourceFileLoader):
    """Reads no bytecode: Python takes that of an earlier text of equal size from the same second."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"no bytecode is kept of {path}")


def load_function(path: str, key: str, expected: str = FORM) -> Function:
    """Return the function that a path names. ConfigError under `key` where nothing callable is found there."""
    module, _, name = path.rpartition(":")
    try:
        with loading(module, _TIMES):
            found = getattr(_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module raises, or a script that ends by itself
        where = _place_in(os.path.realpath(expanded(module)), error) if module.endswith(".py") else ""
        what = f"{path!r}, which does not load ({type(error).__name__}{where}: {error})"
        raise ConfigError([Problem(path=key, found=what, expected=expected)]) from error
    if not callable(found):
        raise ConfigError([Problem(path=key, found=f"{path!r}, which is no function", expected=expected)])
    function: Function = found
    return function


def load_fitting(path: str, key: str, expected: str, num_arguments: int, *, is_awaited: bool = False) -> Function:
    """Return the function that a path names, which takes so many arguments and is an `async def` where it is awaited alone.
    ConfigError under `key` where there is none."""
    function = load_function(path, key, expected)
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError) as error:
        found = f"{path!r}: {error}"
    else:
        if is_async(function) == is_awaited:
            return function
        found = f"{path!r}, which is {'no' if is_awaited else 'an'} `async def`"
    raise ConfigError([Problem(path=key, found=found, expected=expected)])


def call(function: Function, key: str, *arguments: object) -> Any:
    """Return what a function returns that a recipe names under `key`. RewardError where it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        raise RewardError(f"{key} raised {type(error).__name__}{place_in(function, error)}: {error}") from error


def is_async(function: Function) -> bool:
    """Return whether a call of a function, or of an object with `__call__`, has to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def place_in(function: Function, error: BaseException) -> str:
    """Return where in the function's own file an error passed last, as " at agent.py:12"; nothing where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = "" if code is None else code.co_filename
    return _place_in(file, error)


def brief(value: object) -> str:
    """The beginning of a value's repr."""
    return f"{value!r:.80}"


def _place_in(file: str, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" at {Path(file).name}:{lines[-1]}" if lines else ""


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(os.path.realpath(expanded(name)))
    require_file(file, MAX_BYTES)
    status = file.stat()
    version = (status.st_mtime_ns, status.st_size)
    known = _FILES.get(file)
    if known is not None and known[0] == version:
        return known[1]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what lies beside it
    name = f"rlcore_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of their annotations
    spec.loader.exec_module(module)
    _FILES[file] = (version, module)
    return module
