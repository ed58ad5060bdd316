"""Starts trainer and generator of a recipe: in the driver's process, or in workers on Ray."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.execution.in_process import in_process
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import Backends
from rlcore.run.report.progress import Progress

OpenBackends: TypeAlias = Callable[[], AbstractContextManager[Backends]]
"""Builds trainer and generator, and closes them at the end; may be called again after that."""


@contextmanager
def execution(
    prepared: RunPlan, tokenizer: Tokenizer, log_directory: Path | None, progress: Progress
) -> Iterator[OpenBackends]:
    """What the recipe runs on, while it runs; `log_directory` is for the output of processes."""
    cluster = prepared.recipe.cluster
    if cluster is None:
        yield partial(in_process, prepared, tokenizer, log_directory)
        return
    # Imported here, since a run in one process needs no Ray.
    from rlcore.run.execution.ray.pool import open_pool
    from rlcore.run.execution.ray.session import ray_session

    with ray_session(cluster, prepared.device, log_directory):
        yield partial(open_pool, prepared, tokenizer, log_directory, progress)
