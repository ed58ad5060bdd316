"""The typed handles, one per role whose backends the core calls through hooks."""

from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.trainer_handle import TrainerHandle

__all__ = ["GeneratorHandle", "TrainerHandle"]
