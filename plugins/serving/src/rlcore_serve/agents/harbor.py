"""The kinds of the exceptions that Harbor writes into a trial's result."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.spi import EpisodeFailure, FailureKind

FIELD = "exception_info"
KINDS: Mapping[str, FailureKind] = {
    **dict.fromkeys(("NonZeroAgentExitCodeError", "AgentSafetyRefusalError", "ContentPolicyViolationError"), "policy"),
    **dict.fromkeys(
        (
            *("AgentTimeoutError", "ContextWindowExceededError", "OutputTokenExceededError", "ContextLengthExceededError"),
            "OutputLengthExceededError",
        ),
        "limit",
    ),
    **dict.fromkeys(
        ("VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError", "RegradeError"),
        "grader",
    ),
    **dict.fromkeys(
        ("AgentAuthenticationError", "ModelNotFoundError", "MissingExtraError", "UnsupportedModelParametersError"),
        "environment",
    ),
}
"""Kinds by the name of the exception (harbor 0.26, models/trial/error_policy.py). Any other, such as
SandboxBuildFailedError, is one of the infrastructure."""
TIMEOUT = "AgentTimeoutError"
"""The agent's time was over: its reward is that of whatever it had done by then."""


def harbor_failure(result: Mapping[str, Any]) -> EpisodeFailure | None:
    """Return the failure of a trial's result, or of its first step that has one; None where it has none."""
    for info in _exceptions(result):
        name, message = str(info.get("exception_type", "an exception")), str(info.get("exception_message", ""))
        kind = KINDS.get(name, "infrastructure")
        return EpisodeFailure(kind=kind, reason=f"{name}: {message}".rstrip(": "), masked=name == TIMEOUT)
    return None


def _exceptions(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    steps = result.get("step_results")
    for part in (result, *(steps if isinstance(steps, list) else ())):
        info = part.get(FIELD) if isinstance(part, Mapping) else None
        if isinstance(info, Mapping):
            yield info
