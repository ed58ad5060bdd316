"""The end of a run whose generator engine fails again and again."""

from rlcore.spi import WorkerError


class EngineLimitError(WorkerError):
    """One engine has failed more often than `cluster.max_engine_restarts` allows: new workers would only see it fail again."""
