"""Errors of the server's requests, in the form that OpenAI's clients read."""

import re
from collections.abc import Sequence
from typing import Any

MAX_PROBLEMS = 50
_FIELD = re.compile(r"([a-z_]+)(\[\d+\])?: ")
"""The field of a request that a message begins with."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """A request that is answered with an HTTP status of 400 or above."""

    def __init__(self, status: int, message: str, *, code: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        """Seconds after which the client may try again; None where that is of no use."""

    def body(self) -> dict[str, Any]:
        """Return OpenAI's JSON object of an error."""
        kind, field = _TYPES.get(self.status, "server_error"), _FIELD.match(str(self))
        param = field[0].removesuffix(": ") if field is not None else None
        return {"error": {"message": str(self), "type": kind, "param": param, "code": self.code}}

    def message_body(self) -> dict[str, Any]:
        """Return Anthropic's JSON object of an error."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def headers(self) -> dict[str, str]:
        """Return the headers that the response carries besides its content type."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def bad_request(problems: Sequence[str]) -> RequestError:
    """Return one error for all problems of a request, or for the first of very many."""
    listed, more = problems[:MAX_PROBLEMS], len(problems) - MAX_PROBLEMS
    return RequestError(400, "\n".join([*listed, f"and {more} more"] if more > 0 else listed))
