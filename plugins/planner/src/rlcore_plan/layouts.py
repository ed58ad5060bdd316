"""Trainers' and generators' layouts together: which fit, how long a step takes, and how a recipe asks for them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

from attrs import evolve, frozen

from rlcore.config.model import Offload
from rlcore.spi import PlanContext, PlanOption
from rlcore_plan.device_room import GENERATOR_SHARE, TRAINER_SHARE, generator_room, trainer_room
from rlcore_plan.devices import GIB, Devices
from rlcore_plan.step_work import on_part
from rlcore_plan.turns import generation_turns
from rlcore_plan.work import Work

TURN_S = 0.5
"""Seconds of a step in which trainer and generator that share devices put each other to sleep and wake."""
ROLLOUT_S = 60e-6
"""Seconds of the driver for a rollout."""

Planner = Callable[[PlanContext], Sequence[PlanOption]]


@frozen(kw_only=True)
class Candidate:
    """A layout of a run."""

    trainer: str
    generator: str | None
    overrides: tuple[tuple[str, object], ...]
    """Keys of a recipe that ask for it, with their values."""
    memory: Mapping[str, int]
    """Bytes of the fullest device, by part, each role at its own peak."""
    trainer_bytes: int
    """Bytes on the fullest of the trainer's devices while it trains."""
    generator_bytes: int
    """Bytes on the fullest of the generator's while it generates; 0 where nothing generates."""
    free_bytes: tuple[int, int]
    """The most that each of the two may be."""
    seconds: Mapping[str, float]
    """Seconds of each phase of a step."""
    total: float
    """Seconds of a step; less than the phases' sum where generation goes on while others train."""
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.trainer_bytes <= self.free_bytes[0] and self.generator_bytes <= self.free_bytes[1]

    @property
    def peak_bytes(self) -> int:
        return max(self.trainer_bytes, self.generator_bytes)

    @property
    def excess(self) -> int:
        """Bytes that lack on the fullest device."""
        return max(self.trainer_bytes - self.free_bytes[0], self.generator_bytes - self.free_bytes[1])


def candidates(
    work: Work, devices: Devices, trainers: Mapping[str, Planner], generators: Mapping[str, Planner]
) -> list[Candidate]:
    """Every layout, the fastest that fit first, and then those that need least."""
    found: list[Candidate] = []
    devices = evolve(devices, per_node=devices.per_node - work.reference_per_node)
    if devices.per_node < 1:
        return found
    for name, planner in trainers.items():
        if work.generates:
            for generator, other in generators.items():
                found += _colocated(work, devices, name, planner, generator, other)
                found += _separate(work, devices, name, planner, generator, other)
        else:
            found += _alone(work, devices, name, planner)
    return sorted(found, key=lambda one: (not one.fits, one.total if one.fits else one.excess))


def _alone(work: Work, devices: Devices, name: str, planner: Planner) -> Iterator[Candidate]:
    free = TRAINER_SHARE * devices.spec.memory_bytes - work.beside.num_bytes
    for option in planner(on_part(work.context, devices.nodes, devices.per_node, free, is_shared=False)):
        yield _candidate(work, devices, (name, option), None, int(free), 0, {})


def _colocated(
    work: Work, devices: Devices, name: str, planner: Planner, generator: str, other: Planner
) -> Iterator[Candidate]:
    memory, beside = devices.spec.memory_bytes, work.beside.num_bytes
    shared = on_part(work.context, devices.nodes, devices.per_node, TRAINER_SHARE * memory - beside, is_shared=True)
    shared = _running_ahead(shared, work.max_staleness + 1)

    @lru_cache
    def engines(free_gib: int) -> Sequence[PlanOption]:
        return other(evolve(shared, free_bytes=free_gib * GIB))

    for option in planner(shared):
        offloads: tuple[Offload, ...] = (work.offload, "none", "state")
        for offload in dict.fromkeys(offloads):
            room = generator_room(memory, option, offload, sleeps=work.generator_sleep_mode)
            if room is None:
                continue
            left = max(0, room - beside) // GIB
            for engine in engines(max(left, 1)):
                free = trainer_room(memory, engine, sleeps=work.generator_sleep_mode) - beside
                yield _candidate(
                    work,
                    devices,
                    (name, option),
                    (generator, engine),
                    free,
                    left * GIB,
                    {"offload.trainer": offload},
                )


