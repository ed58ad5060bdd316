"""The installed check of model directories, and the installed cache of a reference."""

from collections.abc import Iterator

from rlcore.published_plugins import remedy_for
from rlcore.registry.functions import only_function
from rlcore.registry.plugin_errors import attributed
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Note, Problem


def missing_model_check() -> Iterator[Note]:
    """Yield a note where no installed package checks the files of models."""
    if only_function("model_check") is None:
        text = f"nothing checks the model's files before the run. {remedy_for('model_check')}".rstrip()
        yield Note(path="model.path", text=text)


def model_problems(path: str) -> tuple[Problem, ...]:
    """Return the faults of a model directory; none without a check. PluginError where the installed one is not usable."""
    check = only_function("model_check")
    if check is None or check.function is None:
        return ()
    with attributed("raised by", check.label):
        return tuple(check.function(path))


def missing_cache(plan: RunPlan) -> Iterator[Note]:
    """Yield a note where the run has a use for a cache, and none is installed. PluginError where that is not usable."""
    needs = plan.algorithm.needs
    if not needs.reference_logprobs or only_function("reference_cache") is not None:
        return
    if needs.source != "rollouts":
        without = "each epoch computes the reference's log-probabilities anew"
    elif plan.reference_is_apart:
        without = "each step waits for the reference, which is not asked while samples come in"
    else:
        return
    yield Note(path="algorithm.name", text=f"{without}. {remedy_for('reference_cache')}".rstrip())
