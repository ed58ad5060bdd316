"""Errors of an endpoint."""


class WrongAnswerError(Exception):
    """An answer that breaks the protocol; a retry is of no use."""


class LostAnswerError(Exception):
    """An answer did not come, or not whole; asking again may help."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds that the endpoint asks to wait."""