def _separate(work: Work, devices: Devices, name: str, planner: Planner, generator: str, other: Planner) -> Iterator[Candidate]:
    memory = devices.spec.memory_bytes
    free, engine_free = TRAINER_SHARE * memory - work.beside.num_bytes, GENERATOR_SHARE * memory
    for number in dict.fromkeys(devices.per_node * part // 4 for part in (1, 2, 3)):
        if not 0 < number < devices.per_node:
            continue
        left = on_part(work.context, devices.nodes, devices.per_node - number, free, is_shared=False)
        # Of the groups that may be open, a step's are being trained on where the generator is what is waited for.
        right = on_part(work.context, devices.nodes, number, engine_free, is_shared=False)
        right = _running_ahead(right, work.max_staleness)
        keys = {"cluster.placement": "separate", "cluster.generator_gpus_per_node": number}
        engines = other(right)
        for option in planner(left):
            for engine in engines:
                yield _candidate(work, devices, (name, option), (generator, engine), int(free), int(engine_free), keys)


def _running_ahead(context: PlanContext, num_steps: int) -> PlanContext:
    """The context of a generator that works on the samples of so many steps at a time."""
    if num_steps <= 1:
        return context
    turns = generation_turns(context.response_lengths, context.samples_per_prompt, num_steps)
    return evolve(context, generation_turns=turns)


def _candidate(
    work: Work,
    devices: Devices,
    trainer: tuple[str, PlanOption],
    generator: tuple[str, PlanOption] | None,
    free: int,
    engine_free: int,
    keys: Mapping[str, object],
) -> Candidate:
    name, option = trainer
    memory, seconds, assumptions = dict(option.memory), dict(option.seconds), option.assumptions
    seconds["training"] = seconds.get("training", 0.0) * work.epochs
    overrides: dict[str, object] = {
        "cluster.nodes": devices.nodes,
        "cluster.gpus_per_node": devices.per_node + work.reference_per_node,
        "trainer.name": name,
    }
    if devices.nodes > 1 and not work.reaches_machines:
        overrides["cluster.address"] = "auto"
    overrides |= {f"trainer.{name}.{key}": value for key, value in option.options.items()}
    is_shared = generator is not None and "cluster.placement" not in keys
    if generator is not None:
        engine = generator[1]
        overrides["generator.name"] = generator[0]
        overrides |= {f"generator.{generator[0]}.{key}": value for key, value in engine.options.items()}
        memory |= dict(engine.memory)
        for phase, value in engine.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + (value / work.reuse if phase == "generation" else value)
        assumptions += engine.assumptions
        offload = str(keys.get("offload.trainer", "none"))
        moved = option.idle.get("none", 0) - option.idle.get(offload, 0)
        seconds["other"] = work.context.num_sequences * ROLLOUT_S / work.reuse
        if is_shared and work.is_separate:
            overrides |= {"cluster.placement": "colocated", "cluster.generator_gpus_per_node": 0}
        if is_shared:
            seconds["other"] += TURN_S + 2 * moved / devices.spec.host
    changed = {key: value for key, value in keys.items() if (key, value) != ("offload.trainer", work.offload)}
    return Candidate(
        trainer=name,
        generator=None if generator is None else generator[0],
        overrides=tuple((overrides | changed).items()),
        memory=memory,
        trainer_bytes=sum(option.memory.values()),
        generator_bytes=0 if generator is None else sum(generator[1].memory.values()),
        free_bytes=(free, engine_free),
        seconds=seconds,
        total=_total(seconds, overlaps=work.max_staleness > 0 and not is_shared),
        assumptions=assumptions,
    )


def _total(seconds: Mapping[str, float], *, overlaps: bool) -> float:
    """Seconds of a step; with devices of its own a generator that runs ahead works while the others train."""
    if not overlaps:
        return sum(seconds.values())
    generation = seconds.get("generation", 0.0)
    return max(generation, sum(seconds.values()) - generation)
