"""The choice of a run's collectors: the driver, or processes beside the engines."""

from collections.abc import Iterator

from rlcore.registry.provider_calls import max_concurrent
from rlcore.run.plan.in_process_overrides import PYTHON
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.spi import Note

ONE_PROCESS = "rollout:one_process"
"""A capability: episodes share what the environment holds, such as a model on a device, so that one process has it."""


def most_calls(plan: RunPlan) -> int | None:
    """Return the most calls at once of a plan's environment, as the recipe says and the environment can work on; None where
    nobody limits them."""
    sections = [(entry, plugin_config(plan.recipe, entry)) for entry in plan.environments]
    found = [most for entry, section in sections if (most := max_concurrent(entry, section)) is not None]
    named = plan.recipe.rollout.environment_concurrency
    return min([*found, *([] if named is None else [named])], default=None)


def why_here(plan: RunPlan, num_collectors: int) -> str | None:
    """Return why the driver collects groups that several collectors could collect; None where these do."""
    if plan.runs_agents:
        return "the sessions of agents listen in the driver's process"
    if plan.replay_schedule is not None:
        return "a replay asks for samples in rounds over all groups"
    if any(entry.name == PYTHON for entry in plan.environments):
        return "the environment is an object of the driver's process"
    for entry in plan.environments:
        if entry.provider is not None and ONE_PROCESS in entry.provider.capabilities:
            return f"environment {entry.name!r} works in one process"
    most = most_calls(plan)
    if most is not None and most < num_collectors:
        return f"the environment works on {most} calls at once, fewer than there are collectors"
    return None


def collector_notes(plan: RunPlan) -> Iterator[Note]:
    """Yield a note where the driver collects though the recipe has several nodes, or names several collectors."""
    section = plan.config("execution") if plan.recipe.cluster is not None else None
    wanted = getattr(section, "collectors", 1)
    number = getattr(section, "nodes", 1) if wanted == "auto" else wanted
    if number > 1 and (reason := why_here(plan, number)) is not None:
        yield Note(path="cluster.collectors", text=f"the driver collects all samples: {reason}")
