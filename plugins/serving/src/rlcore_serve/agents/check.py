"""Checks keys of the recipe that agents make meaningless."""

from collections.abc import Iterator

import attrs

from rlcore.config.recipe import RolloutConfig
from rlcore.published_plugins import remedy_for
from rlcore.registry.run_parts import only_function
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema.describe import toml_literal
from rlcore.spi import Note, Problem
from rlcore.spi.provider import group_of
from rlcore_rollout.check import prompt_problems
from rlcore_rollout.collector_places import collector_notes
from rlcore_serve.sessions.host import host_problems

READ = frozenset(
    {
        "samples_per_prompt",
        "max_prompt_tokens",
        "max_response_tokens",
        "temperature",
        "top_k",
        "top_p",
        "accept_truncation_bias",
        "stop_strings",
        "stop_token_ids",
        "history",
        "tool_parser",
        "dynamic_sampling",
        "max_refill_ratio",
        "environment_timeout_s",
        "environment_concurrency",
        "on_environment_error",
        "max_failed_fraction",
    }
)
"""Keys of `[rollout]` that a run with agents reads. Each other key is refused unless it has its default."""
_REASONS = {
    "max_turns": "an agent asks as often as it likes",
    **dict.fromkeys(("max_turn_tokens", "episode_timeout_s", "on_truncation"), "agents bound their turns themselves"),
    "replay_routing": "what sessions record has no routing",
}


def check(plan: RunPlan) -> Iterator[Problem | Note]:
    """Yield the keys that do nothing where agents run the episodes; a server of sessions that is missing or cannot listen."""
    yield from collector_notes(plan)
    yield from prompt_problems(plan)
    rollout, name = plan.recipe.rollout, plan.chosen["environment"].name
    agents = f"with environment {name!r}, whose agents run the episodes"
    if only_function("session_server") is None:
        found, expected = f"{name!r}, without a server of its agents' sessions", f"one in {group_of('session_server')}"
        yield Problem(path="environment", found=found, expected=expected, remedy=remedy_for("session_server"))
    yield from host_problems()
    for key, default in ((one.name, one.default) for one in attrs.fields(RolloutConfig) if one.name not in READ):
        if (value := getattr(rollout, key)) != default:
            expected = "no such key" if default is None else f"{toml_literal(default)}, the default"
            reason = _REASONS.get(key, "agents do not read it")
            yield Problem(path=f"rollout.{key}", found=f"{toml_literal(value)}, {agents}", expected=f"{expected}: {reason}")
    if rollout.history == "keep_sampled":
        expected = '"refuse" or "segment": a session tells the template the whole chat'
        yield Problem(path="rollout.history", found=f'"keep_sampled", {agents}', expected=expected)
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
