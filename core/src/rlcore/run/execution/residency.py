"""Trainer and generator on one device: whoever works has the memory."""

from collections.abc import Callable
from typing import Literal

from attrs import define, evolve, field

from rlcore.config.model import Offload
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.refit import Refitter
from rlcore.run.protocols import nothing
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import SetResidencyRequest, capabilities
from rlcore.spi.execution import GeneratorGroup, TrainerGroup
from rlcore.spi.lifecycle import RESIDENT

GIB = 2**30


def room_for_generator(prepared: BackendPlan) -> SetResidencyRequest | None:
    """Return the place of the trainer's memory while the generator starts; None where that need not care."""
    return _room(prepared, prepared.recipe.offload.trainer)


def room_beside_critic(prepared: BackendPlan) -> SetResidencyRequest | None:
    """Return the place of the critic's memory while the generator starts; None where that need not care."""
    return _room(prepared, offload_of_critic(prepared))


def offload_of_critic(prepared: BackendPlan) -> Offload:
    """Return the parts of the critic that leave the device while a generator on it works: those of the trainer, or more."""
    alone: Offload = "none" if prepared.recipe.critic is None else prepared.recipe.critic.offload
    order: tuple[Offload, ...] = ("none", "state", "all")
    return max(alone, prepared.recipe.offload.trainer, key=order.index)


def _room(prepared: BackendPlan, offload: Offload) -> SetResidencyRequest | None:
    if not prepared.shares_devices or not (prepared.recipe.offload.generator_sleep_mode or offload != "none"):
        return None
    return idle_trainer(offload)


def idle_trainer(offload: Offload) -> SetResidencyRequest:
    """Return the place of a trainer's memory while another works on its device."""
    return SetResidencyRequest(
        weights="host" if offload == "all" else "device", state="device" if offload == "none" else "host"
    )


def make_room(trainer: TrainerHandle, room: SetResidencyRequest | None) -> None:
    """Make the trainer free memory before a generator starts beside it: at the least what it holds unused."""
    if room is not None and trainer.has(capabilities.RESIDENCY):
        trainer.set_residency(room)


@define(kw_only=True, eq=False)
class Residency:
    """Trainer and generator take turns in a device's memory. The generator wakes in two stages, since the
    weights that it receives have to be somewhere before the memory for its cache is free."""

    trainer: TrainerGroup
    generator: GeneratorGroup
    generator_sleep_mode: bool = False
    offload_trainer: Offload = "none"
    trainer_moves: bool = False
    """True where the trainer can be asked for memory."""
    clock: PhaseClock
    turn: Literal["training", "generation"] | None = "generation"
    """None at first where the trainer made room for the generator to start: the device is nobody's alone."""
    move_critic: Callable[[], None] = nothing
    """Makes a critic leave the device to the generator; does nothing where there is none."""
    critic_moves: bool = False
    """True where that may move anything."""
    metrics: dict[str, float] = field(factory=dict)
    """Memory that each leaves on the device while the other works, in GiB."""

    @classmethod
    def of(
        cls,
        plan: BackendPlan,
        trainer: TrainerGroup,
        generator: GeneratorGroup,
        clock: PhaseClock,
        *,
        move_critic: Callable[[], None],
        critic_moves: bool,
    ) -> "Residency":
        """A plan's: one that never moves unless the two share a GPU's memory and the recipe wants them to take turns."""
        options, shares = plan.recipe.offload, plan.shares_devices
        moves = trainer.has(capabilities.RESIDENCY)
        offloads = options.trainer if shares and moves else "none"
        return cls(
            trainer=trainer,
            generator=generator,
            generator_sleep_mode=shares and options.generator_sleep_mode and generator.has(capabilities.RESIDENCY),
            offload_trainer=offloads,
            trainer_moves=moves,
            clock=clock,
            turn="generation" if offloads == "none" else None,
            move_critic=move_critic,
            critic_moves=critic_moves,
        )

    @property
    def moves(self) -> bool:
        """Return whether the two take turns at all."""
        return self.generator_sleep_mode or self.offload_trainer != "none"

    @property
    def trainer_leaves(self) -> bool:
        """Return whether trainer or critic may be away while the generator has its turn."""
        return self.moves and (self.offload_trainer != "none" or self.critic_moves)

    def to_training(self) -> bool:
        """Give the device to the trainer. True where that cost the generator its weights."""
        if self.turn == "training" or not self.moves:
            return False
        discards = self.generator_sleep_mode and self.generator.has(capabilities.DISCARD_WEIGHTS)
        with self.clock.phase("offload"):
            if self.generator_sleep_mode:
                asleep = SetResidencyRequest(weights="host", state="host", discard_weights=discards)
                left = self.generator.set_residency(asleep).device_bytes
                self.metrics["memory/generator_idle_gib"] = left / GIB
            if self.offload_trainer != "none":
                self.trainer.set_residency(RESIDENT)
        self.turn = "training"
        return discards

    def to_generation(self, refitter: Refitter, weight_version: int) -> None:
        """Give the device to the generator, and bring it to this version when the weights of both are there."""
        # Behind a worker that died, what it is to have again may have left the device.
        lacks_weights = self.offload_trainer == "all" and refitter.version != weight_version
        if self.turn == "generation" and not lacks_weights:
            refitter.refit(weight_version)
            return
        self.move_critic()
        with self.clock.phase("offload"):
            self._make_room(evolve(idle_trainer(self.offload_trainer), weights="device"))
            if self.generator_sleep_mode:
                self.generator.set_residency(SetResidencyRequest(weights="device", state="host"))
        refitter.refit(weight_version)
        with self.clock.phase("offload"):
            self._make_room(idle_trainer(self.offload_trainer))
            if self.generator_sleep_mode:
                self.generator.set_residency(RESIDENT)
        self.turn = "generation"

    def _make_room(self, request: SetResidencyRequest) -> None:
        """Even where nothing is offloaded, the trainer then gives back what its allocator holds without using it."""
        if self.trainer_moves:
            left = self.trainer.set_residency(request)
            taken = left.device_bytes if left.reserved_bytes is None else left.reserved_bytes
            self.metrics["memory/trainer_idle_gib"] = taken / GIB
