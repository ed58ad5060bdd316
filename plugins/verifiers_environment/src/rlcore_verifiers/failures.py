"""The end of a rollout of `verifiers`, by its output."""

from collections.abc import Mapping
from typing import Any

from rlcore.spi import EpisodeFailure, FailureKind

EMPTY = "EmptyModelResponseError"
"""The error of `verifiers` for an answer with neither text nor calls of tools, which ends an episode and is rewarded."""
TIMEOUT = "timeout_reached"
"""The stop condition of a rollout whose time was over: its reward is that of whatever it had said by then."""
KINDS: Mapping[str, FailureKind] = {
    **dict.fromkeys(("ToolError", "ToolParseError", "ToolCallError"), "tool"),
    **dict.fromkeys(
        (
            *("InfraError", "TunnelError", "SandboxError", "BrowserSandboxError"),
            *("ModelError", "InvalidModelResponseError", "APIConnectionError", "APITimeoutError"),
        ),
        "infrastructure",
    ),
    "OverlongPromptError": "limit",
}
"""Kinds by the name of an error (verifiers 0.2.1, errors.py). Any other is the environment's."""


def error_kind(error: Mapping[str, Any]) -> FailureKind:
    """Return the kind of a rollout's error: of the first that is known in its chain, `A -> B`."""
    names = [str(error["error"]), *str(error.get("error_chain_repr", "")).split(" -> ")]
    return next((KINDS[found] for name in names if (found := name.partition("(")[0].strip()) in KINDS), "environment")


def failure_of(output: Mapping[str, Any]) -> EpisodeFailure | None:
    """Return how a rollout ended that has a reward; None where by the policy. One whose time was over is masked."""
    stop = output.get("stop_condition")
    if stop == TIMEOUT:
        return EpisodeFailure(kind="limit", reason="its time was over (stop_condition timeout_reached)", masked=True)
    if output.get("error") is not None:
        return EpisodeFailure(kind="policy", reason="its answer was empty")
    if output.get("is_truncated"):
        return EpisodeFailure(kind="limit", reason=f"it was cut off (stop_condition {stop})")
    return None
