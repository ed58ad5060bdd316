"""Errors of requests, in the forms that the client reads."""

from collections.abc import Sequence
from typing import Any, Literal

from rlcore import spi
from rlcore.schema.problem import ProblemsError

Category = Literal["user", "server"]
MAX_PROBLEMS = 20
"""Most problems of one request that a message lists."""
USER_ERRORS = (ProblemsError, spi.ContractError, spi.NonFiniteError, spi.BoundError, spi.DataError, spi.CheckpointError)
"""Errors of the session that a request caused."""


class RequestError(Exception):
    """A request that the server refuses: as an HTTP status at once, or as the result of its future."""

    def __init__(self, message: str, *, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status, 400 or above, where the request has no future."""
        self.category = category

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the error: RequestFailedResponse of the client."""
        return {"error": str(self), "category": self.category}


def refuse(problems: Sequence[str]) -> None:
    """Raise one RequestError for all problems, or for the first of many; nothing where there is none."""
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise RequestError("\n".join([*problems[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]))


def as_request_error(error: BaseException) -> RequestError:
    """Return the error of a request that failed with `error`: the user's where the request caused it, else the server's."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, spi.RlcoreError):
        return RequestError(str(error), status=500, category="user" if isinstance(error, USER_ERRORS) else "server")
    return RequestError(f"the server failed: {type(error).__name__}: {error}", status=500, category="server")
