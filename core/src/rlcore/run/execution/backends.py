"""Starts the execution of a run, which starts trainer and generator."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from rlcore.registry.binding import build_execution
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.context import ExecutionContext
from rlcore.spi import ContractError
from rlcore.spi.execution import ExecutionProgress, OpenBackends, TextDecoder

T = TypeVar("T")


@contextmanager
def execution(
    plan: BackendPlan, decoder: TextDecoder, log_directory: Path | None, progress: ExecutionProgress
) -> Iterator[OpenBackends]:
    """Yield what opens the backends, for the whole run; `log_directory` is for the output of processes.

    PluginError where the execution cannot be built; ContractError where one of its contexts suppresses an error of the run.
    """
    context, entry = ExecutionContext.of(plan, decoder, log_directory, progress), plan.chosen["execution"]
    with _lets_errors_pass(build_execution(entry, context, plan.config("execution")), entry.label) as opened:
        yield lambda: _lets_errors_pass(opened(), entry.label)


@contextmanager
def _lets_errors_pass(inner: AbstractContextManager[T], label: str) -> Iterator[T]:
    """Enter a context of an execution. ContractError where leaving it suppresses an error."""
    raised: BaseException | None = None
    with inner as entered:
        try:
            yield entered
        except BaseException as error:
            raised = error
            raise
    if raised is not None:
        raise ContractError(f"{label} suppressed an error of the run; expected contexts that let it pass") from raised
