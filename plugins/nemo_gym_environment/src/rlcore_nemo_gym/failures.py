"""The end of an episode of NeMo Gym, by its agent server's reply."""

from collections.abc import Mapping
from typing import Any

from rlcore.spi import EpisodeFailure, FailureKind
from rlcore_workers.functions import brief

FAILURE = "_ng_failure_class"
"""The field of a reply by which servers of NeMo Gym say that its reward is none."""
MASK = "mask_sample"
"""The field by which they say that it is not to be trained on."""
_CLASSES: tuple[tuple[str, FailureKind], ...] = (
    ("judge", "grader"),
    ("verif", "grader"),
    ("tool", "tool"),
    ("timeout", "limit"),
    ("environment", "environment"),
)
"""The kind of a failure class with such a word in its name; of any other, such as "transient", the infrastructure."""
_SIGNALS: tuple[tuple[str, FailureKind], ...] = (
    ("eval_timed_out", "grader"),
    ("container_timed_out", "infrastructure"),
    ("agent_timed_out", "limit"),
)
"""Fields of replies with MASK that say why (nemo-gym 0.4: anyterminal_agent, swe_agents)."""
_LIMITS = ("max_iteration", "context_window")
"""Values of `agent_error_kind` of an agent that came to a limit."""


def failure_class_kind(name: object) -> FailureKind:
    """Return the kind of a failure class."""
    return next((kind for word, kind in _CLASSES if word in str(name)), "infrastructure")


def masked_sample(reply: Mapping[str, Any]) -> EpisodeFailure | None:
    """Return how an episode ended whose reply says that it is not to be trained on; None where it says no such thing."""
    if not reply.get(MASK):
        return None
    for name, kind in _SIGNALS:
        if reply.get(name):
            return EpisodeFailure(kind=kind, reason=f"{MASK} of the agent server, with {name}", masked=True)
    if (error := reply.get("agent_error_kind")) is not None:
        kind = "limit" if error in _LIMITS else "environment"
        return EpisodeFailure(
            kind=kind, reason=f"{MASK} of the agent server, with agent_error_kind {brief(error)}", masked=True
        )
    return EpisodeFailure(kind="environment", reason=f"{MASK} of the agent server", masked=True)
