"""The arguments of an execution."""

from pathlib import Path

from attrs import frozen

from rlcore.run.execution.arguments import BackendArguments
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.plugins import RunPlugins
from rlcore.spi.execution import ExecutionProgress, TextDecoder


@frozen(kw_only=True, eq=False)
class ExecutionContext:
    """A run as its execution knows it, in the driver."""

    arguments: BackendArguments
    """Which backends the run has, and what to build each with."""
    plugins: RunPlugins
    """Builds the backends, in the driver or in other processes."""
    progress: ExecutionProgress

    @classmethod
    def of(
        cls, plan: BackendPlan, decoder: TextDecoder, log_directory: Path | None, progress: ExecutionProgress
    ) -> "ExecutionContext":
        """Return the context of a plan."""
        run_directory = None if log_directory is None else log_directory.absolute().parent
        arguments = BackendArguments.of(plan, decoder, log_directory)
        return cls(arguments=arguments, plugins=RunPlugins.of(plan, run_directory), progress=progress)
