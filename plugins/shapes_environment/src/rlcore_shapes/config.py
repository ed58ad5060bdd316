"""The recipe section `[environment.drawn_shapes]`."""

from typing import Annotated

from attrs import frozen

from rlcore.schema.constraints import Positive, at_least


@frozen(kw_only=True)
class ShapesConfig:
    """`[environment.drawn_shapes]`: circles and squares in the cells of a grid, of which those of one kind are counted."""

    grid: Positive = 2
    """Cells in a row and in a column; each holds one shape at most."""
    cell_pixels: Annotated[int, at_least(8)] = 16
    """Pixels of a cell's side."""
    num_train: Positive = 5000
    """Drawings to train on."""
    num_evaluation: Positive = 200
    """Drawings held out."""
    drawing_seed: int = 0
    """The seed of the drawings. It is not run.seed, so that runs with different seeds, and a warm start before them, all
    hold out the same drawings."""
