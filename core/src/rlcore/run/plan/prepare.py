"""Makes the plan of a run from a recipe file, with nothing allocated: the work of `rlcore check`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from rlcore.config.load import RawRecipe, raw_from, read_raw
from rlcore.config.recipe import Recipe
from rlcore.gpu import detect_device
from rlcore.registry.binding import build_environment
from rlcore.registry.discovery import Registry
from rlcore.run.data.mixes import MixedAgents, MixedEnvironment
from rlcore.run.plan.auto_options import with_planned_options
from rlcore.run.plan.channel import choose_channel, ranks_per_generator
from rlcore.run.plan.checks import check_plan, schedule_notes
from rlcore.run.plan.choice import choose_plugins
from rlcore.run.plan.in_process_overrides import InProcessOverrides
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import convert_recipe, plugin_config, unread_cluster_keys, unread_options
from rlcore.secrets import MASK, masked_keys
from rlcore.spi import ConfigError, EnvironmentContext, PluginError, Problem, RlcoreError


def prepare(
    recipe: Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    evaluating: bool = False,
    continues: bool = False,
    replay_schedule: Path | None = None,
    registry: Registry | None = None,
    given: InProcessOverrides | None = None,
) -> RunPlan:
    """Read, check and select. Raises what is wrong, all problems of one kind at once; allocates nothing.

    `recipe` is a file, or what one would hold. `evaluating`: the held-out set is measured, whatever the recipe says of a
    training. `continues`: a checkpoint is loaded, so that adapters to begin with need not be there. `replay_schedule`: the
    schedule.jsonl of the run to be repeated. `registry` stands in for the installed plugins, in tests; `given` for parts of
    the recipe.
    """
    raw = read_raw(recipe, overrides) if isinstance(recipe, Path) else raw_from(recipe, overrides, "the recipe")
    if problems := [_masked_problem(raw, key) for key in masked_keys(raw.values)]:
        raise ConfigError(problems)
    made, found = convert_recipe(raw if given is None else given.in_place(raw), registry)
    registry = found if given is None else given.described(found)
    try:
        plan = evolve(_plan(made, registry, evaluating, continues, replay_schedule), evaluating=evaluating)
    except PluginError as error:
        for note in unread_cluster_keys(raw, registry):
            error.add_note(note)
        raise
    if not evaluating:
        plan = evolve(plan, notes=(*map(str, [*unread_options(raw, made), *schedule_notes(plan)]), *plan.notes))
    if given is not None:
        plan = evolve(plan, given_rows=given.rows)
    if "environment" not in plan.chosen:
        return plan
    context, build = EnvironmentContext(seed=made.run.seed), build_environment if given is None else given.build
    environment = build(plan.chosen["environment"], context, plan.config("environment"))
    if plan.other_environments:
        others = {
            entry.name: build_environment(entry, context, plugin_config(made, entry)) for entry in plan.other_environments
        }
        mixed = MixedAgents if plan.runs_agents else MixedEnvironment
        backends: Any = {plan.chosen["environment"].name: environment, **others}
        environment = mixed(backends=backends, of_set=made.data.environment_of_set)
    return evolve(plan, environment=environment)


def _plan(recipe: Recipe, registry: Registry, evaluating: bool, continues: bool, replay_schedule: Path | None) -> RunPlan:
    """The checked plan, without its environment."""
    if evaluating:
        recipe = evolve(
            recipe,
            evaluation=evolve(recipe.evaluation, at_start=True),
            checkpoint=evolve(recipe.checkpoint, model_card=False, push_to_hub=None),  # nothing is exported
            checkpoint_evaluation=None,
            tables={},  # nothing observes a loop
        )
    device = recipe.run.device if recipe.run.device != "auto" else detect_device()
    plan = choose_plugins(recipe, registry, device, measures_own=evaluating and not continues)
    if plan.answers_alone:
        named = plan.recipe.reference
        alone = None if named is None else evolve(named, trainer={})
        recipe = evolve(plan.recipe, cluster=None, reference=alone)  # there are no ranks to place, nor to lay out
        plan = evolve(plan, recipe=recipe)
    channel = choose_channel(recipe, plan.chosen, device, registry)
    ranks = ranks_per_generator(recipe, plan.chosen)
    plan = evolve(plan, ranks_per_generator=ranks, channel=channel, continues=continues, replay_schedule=replay_schedule)
    try:
        plan = with_planned_options(plan)
    except RlcoreError:
        raise
    except Exception:
        check_plan(plan)  # plans are made of sections that are right: what is wrong with the recipe comes first
        raise
    return evolve(plan, notes=(*plan.notes, *map(str, check_plan(plan))))


def _masked_problem(raw: RawRecipe, key: str) -> Problem:
    """Return the problem of a recipe with a mask in place of a secret, as rlcore writes them."""
    found, origin = f'"{MASK}", which stands for a secret', raw.origin(tuple(key.partition("[")[0].split("."))) or ""
    return Problem(path=key, found=found, expected="the secret itself", remedy="Set it on the command line.", origin=origin)


def require_device(prepared: RunPlan) -> None:
    """Raise ConfigError where the run would compute here on a device that is not there."""
    if prepared.device == "cuda" and prepared.runs_here and detect_device() == "cpu":
        problem = Problem(
            path="run.device",
            found='"cuda", and no GPU that the installed torch can use',
            expected='a machine with an NVIDIA driver and torch built for CUDA, or "cpu"',
            remedy='Set run.device to "auto" to take what there is.',
        )
        raise ConfigError([problem])
