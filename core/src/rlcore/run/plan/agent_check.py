"""Checks keys of the recipe that need agents, and mixes with environments that do not."""

from collections.abc import Iterator

from rlcore.registry.discovery import Entry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Problem, capabilities


def agent_problems(plan: RunPlan) -> Iterator[Problem]:
    """Keys that do something where agents run the episodes alone."""
    kinds = {entry.name: _is_agent(entry) for entry in plan.environments}
    if len(set(kinds.values())) > 1:
        yield Problem(
            path="data.train.mix",
            found=f"the environments {', '.join(kinds)}, of which agents run the episodes of some",
            expected="environments of one kind",
        )
        return
    rollout, name = plan.recipe.rollout, plan.recipe.environment.name if plan.recipe.environment is not None else None
    if rollout.history == "segment" and not plan.runs_agents and plan.algorithm.needs.source != "demonstrations":
        expected = '"refuse" or "keep_sampled" where no agent runs the episodes'
        yield Problem(path="rollout.history", found=f'"{rollout.history}", with environment {name!r}', expected=expected)


def _is_agent(entry: Entry) -> bool:
    return entry.provider is not None and capabilities.AGENT in entry.provider.capabilities
