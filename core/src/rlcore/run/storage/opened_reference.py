"""Opens the reference of a run, through the installed cache of its log-probabilities where there is one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.registry.functions import only_function
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.train_step.reference import Reference
from rlcore.spi.execution import Backends


@contextmanager
def opened_reference(
    plan: RunPlan, backends: Backends, directory: Path, model_digest: str, note: Callable[[str], None]
) -> Iterator[Reference]:
    """Yield the reference of a run's backends, whose model has that digest. PluginError where the cache is not usable."""
    reference = Reference.of(backends)
    cache = only_function("reference_cache") if plan.algorithm.needs.reference_logprobs else None
    if cache is None or cache.function is None:
        yield reference
        return
    with cache.function(plan, reference, directory=directory, model_digest=model_digest, note=note) as cached:
        yield cached
