"""The typed handles, one per role whose backends the core calls through hooks."""

from rlcore.plugins.generator_handle import GeneratorHandle
from rlcore.plugins.trainer_handle import TrainerHandle

__all__ = ["GeneratorHandle", "TrainerHandle"]
