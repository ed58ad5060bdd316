"""The section `[observers.profile]`."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Positive

STEPS = Constraint(
    "of two steps, the first at most the last",
    lambda steps: len(steps) == 2 and steps[0] <= steps[1],
    "[3, 5] are three steps, [3, 3] is one.",
)


@frozen(kw_only=True)
class ProfileConfig:
    """`[observers.profile]`: traces of some steps of the driver and of all ranks."""

    steps: Annotated[tuple[Positive, ...], STEPS] = (3, 3)
    """The first and the last step that are profiled. The first steps of a run also compile and fill caches."""
    profiler: Literal["torch", "nsight"] = "torch"
    """"torch": torch.profiler writes `profiles/step-000003/rank-0.json.gz` for Perfetto, a file a step and process. "nsight":
    ranges for `nsys profile --capture-range=cudaProfilerApi`; needs CUDA."""
    with_stack: bool = False
    """With "torch": record the lines of Python of each operation; slower."""
    with_memory: bool = False
    """With "torch": record allocations."""
