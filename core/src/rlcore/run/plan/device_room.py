"""How much of a device's memory trainer and generator can be planned with where they share it, by the trainer's estimate."""

from rlcore.config.critic import Offload
from rlcore.spi import PlanOption

TRAINER_SHARE, GENERATOR_SHARE = 0.88, 0.92
"""Shares of a device's memory that can be planned with: allocators of trainers fragment."""
BESIDE_BYTES = 4 * 2**30
"""What an idle trainer's process has on a device beside its state: contexts, workspaces, and what its allocator rounds up.
Measured runs had 4 to 8 GiB in use beside state and engine; GENERATOR_SHARE leaves 6 of them on the smallest device."""


def generator_room(memory_bytes: int, trainer: PlanOption, offload: Offload, *, sleeps: bool) -> int | None:
    """Bytes of a device that a generator can fill beside a trainer that keeps its weights and state there or not, at least 0.
    One that `sleeps` does so while the trainer works; else both are there at the trainer's peak. None where the trainer does
    not say what it keeps."""
    if not sleeps:
        return max(0, int(TRAINER_SHARE * memory_bytes) - sum(trainer.memory.values()))
    kept = trainer.idle.get(offload)
    return None if kept is None else max(0, int(GENERATOR_SHARE * memory_bytes) - BESIDE_BYTES - kept)


def trainer_room(memory_bytes: int, generator: PlanOption, *, sleeps: bool) -> int:
    """Bytes of a device that a trainer can fill beside a generator that sleeps while it works, or does not."""
    kept = generator.idle.get("none", 0) if sleeps else sum(generator.memory.values())
    return int(TRAINER_SHARE * memory_bytes) - kept
