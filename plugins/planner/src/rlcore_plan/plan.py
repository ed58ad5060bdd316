"""From a recipe and a number of devices to layouts, the fastest first."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from rlcore.config.load import read_raw
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.provider_calls import run_planner
from rlcore.registry.selection import AUTO
from rlcore.registry.states import entries_by_name
from rlcore.run.plan.sections import convert_recipe, plugin_config
from rlcore.schema.describe import toml_literal
from rlcore.spi import ConfigError, PlanContext, PlanOption, Problem, Role
from rlcore_plan.device_room import GENERATOR_SHARE
from rlcore_plan.devices import DEVICES, GIB, Devices
from rlcore_plan.environment_memory import has_plan
from rlcore_plan.layouts import Candidate, Planner, candidates
from rlcore_plan.work import Work, work_of

DOUBLINGS = 4


@frozen(kw_only=True)
class Plan:
    """All layouts of a recipe on some devices."""

    devices: Devices
    candidates: tuple[Candidate, ...]
    """The fastest that fit first."""
    assumptions: tuple[str, ...]

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        return tuple(one for one in self.candidates if one.fits)


def plan_recipe(
    path: Path,
    overrides: Sequence[str],
    devices: Devices,
    *,
    mean_prompt: float | None = None,
    mean_response: float | None = None,
    registry: Registry | None = None,
) -> Plan:
    """Every layout that the installed trainers and generators offer, or those that the recipe names.

    ConfigError where none fits, with the layout that needs least and the number of machines on which one would.
    """
    recipe, found = convert_recipe(read_raw(path, overrides), registry)
    work = work_of(recipe, found, devices, mean_prompt=mean_prompt, mean_response=mean_response)
    trainers = _planners(recipe, found, "trainer")
    generators = _planners(recipe, found, "generator") if work.generates else {}
    made = candidates(work, devices, trainers, generators)
    if not any(one.fits for one in made):
        raise ConfigError([_too_large(work, devices, made, trainers, generators)])
    return Plan(devices=devices, candidates=tuple(made), assumptions=work.assumptions)


def _planners(recipe: Recipe, registry: Registry, role: Role) -> dict[str, Planner]:
    """By name; whether a plugin would run on this machine does not matter."""
    usable = {name: entry for name, entry in entries_by_name(registry.of(role)).items() if has_plan(entry)}
    name = getattr(recipe, role).name
    wanted = usable if name == AUTO else {name: usable[name]} if name in usable else {}
    if not wanted:
        expected = f"a {role} that offers plans, of which are installed: {', '.join(sorted(usable)) or 'none'}"
        raise ConfigError([Problem(path=f"{role}.name", found=f'"{name}"', expected=expected)])
    return {name: partial(_planned, entry, plugin_config(recipe, entry)) for name, entry in wanted.items()}


def _planned(entry: Entry, config: object, context: PlanContext) -> Sequence[PlanOption]:
    return run_planner(entry, context, config)


def _too_large(
    work: Work, devices: Devices, made: Sequence[Candidate], trainers: Mapping[str, Planner], generators: Mapping[str, Planner]
) -> Problem:
    if not made:
        expected = "a number of devices that some layout divides, and a model whose heads, layers and vocabulary it divides"
        return Problem(path="--gpus", found=f"{devices}, which no layout divides", expected=expected)
    least = made[0]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in least.memory.items())
    kept = ((key, value) for key, value in least.overrides if not key.startswith("cluster."))
    sizes = " ".join(f"{key}={value if isinstance(value, str) else toml_literal(value)}" for key, value in kept)
    trainer, generator = (size / GIB for size in least.free_bytes)
    beside = f", where {work.beside.told}" if work.beside.parts else ""
    return Problem(
        path="--gpus",
        found=f"{devices}, on which no layout fits; {sizes} lacks least, {least.excess / GIB:.1f} GiB ({parts})",
        expected=f"at most {trainer:.1f} GiB of the trainer and {generator:.1f} of the generator{beside}",
        remedy=_remedy(work, devices, made, trainers, generators),
    )


def _remedy(
    work: Work, devices: Devices, made: Sequence[Candidate], trainers: Mapping[str, Planner], generators: Mapping[str, Planner]
) -> str:
    """The smallest number of machines, doubled from what there is, on which a layout fits; else a larger device of which as
    many do. A generator lies on one machine: where none fits, more of them do not help."""
    engine_fits = min(one.generator_bytes for one in made) <= GENERATOR_SHARE * devices.spec.memory_bytes
    more = _more(devices) if engine_fits else ()
    for larger in (*more, *_with_more_memory(devices)):
        context = evolve(work.context, device=larger.spec, world_size=larger.number, local_size=larger.per_node)
        if any(one.fits for one in candidates(evolve(work, context=context), larger, trainers, generators)):
            return f"{larger} would do; or lower training.max_tokens_per_microbatch or the recipe's lengths"
    return "Lower training.max_tokens_per_microbatch or the recipe's lengths, or have the generator hold its weights in 8 bits"


def _more(devices: Devices) -> Iterator[Devices]:
    nodes, per_node, most = devices.nodes, devices.per_node, devices.spec.devices_per_node
    while per_node * 2 <= most:
        per_node *= 2
        yield evolve(devices, per_node=per_node)
    for _ in range(DOUBLINGS):
        nodes *= 2
        yield evolve(devices, nodes=nodes, per_node=most)


def _with_more_memory(devices: Devices) -> Iterator[Devices]:
    for spec in DEVICES.values():
        if spec.memory_bytes > devices.spec.memory_bytes:
            per_node = min(devices.per_node, spec.devices_per_node)
            yield Devices(spec=spec, nodes=devices.number // per_node, per_node=per_node)
