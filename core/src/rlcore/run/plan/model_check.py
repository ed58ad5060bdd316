"""Has the installed check of model directories look at the models of a run."""

from rlcore.registry.functions import only_function
from rlcore.registry.plugin_errors import attributed
from rlcore.spi import Problem


def model_problems(path: str) -> tuple[Problem, ...]:
    """Return the faults of a model directory; none without a check. PluginError where the installed one is not usable."""
    check = only_function("model_check")
    if check is None or check.function is None:
        return ()
    with attributed("raised by", check.label):
        return tuple(check.function(path))
