"""The table `[exports]` of a recipe."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Positive

_ONCE_EACH = Constraint("each once, and one at least", lambda value: bool(value) and len(set(value)) == len(value))


@frozen(kw_only=True)
class ExportsConfig:
    """`[exports]`: models for other tools, written to weights/step-N of the run directory when a checkpoint is saved."""

    every_n_saves: Positive = 1
    """Export at every n-th checkpoint of checkpoint.every_n_steps, and at the last one."""
    forms: Annotated[tuple[Literal["hf", "peft"], ...], _ONCE_EACH] = ("hf",)
    """"hf": a directory `model` in the Hugging Face format, with the adapters of [lora] merged. "peft": a directory `adapter`
    with the adapters alone, in PEFT's format."""
    keep: Positive | None = None
    """How many of the newest to keep; None for all. checkpoint.keep does not count them."""
