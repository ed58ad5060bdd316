"""Checks keys of the recipe that agents make meaningless."""

from collections.abc import Iterator

from rlcore.config.recipe import RolloutConfig
from rlcore.published_plugins import remedy_for
from rlcore.registry.run_parts import only_function
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Problem
from rlcore.spi.provider import group_of


def check(plan: RunPlan) -> Iterator[Problem]:
    """Yield the keys that do nothing where agents run the episodes; a server of sessions that is missing."""
    rollout, name = plan.recipe.rollout, plan.chosen["environment"].name
    agents = f"with environment {name!r}, whose agents run the episodes"
    if only_function("session_server") is None:
        found, expected = f"{name!r}, without a server of its agents' sessions", f"one in {group_of('session_server')}"
        yield Problem(path="environment", found=found, expected=expected, remedy=remedy_for("session_server"))
    if rollout.max_turns != 1:
        expected = "1, the default: an agent asks as often as it likes"
        yield Problem(path="rollout.max_turns", found=f"{rollout.max_turns}, {agents}", expected=expected)
    if rollout.history == "keep_sampled":
        expected = '"refuse" or "segment": a session tells the template the whole chat'
        yield Problem(path="rollout.history", found=f'"keep_sampled", {agents}', expected=expected)
    for key in ("max_turn_tokens", "episode_timeout_s", "on_truncation"):
        default = getattr(RolloutConfig(), key)
        if (value := getattr(rollout, key)) != default:
            expected = f"{default}, the default: agents bound their turns themselves"
            yield Problem(path=f"rollout.{key}", found=f"{value}, {agents}", expected=expected)
    if rollout.replay_routing:
        expected = "false: what sessions record has no routing"
        yield Problem(path="rollout.replay_routing", found=f"true, {agents}", expected=expected)
    for split in ("train", "evaluation"):
        data = getattr(plan.recipe.data, split)
        if data is not None and data.max_prompt_tokens is not None:
            expected = "no such key: what an agent asks is known when it asks"
            yield Problem(
                path=f"data.{split}.max_prompt_tokens", found=f"{data.max_prompt_tokens}, {agents}", expected=expected
            )
        if data is not None and data.on_long_prompt == "drop":
            expected = '"error": what an agent asks is known when it asks, and refused where it is too long'
            yield Problem(path=f"data.{split}.on_long_prompt", found=f'"drop", {agents}', expected=expected)
