"""Starts the execution of a run, which starts trainer and generator."""

from contextlib import AbstractContextManager
from pathlib import Path

from rlcore.registry.binding import build_execution
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.context import ExecutionContext
from rlcore.spi.execution import ExecutionProgress, OpenBackends, TextDecoder


def execution(
    plan: BackendPlan, decoder: TextDecoder, log_directory: Path | None, progress: ExecutionProgress
) -> AbstractContextManager[OpenBackends]:
    """Return what the recipe runs on, to be entered for the whole run; `log_directory` is for the output of processes."""
    context = ExecutionContext.of(plan, decoder, log_directory, progress)
    return build_execution(plan.chosen["execution"], context, plan.config("execution"))
