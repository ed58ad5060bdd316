"""Computes the memory of a shared device that a plan may use for trainer and generator."""

from rlcore.config.model import Offload
from rlcore.spi import PlanOption

TRAINER_SHARE, GENERATOR_SHARE = 0.88, 0.92
"""Shares of a device's memory that can be planned with: allocators of trainers fragment."""
BESIDE_SHARE, BESIDE_BYTES = 0.12, 9 * 2**30
"""Memory of processes that share a device beside a trainer's state and an engine: contexts, workspaces, what allocators
round up. It was 2 to 8 GiB in measured runs on devices of 80 and 140 GiB, but for ranks that exchange tokens, whose trainer
adds its own; smaller devices hold less of everything."""


def beside_bytes(memory_bytes: int) -> int:
    """Bytes of a shared device that neither a trainer's state nor an engine is given."""
    return max(memory_bytes - int(GENERATOR_SHARE * memory_bytes), min(int(BESIDE_SHARE * memory_bytes), BESIDE_BYTES))


def generator_room(memory_bytes: int, trainer: PlanOption, offload: Offload, *, sleeps: bool) -> int | None:
    """Bytes of a device that a generator can fill beside a trainer that keeps its weights and state there or not, at least 0.
    One that `sleeps` does so while the trainer works; else both are there at the trainer's peak. None where the trainer does
    not say what it keeps."""
    if not sleeps:
        return max(0, int(TRAINER_SHARE * memory_bytes) - sum(trainer.memory.values()))
    kept = trainer.idle.get(offload)
    return None if kept is None else max(0, memory_bytes - beside_bytes(memory_bytes) - kept)


def trainer_room(memory_bytes: int, generator: PlanOption, *, sleeps: bool) -> int:
    """Bytes of a device that a trainer can fill beside a generator that sleeps while it works, or does not."""
    kept = generator.idle.get("none", 0) if sleeps else sum(generator.memory.values())
    return int(TRAINER_SHARE * memory_bytes) - kept
