"""Whether the loss that an algorithm names is there: what is wrong with it is the algorithm's, not the trainer's."""

import pkgutil
import sys
from functools import lru_cache
from importlib.util import find_spec

from rlcore.spi.errors import ContractError


def check_loss_path(path: object) -> None:
    """Raise ContractError where a path has the wrong form, or names a module that is not installed here. Nothing heavy is
    imported: the packages above the module are, and the module itself only where the loss is computed."""
    if not isinstance(path, str) or not all(path.partition(":")):
        raise ContractError(f"loss.path: found {path!r}; expected 'package.module:function'")
    module = path.partition(":")[0]
    if not _is_installed(module):
        raise ContractError(f"loss.path: found {path!r}, but there is no module {module!r}; expected one that can be imported")


@lru_cache
def _is_installed(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require_loss(path: str) -> None:
    """Import a loss where it is computed; ContractError where there is no such function."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ContractError(f"the loss {path!r}, which the algorithm names, cannot be imported: {error}") from error
    if not callable(found):
        raise ContractError(f"the loss {path!r}, which the algorithm names, is a {type(found).__name__}; expected a function")
