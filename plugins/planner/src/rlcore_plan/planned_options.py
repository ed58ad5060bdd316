"""Replaces "auto" in a generator's section: plans the run's own layout, as `rlcore plan` does, on the devices here."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from rlcore.config.model import Offload
from rlcore.gpu import device_memories
from rlcore.registry.discovery import Entry
from rlcore.registry.plugin_errors import first_line
from rlcore.registry.provider_calls import run_planner
from rlcore.run.plan.auto_options import AUTO, section_fields
from rlcore.run.plan.channel import separate
from rlcore.run.plan.run_plan import RunPlan, dtype_of
from rlcore.schema.problem import ProblemsError
from rlcore.schema.structure import structure
from rlcore.spi import DeviceSpec, Note, PlanContext, PlanOption, PluginError, RlcoreError, capabilities, find_channel
from rlcore_plan.device_room import GENERATOR_SHARE, TRAINER_SHARE, generator_room
from rlcore_plan.environment_memory import environment_memory
from rlcore_plan.step_work import on_part, step_context

GIB = 2**30


@frozen(kw_only=True)
class _Room:
    """The memory that a generator is planned for, and the reason."""

    context: PlanContext
    reason: str


def planned(plan: RunPlan, keys: Sequence[str]) -> RunPlan:
    """The plan with the values of the generator's own plan in place of "auto" at these keys of its section, and a note of them.

    Where they cannot be told, "auto" stays, and the note says why. PluginError where a plugin's plan says no value, or one that
    its section does not allow.
    """
    try:
        room = _room(plan)
        values, why = ({}, room) if isinstance(room, str) else _planned(plan, room, keys)
    except PluginError:
        raise
    except ProblemsError as error:  # of the recipe or its model, which the checks refuse where a run needs it
        values, why = {}, "; ".join(map(str, error.problems))
    except RlcoreError as error:
        values, why = {}, first_line(error)
    section = f"generator.{plan.chosen['generator'].name}"
    notes = tuple(str(Note(path=f"{section}.{key}", text=_told(values.get(key), why))) for key in keys)
    return evolve(_with_values(plan, values), planned_options=frozenset(values), notes=(*plan.notes, *notes))


def _told(value: object, why: str) -> str:
    return f'"auto" stays, for the generator to judge: {why}' if value is None else f'"auto" is {value}: {why}'


def _room(plan: RunPlan) -> _Room | str:
    """Bytes that the generator can fill; a sentence where that is not known."""
    recipe, cluster = plan.recipe, plan.recipe.cluster
    nodes, ranks = (1, 1) if cluster is None else (cluster.nodes, cluster.ranks_per_node)
    first, last = (ranks, cluster.gpus_per_node) if cluster is not None and separate(recipe) else (0, ranks)
    visible = device_memories() or []
    # Without a cluster the generator's section names the devices that are its own: any of those that are here.
    memories = visible if cluster is None and not plan.shares_devices else visible[first:last]
    if not memories:
        return "nvidia-smi shows the driver no such device here"
    memory = min(memories)
    whole = step_context(
        recipe,
        plan.algorithm.needs,
        dtype_of(recipe, plan.device),
        _device(memory, last - first),
        reference_is_apart=plan.reference_is_apart,
        world_size=nodes * ranks,
        local_size=ranks,
    )
    whole = evolve(whole, as_configured=True, delta_copies=_delta_copies(plan))
    if not plan.shares_devices:  # environments are beside the trainer
        context = on_part(whole, nodes, last - first, GENERATOR_SHARE * memory, is_shared=False)
        return _Room(context=context, reason=f"engines have devices of {memory / GIB:.1f} GiB to themselves")
    trainer = _trainer_option(plan, on_part(whole, nodes, ranks, TRAINER_SHARE * memory, is_shared=True))
    if isinstance(trainer, str):
        return trainer
    sleeps = recipe.offload.generator_sleep_mode and _has(plan.chosen["generator"], capabilities.RESIDENCY)
    offload = recipe.offload.trainer if _has(plan.chosen["trainer"], capabilities.RESIDENCY) else "none"
    free = generator_room(memory, trainer, offload, sleeps=sleeps)
    if free is None:
        return f'the plan of {plan.chosen["trainer"].label} does not say what stays with offload.trainer = "{offload}"'
    beside = environment_memory(recipe, plan.environments, whole)
    free = max(0, free - beside.num_bytes)
    kept = ", ".join(filter(None, (_kept(trainer, offload, sleeps=sleeps), beside.told)))
    reason = f"of {memory / GIB:.1f} GiB {kept}, and {free / GIB:.1f} can be given to engines"
    return _Room(context=on_part(whole, nodes, ranks, free, is_shared=True), reason=reason)


def _kept(trainer: PlanOption, offload: Offload, *, sleeps: bool) -> str:
    """The trainer's part of a device, in words."""
    if not sleeps:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in trainer.memory.items())
        return f"the trainer takes {sum(trainer.memory.values()) / GIB:.1f} beside an engine that stays awake ({parts})"
    kept = trainer.idle[offload] / GIB
    return f'the trainer keeps {kept:.1f} with offload.trainer = "{offload}"'


