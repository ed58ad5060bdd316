"""The table `[callbacks]` of a recipe."""

from attrs import frozen

from rlcore.schema.constraints import FunctionText, Positive


@frozen(kw_only=True)
class CallbacksConfig:
    """`[callbacks]`: classes of your own whose methods `on_step_end`, `on_evaluate`, `on_save`, `on_sample` the run calls."""

    path: FunctionText | tuple[FunctionText, ...]
    """A class, or an array of several, as "callbacks.py:Watch" (a file beside the recipe) or "package.module:Watch". The run
    builds each without arguments, in the driver. An error that a method raises ends the run."""
    num_samples: Positive = 8
    """Most samples of a step that `on_sample` gets, spread evenly over the step's."""
