"""Names of a run's metrics in Prometheus: units as suffixes, parts of names as labels, counters where something is counted."""

import re
from collections.abc import Mapping

from attrs import field, frozen

PREFIX = "rlcore_"
COUNTED = {
    "updates": "updates",
    "environment/failed": "environment_failed_samples",
    "environment/timed_out": "environment_timed_out_samples",
    "generation/engine_restarts": "engine_restarts",
    "refit/sent_mib": "refit_sent_bytes",
    "speculative/draft_tokens": "speculative_draft_tokens",
    "speculative/accepted_tokens": "speculative_accepted_tokens",
    "async/groups_dropped": "async_groups_dropped",
    "async/groups_refilled": "async_groups_refilled",
    "async/tokens_compared": "async_tokens_compared",
    "async/tokens_rescored": "async_tokens_rescored",
}
"""Names without "_total" of metrics that count something since the metrics before them."""
UNITS = {"_s": ("_seconds", 1.0), "_gib": ("_bytes", 2.0**30), "_mib": ("_bytes", 2.0**20), "_fraction": ("_ratio", 1.0)}
"""Prometheus' suffix and base unit for each suffix of a metric."""
PHASE = re.compile(r"time/(generation|rewards|logprobs|train|refit|offload|other)_s")
IDLE = re.compile(r"time/(trainer|generator)_idle_s")
DATA_SET = re.compile(r"data/(.+)/([^/]+)")
EVALUATED_SET = re.compile(r"(eval/[^/]+)/(.+)")
COMPONENT = re.compile(r"reward/(.+)")


@frozen(kw_only=True)
class Exported:
    """A metric as Prometheus gets it."""

    name: str
    """Without "_total" where it is a counter."""
    labels: Mapping[str, str] = field(factory=dict)
    scale: float = 1.0
    """Its value in Prometheus' unit for a value of 1."""
    is_counter: bool = False


def exported(name: str) -> Exported:
    """Return the name in Prometheus of a metric of metrics.jsonl."""
    if name in COUNTED:
        return Exported(name=PREFIX + COUNTED[name], scale=_unit(name)[1], is_counter=True)
    if name == "time/total_s":
        return Exported(name=f"{PREFIX}step_seconds")
    if match := PHASE.fullmatch(name):
        return Exported(name=f"{PREFIX}step_phase_seconds", labels={"phase": match[1]})
    if match := IDLE.fullmatch(name):
        return Exported(name=f"{PREFIX}step_idle_seconds", labels={"role": match[1]})
    if match := COMPONENT.fullmatch(name):
        return Exported(name=f"{PREFIX}reward_component", labels={"component": match[1]})
    if match := DATA_SET.fullmatch(name):
        return _plain(f"data/set_{match[2]}", {"dataset": match[1]})
    if match := EVALUATED_SET.fullmatch(name):
        return _plain(match[1], {"dataset": match[2]})
    return _plain(name, {})


def _plain(name: str, labels: Mapping[str, str]) -> Exported:
    suffix, scale = _unit(name)
    stem = name[: -len(next(own for own in UNITS if name.endswith(own)))] if suffix else name
    text = re.sub(r"[^a-zA-Z0-9_]", "_", stem.replace("@", "_at_"))
    return Exported(name=f"{PREFIX}{text}{suffix}", labels=labels, scale=scale)


def _unit(name: str) -> tuple[str, float]:
    """Return Prometheus' suffix for the unit of a metric, or "", and the factor to its base unit."""
    return next((unit for own, unit in UNITS.items() if name.endswith(own)), ("", 1.0))
