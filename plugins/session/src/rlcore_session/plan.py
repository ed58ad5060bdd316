"""The plan of a session: a run's, with a session in place of algorithm, environment and data."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import evolve, field, frozen

from rlcore.config.load import Origin, RawRecipe
from rlcore.config.recipe import RolloutConfig
from rlcore.registry.discovery import Entry, Registry
from rlcore.run.plan.in_process_overrides import PYTHON, InProcessOverrides
from rlcore.run.plan.prepare import prepare, require_device
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.schema import describe
from rlcore.spi import Environment, EnvironmentContext

UNUSED = (
    *("algorithm", "environment", "data", "async", "critic", "evaluation", "checkpoint_evaluation", "logging", "sinks"),
    "receipts",
)
"""Sections that a session does not read."""
ROLLOUT = (
    "max_prompt_tokens",
    "max_response_tokens",
    "temperature",
    "top_k",
    "top_p",
    "stop_strings",
    "stop_token_ids",
)
"""Keys of [rollout] that a session reads."""
NAME = "own_loop"
"""The algorithm of sessions."""
LOG = logging.getLogger("rlcore.session")


class Notes(Progress):
    """Logs the warnings of a session, as `rlcore.session`."""

    def note(self, text: str) -> None:
        """See Progress."""
        LOG.warning(text)


class _NoEnvironment:
    """Stands in the plan where a run has its environment; nothing calls it."""


@frozen(kw_only=True, eq=False)
class SessionOverrides(InProcessOverrides):
    """Takes out of a recipe what a session does not read."""

    reference: bool
    left_out: list[str] = field(factory=list)
    """The sections and keys that were taken out, once the recipe is read."""

    def in_place(self, raw: RawRecipe) -> RawRecipe:
        """The recipe with a session's own algorithm."""
        values = copy.deepcopy(dict(raw.values))
        self.left_out.extend(self._taken_out(values))
        values["algorithm"] = {"name": NAME, NAME: {"opened": True, "reference": self.reference}}
        values["environment"] = {"name": PYTHON}
        values["data"] = {"train": {"source": PYTHON}}
        values["sinks"] = {"names": []}
        rollout = values.setdefault("rollout", {})
        if isinstance(rollout, dict):
            rollout["samples_per_prompt"] = 1
        values["checkpoint"] = {"model_card": False, **_table(values, "checkpoint")}
        return evolve(raw, values=values)

    def _taken_out(self, values: dict[str, Any]) -> Iterator[str]:
        """Take out what a session does not read, and yield the name of each."""
        unused = UNUSED if self.reference else (*UNUSED, "reference")
        yield from (f"[{name}]" for name in unused if values.pop(name, None) is not None)
        keys: dict[str, Sequence[str]] = {
            "rollout": [name for name in describe.fields(RolloutConfig) if name not in ROLLOUT],
            "checkpoint": ("every_n_steps", "at_end", "keep", "model_card", "push_to_hub"),
            "cluster": () if self.reference else ("reference_gpus_per_node",),
        }
        for section, names in keys.items():
            yield from (f"{section}.{name}" for name in names if _table(values, section).pop(name, None) is not None)

    def build(self, entry: Entry, context: EnvironmentContext, config: Any) -> Environment:  # noqa: ARG002
        """Return what stands in for an environment."""
        return cast("Environment", _NoEnvironment())


def plan_of(
    recipe: Path | Mapping[str, Any],
    overrides: Sequence[str],
    origin: Origin,
    *,
    reference: bool,
    registry: Registry | None = None,
) -> RunPlan:
    """The checked plan, with nothing allocated; warnings are logged. Errors as of `rlcore.train`. `registry` stands in for the
    installed plugins, in tests."""
    given = SessionOverrides(origin=origin, reference=reference)
    plan = prepare(recipe, overrides, given=given, registry=registry)
    require_device(plan)
    notes = [*plan.registry.warnings, *(note for note in plan.notes if not note.startswith("algorithm."))]
    if given.left_out:
        notes.append(f"a session does not read {', '.join(given.left_out)} of the recipe")
    for note in notes:
        LOG.warning(note)
    return plan


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table of a name; an empty one where there is none, or something else, of which the converter tells."""
    table = values.get(name)
    return table if isinstance(table, dict) else {}
