"""The helpers of the core for authors of executions, besides `rlcore.spi`. docs/plugins.md, "An execution", shows how.

The core calls the execution's function as `function(ExecutionContext, config)` and enters the context manager that it returns,
once for a run. The function decides where backends live. It builds them with these names:

- `RunPlugins.load_here` in the driver's process, `ChosenPlugins.load` in any other, give the `LoadedPlugins` of a rank.
- `open_backends` builds everything in the process that calls it, as the rlcore.spi.Backends that the loop wants.
- `LoadedPlugins.build_trainer` and `build_generator` build the parts one by one, for executions of several ranks. Each returns
  a handle: the backend with its observers, whose every call is checked. `closed_after` closes it.
- `run_stream` feeds a generator's handle. `InProcessTrainer` and `InProcessGenerator` are the groups of one rank.
- `MinibatchTrainer` is the base of a trainer's group of several ranks; `plan_ranks` cuts a batch for them.

The names follow the rules of docs/versions.md.
"""

from rlcore.registry.checks import recorded_export
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.handle import closed_after
from rlcore.registry.plugin_errors import described, exit_error, first_line, is_outside, message_of, register_fatal_error
from rlcore.registry.selection import ChosenPlugin
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.execution.arguments import BackendArguments, GeneratorArguments, TrainerArguments
from rlcore.run.execution.context import ChosenPlugins, ExecutionContext, LoadedPlugins, RunPlugins
from rlcore.run.execution.groups import (
    GradientsRequest,
    GradientsResult,
    InProcessGenerator,
    InProcessTrainer,
    MinibatchTrainer,
    TokensRequest,
    gradients_of,
    per_token_results,
    read_by,
    with_columns,
    without_columns,
)
from rlcore.run.execution.in_process import InProcessRoute, open_backends
from rlcore.run.execution.residency import make_room
from rlcore.run.execution.streams import not_begun, run_stream
from rlcore.run.interrupt import sigterm_kept
from rlcore.run.train_step.minibatches import WIDTH, model_width, plan_ranks

__all__ = [
    "WIDTH",
    "BackendArguments",
    "ChosenPlugin",
    "ChosenPlugins",
    "ExecutionContext",
    "GeneratorArguments",
    "GeneratorHandle",
    "GradientsRequest",
    "GradientsResult",
    "InProcessGenerator",
    "InProcessRoute",
    "InProcessTrainer",
    "LoadedPlugins",
    "MinibatchTrainer",
    "RunPlugins",
    "TokensRequest",
    "TrainerArguments",
    "TrainerHandle",
    "closed_after",
    "described",
    "exit_error",
    "first_line",
    "gradients_of",
    "is_outside",
    "make_room",
    "message_of",
    "model_width",
    "not_begun",
    "open_backends",
    "per_token_results",
    "plan_ranks",
    "read_by",
    "recorded_export",
    "register_fatal_error",
    "run_stream",
    "sigterm_kept",
    "with_columns",
    "without_columns",
]