def _trainer_option(plan: RunPlan, context: PlanContext) -> PlanOption | str:
    """The trainer's estimate of the recipe's own layout; a sentence without one."""
    entry = plan.chosen["trainer"]
    if entry.provider is None or entry.provider.plan is None:
        return f"{entry.label} estimates no memory"
    if plan.critic is not None:
        return "no estimate counts a critic beside the policy"
    made = run_planner(entry, context, plan.config("trainer"))
    own = made if len(made) == 1 else [option for option in made if not option.options]
    return own[0] if len(own) == 1 else f"the plan of {entry.label} has {len(made)} layouts; expected that of the recipe"


def _planned(plan: RunPlan, room: _Room, keys: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The values that the generator's plan of its own layout has for these keys, and from what they come."""
    entry = plan.chosen["generator"]
    made = run_planner(entry, room.context, plan.config("generator"))
    if len(made) != 1:
        raise PluginError(f"{entry.label}: its plan has {len(made)} layouts of one section; expected one (as_configured)")
    known, values = section_fields(plan), {}
    for key in keys:
        value, problems = structure(made[0].options.get(key, AUTO), known[key].type, key)
        if problems or value == AUTO:
            found = f"{key} = {made[0].options.get(key)!r}"
            raise PluginError(f"{entry.label}: its plan says {found}; expected a value of its planned_options")
        values[key] = value
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in made[0].memory.items())
    return values, f"{room.reason} ({parts})"


def _with_values(plan: RunPlan, values: Mapping[str, Any]) -> RunPlan:
    """The plan with these values in the generator's section."""
    if not values:
        return plan
    config, choice = plan.config("generator"), plan.recipe.generator
    known = section_fields(plan)
    made = evolve(config, **{known[key].name: value for key, value in values.items()})
    generator = evolve(choice, options={**choice.options, plan.chosen["generator"].name: made})
    return evolve(plan, recipe=evolve(plan.recipe, generator=generator))


def _device(memory_bytes: int, number: int) -> DeviceSpec:
    """The device of a machine here, of which memory alone is asked: its rates are 1."""
    rates = dict.fromkeys(("flops", "bandwidth", "link", "network", "host"), 1.0)
    return DeviceSpec(name="here", memory_bytes=memory_bytes, devices_per_node=number, **rates)


def _delta_copies(plan: RunPlan) -> Any:
    """PlanContext.delta_copies of the channel that was chosen."""
    if plan.channel is None or plan.recipe.refit.delta != "device":
        return "none"
    return "parts" if find_channel(plan.channel).sharded else "whole"


def _has(entry: Entry, capability: str) -> bool:
    return entry.provider is not None and capability in entry.provider.capabilities
